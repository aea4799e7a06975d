"""The target as a process: it sends Hello, verifies, reports errors and ends."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protocol.contracts.target_hosts import TargetHosts
from protocol.features.ring import FeatureRing
from protocol.inference.language_model import LanguageModel
from protocol.kv.segments import SegmentError
from protocol.messages.base import NodeId, RequestId
from protocol.messages.features import FINAL, Features, Tap, Taps
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Prefilled, Shutdown, Start
from tests.support.paths import DEMO_TARGET
from tests.support.processes import free_ports
from tests.support.worker_process import running


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_target_offers_features_and_its_rings_end_with_it(ranks: int, registry: Path):
    """Also of the last layer, whose output no KV of a prompt depends on: every rank of a divided target computes it."""
    hosts = TargetHosts(tuple((f"127.0.0.1:{port}",) for port in free_ports(2)), silence=30.0) if ranks > 1 else None
    with running("target_worker", "mlx", str(DEMO_TARGET), hosts=hosts) as target:
        assert target.hear().taps == Taps(layers=6, width=256)
        target.tell(Tap((FINAL, 1, 5)))
        prefilled = target.ask(Start(RequestId(1), 0, (5, 6, 7, 8, 9), NodeId(3), Sampling()))
        features = target.hear()
        assert isinstance(prefilled, Prefilled)
        assert isinstance(features, Features)
        assert (features.first, features.rows) == (0, 4)
        ring = FeatureRing.attach(features.name)
        assert ring.epoch == 3
        found = ring.read(0, 4, (FINAL, 1, 5))
        assert found is not None
        np.testing.assert_allclose(found, _rows((5, 6, 7, 8), (FINAL, 1, 5)), atol=1e-3)
        ring.close()

        target.tell(Shutdown())
        assert target.process.wait(30) == 0
    assert list(registry.iterdir()) == []
    with pytest.raises(SegmentError):
        FeatureRing.attach(features.name)


def _rows(tokens: Sequence[int], outputs: tuple[int, ...]) -> np.ndarray:
    model = LanguageModel.load(DEMO_TARGET)
    model.record(outputs)
    sequence = model.sequence()
    sequence.prefill(tokens)
    assert sequence.recorded is not None
    return np.array(sequence.recorded.rows)


def test_a_folder_without_a_model_is_named_in_the_last_message(tmp_path: Path):
    with running("target_worker", "mlx", str(tmp_path)) as target:
        fault = target.hear()

        assert isinstance(fault, Fault)
        assert fault.kind == "fatal"
        assert fault.text.startswith(f"{tmp_path} holds no model")
        assert target.process.wait(30) == 1
