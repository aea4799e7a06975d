"""KV of ended requests in the workers of another machine, played by real processes over loopback."""

from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.core.events import Arrived
from orchestrator.runtime.recording import replay
from protocol.messages.worker import Prefilled
from tests.conftest import Reference
from tests.end_to_end.test_attach import machine, named
from tests.support.processes import until

PROMPT = tuple(range(100, 220))
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24)


def adopted_by_the_draft(journal: Path) -> int:
    """The most tokens of a request that had KV at the draft already."""
    said = [event.message for event, _ in replay(journal) if isinstance(event, Arrived) and event.role == "draft"]
    return max((message.adopted for message in said if isinstance(message, Prefilled)), default=0)


@pytest.mark.thorough
def test_draft_and_target_of_another_machine_evaluate_a_repeated_prompt_once(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "server"))
    journal = tmp_path / "journal"
    with (
        Pipeline(listen="127.0.0.1:0", target_engine="none", draft_engine="none", record=str(journal)) as server,
        machine(tmp_path / "studio", "target", server.owner.invite().line, "--name", "studio"),
        machine(tmp_path / "mini", "draft", server.owner.invite().line, "--draft-engine", "mlx", "--name", "mini"),
    ):
        until(lambda: "mini" in named(server) and named(server)["mini"].status == "active")
        first = server.generate(PROMPT, PARAMS)
        second = server.generate(PROMPT, PARAMS)
        # On a busy machine the target may answer before the draft has evaluated the prompt.
        assert until(lambda: server.generate(PROMPT, PARAMS) and adopted_by_the_draft(journal) == len(PROMPT) - 1)
    own = reference(PROMPT, PARAMS).tokens

    assert (first.tokens, second.tokens) == (own, own)
    assert (first.statistics.adopted_tokens, second.statistics.adopted_tokens) == (0, len(PROMPT) - 1)


@pytest.mark.thorough
def test_an_owner_who_keeps_no_kv_is_obeyed_by_another_machine(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "server"))
    with (
        Pipeline(listen="127.0.0.1:0", target_engine="none", draft_engine="none", arena_memory=0) as server,
        machine(tmp_path / "studio", "target", server.owner.invite().line, "--prefix-cache-memory", "64"),
    ):
        results = [server.generate(PROMPT, PARAMS) for _ in range(2)]

    assert [result.statistics.adopted_tokens for result in results] == [0, 0]
    assert results[1].tokens == reference(PROMPT, PARAMS).tokens
