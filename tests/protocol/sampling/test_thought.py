"""Laws of thoughts before a grammar: any text, no end of the answer, and an end in time; then the grammar alone."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.messages.grammar import Calls, Grammar, Json, Thought
from protocol.sampling.grammar import GrammarError, flaw
from tests.protocol.sampling.test_grammar import CODEC, END, GRAMMARS, PERSON, SAID, VOCABULARY, allowed

FORM = Grammar(json.dumps(PERSON))
START, STOP = CODEC.encode("class")[0], CODEC.encode("return")[0]
OWN = Thought(((START,),), (STOP,))
"""The model may think."""
OPENED = Thought(((START,),), (STOP,), opened=True)
HEAD, MIDDLE = CODEC.encode("def")[0], CODEC.encode("import")[0]
LONG = Thought(((START,),), (HEAD, MIDDLE, STOP), opened=True, closing=(START, HEAD, MIDDLE, STOP))
WORDS = CODEC.encode("Let me see.\n")
ANSWER = CODEC.encode(SAID)
ALL = set(range(VOCABULARY))


def after(thought: Thought, tokens: Sequence[int], grammar: Grammar = FORM) -> set[int] | None:
    """Tokens that may follow; None if these tokens are not allowed."""
    try:
        return allowed(GRAMMARS.open(replace(grammar, thought=thought), (END,), tokens))
    except GrammarError:
        return None


def first(tokens: Sequence[int] = ()) -> set[int]:
    """What the grammar alone allows."""
    found = allowed(GRAMMARS.open(FORM, (END,), tokens))
    assert found is not None
    return found


@pytest.mark.parametrize(("thought", "start"), [(OWN, [START]), (OPENED, [])])
def test_a_thought_is_any_text_and_the_answer_fits_the_grammar(thought: Thought, start: list[int]):
    assert after(thought, start) == ALL - {END}
    assert after(thought, [*start, *WORDS, START]) == ALL - {END}
    assert after(thought, [*start, *WORDS, STOP, *CODEC.encode("\n\n"), *ANSWER]) == first(ANSWER)
    assert END in first(ANSWER)
    assert first() < (after(thought, [*start, *WORDS, STOP]) or set()) < ALL
    assert after(thought, [*start, *WORDS, END]) is None
    assert after(thought, [*start, STOP, *WORDS]) is None


def test_a_model_may_answer_without_a_thought():
    begin = after(OWN, [])

    assert begin is not None
    assert begin == first() | {START}
    assert after(OWN, ANSWER) == first(ANSWER)
    assert START not in (after(OWN, ANSWER[:1]) or ())


def test_a_long_start_marker_may_turn_out_to_be_none():
    thought = Thought(((START, HEAD), (MIDDLE, START, HEAD)), (STOP,))

    assert after(thought, [], Grammar("")) == ALL
    assert after(thought, [START], Grammar("")) == ALL
    assert after(thought, [START, HEAD], Grammar("")) == ALL - {END}
    assert after(thought, [START, MIDDLE, STOP, START, HEAD], Grammar("")) == ALL
    assert after(thought, [MIDDLE, START, HEAD], Grammar("")) == ALL - {END}
    assert after(thought, [START]) == {HEAD}
    assert {START, MIDDLE} <= (after(thought, []) or set())


@pytest.mark.parametrize("thought", [OPENED, LONG])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_closes_the_thought(thought: Thought, budget: int):
    limited = replace(thought, budget=budget)
    said = [WORDS[place % len(WORDS)] for place in range(budget)]

    for token in thought.closing or thought.end:
        assert after(limited, said) == {token}
        assert after(limited, [*said, WORDS[0]]) is None
        said.append(token)
    assert after(limited, [*said, *ANSWER]) == first(ANSWER)


def test_further_thoughts_share_the_budget():
    free, limited = Grammar(""), replace(OWN, budget=3, again=True)
    once = [*WORDS[:1], START, *WORDS[:2], STOP, *ANSWER]

    assert after(limited, once, free) == ALL
    assert after(limited, [*once, START], free) == ALL - {END}
    assert after(limited, [*once, START, WORDS[0]], free) == {STOP}
    assert after(limited, [*once, START, WORDS[0], STOP], free) == ALL
    assert after(limited, [*once, START, WORDS[0], STOP, START], free) == {STOP}
    assert after(limited, [*once, END, START], free) is None


def test_further_thoughts_are_found_behind_markers_of_several_tokens():
    thought = replace(LONG, starts=((START, HEAD),), budget=1, again=True)
    closed = [WORDS[0], *LONG.closing, *WORDS]

    assert after(thought, [*closed, START, HEAD], Grammar("")) == {START}
    assert after(thought, [*closed, START, WORDS[0], HEAD], Grammar("")) == ALL
    assert after(thought, [*closed, START, HEAD, *LONG.closing, *WORDS], Grammar("")) == ALL


def test_a_thought_may_end_before_its_budget():
    assert after(replace(OPENED, budget=9), [*WORDS[:2], STOP, *ANSWER]) == first(ANSWER)


def test_a_begun_end_marker_is_finished():
    assert after(LONG, [*WORDS, HEAD]) == ALL - {END}
    assert after(LONG, [*WORDS, HEAD, MIDDLE]) == {STOP}
    assert after(LONG, [*WORDS, HEAD, HEAD, MIDDLE, STOP, *ANSWER]) == first(ANSWER)
    assert after(LONG, [*WORDS, HEAD, WORDS[0], MIDDLE]) == ALL - {END}


def test_without_a_schema_only_the_thought_is_bound():
    free = Grammar("")

    assert after(OPENED, WORDS, free) == ALL - {END}
    assert after(OPENED, [*WORDS, STOP, *WORDS], free) == ALL
    assert after(OPENED, [*WORDS, STOP, END], free) is None
    assert flaw(free) is not None


@pytest.mark.parametrize("thought", [OWN, OPENED, replace(OPENED, budget=3), replace(LONG, budget=2)])
@pytest.mark.parametrize("schema", ["", FORM.schema])
@pytest.mark.parametrize("seed", range(2))
def test_looking_ahead_and_moving_agree(thought: Thought, schema: str, seed: int):
    source = random.Random(seed)
    thought = replace(thought, again=not schema)
    grammar = Grammar(schema, thought=thought)
    state, said = GRAMMARS.open(grammar, (END,), ()), list[int]()
    for _ in range(8):
        paths = [[], [START], [STOP], [HEAD, MIDDLE], [source.randrange(VOCABULARY)], [STOP, ANSWER[0]]]
        ahead = state.allowed(paths)
        for path, mask in zip(paths, ahead, strict=True):
            fresh: Any = after(thought, [*said, *path], Grammar(schema))
            assert fresh == (None if mask is None else set(np.flatnonzero(mask).tolist()))
        choices = np.flatnonzero(ahead[0]) if ahead[0] is not None else []
        if not len(choices):
            break
        said.append(STOP if source.random() < 0.1 and STOP in choices else int(source.choice(list(choices))))
        state.advance(said[-1:])


def test_a_flawed_thought_is_refused():
    assert flaw(Grammar("", thought=replace(OPENED, closing=(START,)))) is not None
    assert flaw(replace(FORM, thought=replace(OPENED, again=True))) is not None
    with pytest.raises(GrammarError, match="vocabulary"):
        GRAMMARS.open(Grammar("", thought=Thought(((START,),), (VOCABULARY,))), (END,), ())


def test_another_value_may_come_instead_of_a_call():
    form = (Json(FORM.schema), "\n</call>")
    calls = Calls((form,), start=("<call>\n",), separator=("\n",), repeats=True)
    either = Grammar('{"enum": ["none", {}]}', calls)
    call = f"<call>\n{SAID}\n</call>"

    def takes(text: str, grammar: Grammar) -> bool:
        try:
            return END in (allowed(GRAMMARS.open(grammar, (END,), CODEC.encode(text))) or ())
        except GrammarError:
            return False

    for said in ('"none"', "{}", call, f"{call}\n{call}"):
        assert takes(said, either)
    for said in ("none", SAID, f'"none"\n{call}', f'{call}\n"none"', call[:-3]):
        assert not takes(said, either)
    assert after(OPENED, [STOP, *CODEC.encode('\n"none"')], either) == {END}
