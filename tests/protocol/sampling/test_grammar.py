"""Laws of grammars: the allowed tokens depend only on the tokens before; an unenforceable grammar is refused."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from orchestrator.text.tokenizer import TextCodec
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.grammar import Calls, Grammar, Json
from protocol.sampling.grammar import GrammarError, Grammars, flaw
from protocol.sampling.token_rules import TokenRules
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
