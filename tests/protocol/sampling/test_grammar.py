"""Laws of grammars and of thoughts before them: the allowed tokens depend only on the tokens before."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from orchestrator.text.tokenizer import TextCodec
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.grammar import Calls, Grammar, Json, Thought
from protocol.sampling.grammar import GrammarError, Grammars, flaw
from protocol.sampling.thought import TokenRules, closing_token, free_position
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
VOCABULARY = 4096
CODEC = TextCodec(DEMO)
END = 0
GRAMMARS = Grammars(DEMO, VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
BEFORE, AFTER = "<tool_call>\n", "\n</tool_call>"
ONE = Calls(((Json(json.dumps(PERSON)), AFTER),), start=(BEFORE,), separator=("\n",))
CALL = Grammar("", ONE)
CALLS = Grammar("", replace(ONE, repeats=True))
PERHAPS = Grammar("", replace(ONE, optional=True))
SAID = '{"name": "Bob", "age": 3, "tags": ["a", "ccc"]}'
FORMS = {"plain": Grammar(json.dumps(PERSON)), "call": CALL, "calls": CALLS, "perhaps": PERHAPS}


def opened(grammar: Grammar, text: str = "") -> TokenRules:
    return GRAMMARS.open(grammar, (END,), CODEC.encode(text))


def allowed(state: TokenRules, path: tuple[int, ...] = ()) -> set[int] | None:
    (mask,) = state.allowed([path])
    return None if mask is None else set(np.flatnonzero(mask).tolist())


def takes(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a complete text of the grammar."""
    try:
        return END in (allowed(opened(grammar, text)) or ())
    except GrammarError:
        return False


def wandered(grammar: Grammar, source: random.Random, steps: int) -> list[int]:
    """Random tokens that the grammar allows, up to an end token or `steps`."""
    state, tokens = opened(grammar), []
    for _ in range(steps):
        tokens.append(source.choice(sorted(allowed(state) or ())))
        if tokens[-1] == END:
            break
        state.advance(tokens[-1:])
    return tokens


def afresh(grammar: Grammar, tokens: list[int]) -> set[int] | None:
    try:
        return allowed(GRAMMARS.open(grammar, (END,), tokens))
    except GrammarError:
        return None


@pytest.mark.parametrize("grammar", FORMS.values(), ids=[*FORMS])
@pytest.mark.parametrize("seed", range(2))
def test_allowed_tokens_depend_only_on_the_tokens_before(grammar: Grammar, seed: int):
    source = random.Random(seed)
    whole = wandered(grammar, source, 40)
    known = source.randrange(len(whole))
    state = GRAMMARS.open(grammar, (END,), whole[:known])
    for _ in range(6):
        tree = [tuple(whole[known : known + source.randrange(len(whole) - known + 1)]) for _ in range(5)]
        tree += [(*path, source.randrange(VOCABULARY)) for path in tree]
        source.shuffle(tree)

        for path, mask in zip(tree, state.allowed(tree), strict=True):
            expected = None if END in path else afresh(grammar, [*whole[:known], *path])
            assert (mask is None) == (expected is None)
            assert mask is None or set(np.flatnonzero(mask)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_text_that_ends_by_itself_fits_the_schema(seed: int):
    tokens = wandered(FORMS["plain"], random.Random(seed), 400)

    assert tokens[-1] == END
    person = json.loads(CODEC.decode(tokens))
    assert person.keys() == PERSON["properties"].keys()
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 150
    assert len(person["tags"]) <= 3
    assert {"a", "bb", "ccc"} >= set(person["tags"])


def test_behind_its_end_only_an_end_token_is_allowed():
    assert allowed(opened(FORMS["plain"], SAID)) == {END}
    assert allowed(opened(FORMS["plain"], SAID), (END,)) is None
    assert END not in (allowed(opened(FORMS["plain"], SAID[:-1])) or ())


def test_every_end_token_of_a_model_is_one():
    state = GRAMMARS.open(FORMS["plain"], (END, 7), CODEC.encode(SAID))

    assert allowed(state) == {END, 7}


@pytest.mark.parametrize("text", [SAID, SAID.replace(" ", ""), '{\n  "name": "",\n  "age": 0,\n  "tags": []\n}'])
def test_usual_line_breaks_are_allowed_and_unlimited_ones_are_not(text: str):
    assert takes(FORMS["plain"], text)
    assert not takes(FORMS["plain"], text.replace('"age"', "\n" * 3 + '"age"'))
    assert not takes(FORMS["plain"], text + "\n")


def test_a_call_is_framed_and_only_a_repeating_grammar_repeats_it():
    call = BEFORE + SAID + AFTER

    for grammar, once, twice, none in ((CALL, True, False, False), (CALLS, True, True, False)):
        assert (takes(grammar, call), takes(grammar, f"{call}\n{call}"), takes(grammar, "")) == (once, twice, none)
    assert not takes(CALLS, f"{call}\n")


@pytest.mark.parametrize("text", ["", "Hello", "a < b\n{}", "Hm. <tool_call>\n" + SAID + "\n</tool_call>\n"])
def test_an_optional_call_is_enforced_once_it_begins(text: str):
    assert takes(PERHAPS, text)
    assert not takes(PERHAPS, text + "<tool_call>")
    assert not takes(PERHAPS, text + '<tool_call>\n{"name": 3')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"const": NaN}', "not valid JSON"),
        ('{"type": "nonsense"}', "nonsense"),
        ('{"not": {}}', "not"),
        ('{"$ref": "https://example.org/s"}', "not present"),
        ('{"type": "string", "pattern": "("}', "unclosed"),
        ("false", "nsatisfiable"),
        ("[" * 5000, "not valid JSON"),
        ('{"items":' * 70 + "{}" + "}" * 70, "nested deeper"),
        ('{"type": "integer", "multipleOf": 123456789}', "multipleOf"),
        (json.dumps({"enum": ["x" * MAX_SCHEMA]}), "characters"),
        ('{"type": "integer", "multipleOf": 1e9}', "multipleOf"),
        (json.dumps({"items": [{"multipleOf": 9000}, {"multipleOf": 1e-9 * 9001}]}), "multipleOf"),
        (json.dumps({"allOf": [{"pattern": f".*{letter}.*"} for letter in "abcde"]}), "allOf"),
        (json.dumps({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), "multipleOf"),
    ],
)
def test_an_unenforceable_schema_is_refused_before_generation(schema: str, reason: str):
    told = flaw(Grammar(schema))

    assert told is not None
    assert reason in told
    assert "x-guidance" not in told
    with pytest.raises(GrammarError):
        GRAMMARS.open(Grammar(schema), (END,), ())


