"""Behind long contexts, where a further row reads the KV once more, the pipeline verifies less. In virtual time."""

from typing import Literal

import pytest
from msgspec.structs import replace

from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.worker.pacing import DevicePace
from tests.support.simulation import modelled_pipeline

M4 = Devices.of(load_profile("m4-qwen3-8b"))
ONE = M4.target.forward(1)
KINDS: dict[str, DevicePace] = {
    "full": M4.target,
    "latent": replace(M4.target, vector_queries=64),  # bound by arithmetic: each row costs the same
    "windows": replace(M4.target, context_seconds=M4.target.context_seconds / 6),
    "hybrid": replace(M4.target, context_seconds=M4.target.context_seconds / 4),
    "experts": replace(
        M4.target,
        # Of 128 experts a row reads 8: w rows read 16 (1 - (15 / 16)^w) times as many.
        steps=tuple((w, ONE * (0.3 + 0.7 * 16 * (1 - (15 / 16) ** w))) for w in range(1, 33)),
        shape="line",
        context_seconds=M4.target.context_seconds / 2,
    ),
}
"""On an M4, by kind of layer: what a forward costs behind a context."""
TOKENS = 96


def seconds(kind: str, strategy: Literal["ar", "adaptive"], context: int, accept: float) -> float:
    """Of decoding behind a prompt of so many tokens, once a request before has shown what the draft is worth. The draft
    reads prompts at once and slows the target down nowhere: only verification costs."""
    devices = Devices(
        target=KINDS[kind], draft=replace(M4.draft, prefill_rate=1e6), baseline_draft=M4.baseline_draft, slow_down=1.0
    )
    options = Options(strategy=strategy, placement="apart", lookup="off")
    simulation = modelled_pipeline(options, ModelledLanguage(AcceptanceModel(accept=accept)), devices)
    for number in (1, 2):
        last = simulation.submit(number, TOKENS, prompt=tuple(range(number, number + context)))
        simulation.run()
    client = simulation.clients[last]
    assert client.tokens == client.reference
    assert client.statistics is not None
    return client.statistics.elapsed - client.statistics.time_to_first_token


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accept", [0.25, 0.6])
@pytest.mark.parametrize("context", [8192, 32_768])
@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_long_context_no_kind_of_layers_is_slower_than_plain_decoding(kind: str, context: int, accept: float):
    assert seconds(kind, "ar", context, accept) > 0.98 * seconds(kind, "adaptive", context, accept)
