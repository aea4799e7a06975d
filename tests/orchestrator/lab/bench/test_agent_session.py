"""An agent's session: its prompts share what an agent's do, and with the KV of real models only new tokens are read."""

from collections.abc import Sequence

import pytest

from orchestrator.lab.bench.agent_session import (
    RESTART,
    Session,
    SessionMemory,
    SessionTurn,
    measure_session,
    session_findings,
    session_memory,
)
from orchestrator.lab.bench.shapes import SHAPES
from orchestrator.lab.findings import Listener
from protocol.errors import InputError


def turns(first: int, count: int) -> list[tuple[str, int, int]]:
    """Kind, tokens, and tokens that are shared, where every answer is three tokens."""
    session, found = Session(first, count), []
    for kind, prompt in session.prompts():
        found.append((kind, len(prompt), session.shared(prompt)))
        session.answered(kind, prompt, (1, 2, 3))
    return found


def test_every_turn_shares_what_was_said_before_it():
    found = turns(25_000, 30)
    kinds = [kind for kind, _, _ in found]
    fresh = [tokens - shared for kind, tokens, shared in found if kind == "turn"]

    assert {kinds.count(kind) for kind in ("another conversation", "a reminder in the middle", "an edited turn")} == {1}
    assert kinds[-1] == RESTART
    assert all(300 <= new <= 2_000 + 3 for new in fresh)


def test_a_scaled_session_has_scaled_turns():
    assert [kind for kind, _, _ in turns(1_000, 30)] == [kind for kind, _, _ in turns(25_000, 30)]
    assert max(tokens - shared for _, tokens, shared in turns(1_000, 30)[1:]) <= 300


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_agent_s_turns_read_only_what_is_new(shape: str):
    """Qwen3.8's states are not scaled and fill the scaled memory: a branch of the edited turn may be gone."""
    found = measure_session(shape, Listener(), first=400, turns=9)
    measured: Sequence[object] = found.figures["turns"]
    again = [check for check in found.checks if check.name != "memory"]

    assert len(measured) == 11
    assert len(again) <= (1 if shape == "qwen3.8-27b" else 0)


def test_more_memory_than_the_budget_is_told():
    turn = SessionTurn(
        kind="turn",
        prompt=10,
        shared=5,
        cached=5,
        first_token=0.1,
        saving=0.001,
        target=900,
        most=950,
        orchestrator=1,
        shared_memory=101,
    )
    memory = SessionMemory(24, 10, 1000)

    assert not session_findings("qwen3-8b", [turn], memory, 1001).checks
    (check,) = session_findings("qwen3-8b", [turn], memory, 1000).checks
    assert check.name == "memory"


def test_a_session_that_is_longer_than_the_context_is_refused():
    with pytest.raises(InputError, match="fewer turns"):
        measure_session("qwen3-8b", Listener(), first=25_000, turns=30)


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_scaled_as_the_prompts_are_and_keeps_both_conversations(shape: str):
    small, large = session_memory(shape, 2_000, 9), session_memory(shape, 20_000, 9)

    assert small.gb == large.gb
    assert small.tokens == pytest.approx(large.tokens / 10, abs=1)
    assert large.tokens >= 20_000 + 20_000