@pytest.mark.parametrize("schema", ["true", "{}", '{"type": "object"}', json.dumps(PERSON)])
def test_an_enforceable_schema_has_no_flaw(schema: str):
    assert flaw(Grammar(schema)) is None


def test_a_schema_can_not_inject_grammar_rules():
    """Strings in a schema are escaped in the generated grammar."""
    hostile = json.dumps({"const": 'x"\nstart: /.*/\n', "title": '}\nTEXT: "'})

    assert takes(Grammar(hostile), json.dumps('x"\nstart: /.*/\n'))
    assert not takes(Grammar(hostile), "anything")


def test_a_model_without_an_end_or_a_tokenizer_can_not_follow_a_grammar(tmp_path: Path):
    with pytest.raises(GrammarError, match="end-of-sequence"):
        GRAMMARS.open(FORMS["plain"], (VOCABULARY + 3,), ())
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars(tmp_path, VOCABULARY).open(FORMS["plain"], (END,), ())


def test_disallowed_tokens_have_no_mask_and_end_the_state():
    state = opened(FORMS["plain"], '{"name":')
    strange = CODEC.encode("}")

    assert allowed(state, tuple(strange)) is None
    assert allowed(state) is not None
    state.advance(strange)
    with pytest.raises(GrammarError, match="the text does not match it"):
        allowed(state)
    with pytest.raises(GrammarError, match="the text does not match it"):
        opened(FORMS["plain"], "Hello")


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


def test_a_budget_does_not_end_a_thought_in_a_call():
    limited = replace(OPENED, budget=5, calls=(HEAD,))

    assert after(limited, [*WORDS[:2], HEAD, *WORDS, *WORDS], Grammar("")) == ALL
    assert after(limited, [HEAD, *WORDS]) is None


def test_further_thoughts_share_the_budget():
    free, limited = Grammar(""), replace(OWN, budget=3, again=True)
    once = [*WORDS[:1], START, *WORDS[:2], STOP, *ANSWER]

    assert after(limited, once, free) == ALL
    assert after(limited, [*once, START], free) == ALL - {END}
    assert after(limited, [*once, START, WORDS[0]], free) == {STOP}
    assert after(limited, [*once, START, WORDS[0], STOP], free) == ALL
    assert after(limited, [*once, START, WORDS[0], STOP, START], free) == {STOP}
    assert after(limited, [*once, END, START], free) is None
    assert after(replace(limited, calls=(HEAD,)), [*once, START, HEAD, *WORDS], free) == ALL, "a call is none of it"


def test_a_mark_of_several_tokens_goes_on_where_it_was_left():
    said = ([], [HEAD], [HEAD, HEAD], [HEAD, MIDDLE], [HEAD, WORDS[0]], [HEAD, MIDDLE, STOP])

    assert [closing_token(LONG, free_position(LONG, each)) for each in said] == [HEAD, MIDDLE, MIDDLE, STOP, HEAD, None]


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

    for said in ('"none"', "{}", call, f"{call}\n{call}"):
        assert takes(either, said)
    for said in ("none", SAID, f'"none"\n{call}', f'{call}\n"none"', call[:-3]):
        assert not takes(either, said)
    assert after(OPENED, [STOP, *CODEC.encode('\n"none"')], either) == {END}
