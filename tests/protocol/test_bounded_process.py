"""Laws of bounded processes that need no process; the others are those of what runs in them (`test_grammar_check.py`,
`test_chat_template.py`)."""

import resource

import pytest

from protocol.bounded_process import limit_memory

MIB = 1 << 20


@pytest.mark.parametrize("has", [0, 30 * MIB, 400 << 30])
def test_a_system_that_takes_no_limit_below_what_a_process_has_gets_one_above_it(
    monkeypatch: pytest.MonkeyPatch, has: int
):
    given = [0]

    def take(_: int, limits: tuple[int, int]) -> None:
        if limits[0] < has:
            raise ValueError
        given[0] = limits[0]

    monkeypatch.setattr(resource, "setrlimit", take)
    limit_memory(resource.RLIMIT_AS, 512 * MIB)

    assert given[0] == 512 * MIB if has < 512 * MIB else has + 512 * MIB <= given[0] <= has + 600 * MIB
