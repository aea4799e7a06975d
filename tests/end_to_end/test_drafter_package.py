"""A trained drafter as a Core ML package in real processes: it gets live features, and changes no token."""

import os
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from draft_worker.drafters.eagle3 import Eagle3, Eagle3Form
from draft_worker.drafters.eagle3_checkpoint import write_eagle3
from orchestrator import Pipeline, SamplingParams
from orchestrator.core.events import Arrived
from orchestrator.runtime.recording import replay
from protocol.contracts.coreml.conversion import Choices
from protocol.messages.worker import Grow, Verdict
from tests.conftest import Reference
from tests.support.models.drafter_packages import converted
from tests.support.paths import DEMO_TARGET
from tests.support.processes import mark, members, remains, until

TEXT = "def quicksort(items):\n    return "
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=2)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that guesses the root's own token: its layer adds nothing, and its state is the target's last one of
    the token before the root."""
    root = tmp_path_factory.mktemp("drafter")
    target: Any = load_model(DEMO_TARGET)[0]
    arguments = target.args
    width, last = arguments.hidden_size, arguments.num_hidden_layers - 1
    form = Eagle3Form(
        outputs=(0, last),
        hidden_size=width,
        intermediate_size=width,
        heads=arguments.num_attention_heads,
        kv_heads=arguments.num_attention_heads,
        head_dim=width // arguments.num_attention_heads,
        vocabulary=arguments.vocab_size,
        head_size=arguments.vocab_size,
        target_width=width,
        own_head=False,
    )
    network = Eagle3(form)
    network.update(tree_map(mx.zeros_like, network.parameters()))
    network.fc.weight = mx.concatenate([mx.zeros((width, width)), mx.eye(width)], axis=1)
    network.norm.weight = target.model.norm.weight.astype(mx.float32)
    write_eagle3(root / "drafter", network, mx.float32)
    converted(root / "drafter", DEMO_TARGET, root / "package", Choices(widths=(1, 4), context=128))
    return root / "package"


def roots_and_guesses(journal: Path) -> list[tuple[int, int]]:
    """The token of each root whose features had all come, and the first guess behind it."""
    messages = [event.message for event, _ in replay(journal) if isinstance(event, Arrived)]
    bonus = {(each.sequence, each.round + 1): each.bonus for each in messages if isinstance(each, Verdict)}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for each in messages:
        if isinstance(each, Grow) and each.tokens and each.staleness == 0 and (each.sequence, each.round) in bonus:
            found.setdefault((each.sequence, each.round), (bonus[each.sequence, each.round], each.tokens[0]))
    return list(found.values())


@pytest.mark.thorough
def test_the_package_reads_the_live_features_and_tokens_are_the_target_s(
    package: Path, reference: Reference, tmp_path: Path
):
    journal = tmp_path / "journal"
    with Pipeline(str(DEMO_TARGET), str(package), strategy="sd", draft_tokens=1, record=str(journal)) as pipeline:
        name = mark(pipeline)
        result = pipeline.generate(TEXT, PARAMS)

    assert result.tokens == reference(TEXT, PARAMS).tokens
    pairs = roots_and_guesses(journal)
    assert len(pairs) >= 10
    # At T = 0.8 noise decides between near tokens; without features the guesses would have nothing of the roots.
    assert sum(root == guess for root, guess in pairs) >= 0.3 * len(pairs)
    assert remains(name) == []


@pytest.mark.thorough
def test_a_killed_package_goes_on_with_features(package: Path, reference: Reference):
    params = SamplingParams(max_tokens=120)
    with Pipeline(str(DEMO_TARGET), str(package)) as pipeline:
        name = mark(pipeline)
        with pipeline.stream(TEXT, params) as stream:
            for count, _ in enumerate(stream):
                if count == 5:
                    os.kill(until(lambda: members(name).get("draft_worker")), signal.SIGKILL)
        assert stream.result is not None
        again = pipeline.generate(TEXT, params)

    assert stream.result.tokens == again.tokens == reference(TEXT, params).tokens
    assert remains(name) == []
