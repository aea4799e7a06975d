"""Laws of enforced calls: in each syntax, what the grammar allows is read as proper calls."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken

from orchestrator.http.openai.prompts import ChatPrompts
from orchestrator.http.openai.request import ChatRequest
from orchestrator.http.request_bodies import converted
from orchestrator.text.answer.parts import Call, Spoken
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.families.minimax import MUSE_SPARK
from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import GrammarError, Grammars, flaw
from tests.orchestrator.http.test_structured_output import FORM, tool
from tests.orchestrator.text.test_answer_parsers import joined
from tests.protocol.sampling.test_grammar import SAID
from tests.support.asked_server import CHAT, HELLO, post
from tests.support.call_syntaxes import SYNTAXES, Syntax
from tests.support.models.chat_models import model, takes

CASES = [
    (name, special)
    for name, syntax in SYNTAXES.items()
    for special in (None, True, False)
    if special is None or syntax.marks
]
"""Each syntax with markers that are special tokens, other tokens, and no tokens."""
SIDE = {"type": "object", "properties": {"to": {"$ref": "/$defs/side"}}, "required": ["to"]}
SIDE |= {"additionalProperties": False, "$defs": {"side": {"enum": ["left", "right"]}}}
TURN, TURN_BACK = tool("turn", SIDE), tool("turn_back", {"type": "object", "maxProperties": 0})
LEFT, BACK = ("turn", {"to": "left"}), ("turn_back", {})


class Model(NamedTuple):
    syntax: Syntax
    template: ChatTemplate

    def bound(self, **asked: Any) -> Grammar:
        question = converted({**HELLO, "tools": [TURN, TURN_BACK], **asked}, ChatRequest)
        grammar = ChatPrompts(self.template).render(question).grammar
        assert grammar is not None
        assert flaw(grammar) is None
        return grammar

    def takes(self, grammar: Grammar, said: str) -> bool:
        return takes(self.template, grammar, said)

    def read(self, said: str, tools: Sequence[Any] = (TURN, TURN_BACK)) -> list[tuple[str, Any] | str]:
        question = converted({**HELLO, "tools": [*tools]}, ChatRequest)
        parser = ChatPrompts(self.template).render(question).new_parser()
        parts = joined([*parser.push(said), *parser.finish()])
        assert all(isinstance(part, Call | Spoken) for part in parts)
        return [
            (part.name, json.loads(part.arguments)) if isinstance(part, Call) else part.text
            for part in parts
            if isinstance(part, Call | Spoken)
        ]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def answering(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, special = request.param
    syntax = SYNTAXES[name]
    added = [AddedToken(mark, special=special, normalized=False) for mark in syntax.marks if special is not None]
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{#" + syntax.template + "#}"
    if name == "json":
        source = source.replace("{#", "").replace("#}", "")
    return Model(syntax, model(tmp_path_factory.mktemp("model"), source, added))


STRICT = {**TURN, "function": {**TURN["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "turn_back"}}
WRONG_CALLS: list[Any] = [[("turn", {"to": "up"})], [("turn", {})], [("other", {})]]
FORMS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    # What is asked, what is allowed, and what is not: texts, calls, and calls between texts.
    "demanded": (
        {"tool_choice": "required"},
        [[LEFT], [BACK], [LEFT, BACK, LEFT]],
        ["No.", *WRONG_CALLS, ("Well. ", [LEFT], ""), ("", [LEFT], "."), ("", [LEFT], None)],
    ),
    "one": ({"tool_choice": "required", "parallel_tool_calls": False}, [[LEFT]], [[LEFT, BACK]]),
    "named": ({"tool_choice": NAMED}, [[BACK]], [[LEFT]]),
    "strict": (
        {"tools": [STRICT, TURN_BACK]},
        ["", "I turn.", [LEFT], ("I turn.\n", [LEFT], ""), [LEFT, BACK]],
        [WRONG_CALLS[0], ("Well. ", WRONG_CALLS[2], ""), ("", [LEFT], None)],
    ),
    "in form": (
        {"response_format": FORM},
        [SAID, [LEFT], [LEFT, BACK]],
        ["No.", (SAID, [LEFT], ""), [("turn", {"to": 1})]],
    ),
}


def spelt(syntax: Syntax, said: Any) -> str:
    """None behind calls cuts their last character off."""
    match said:
        case str():
            return said
        case list():
            return syntax.written(said)
        case _:
            before, calls, behind = said
            written = before + syntax.written(calls)
            return written[:-1] if behind is None else written + behind


@pytest.mark.sampled(3)
def test_calls_are_of_offered_functions_with_arguments_of_their_schemas(answering: Model):
    syntax = answering.syntax
    for name, (asked, allowed, refused) in FORMS.items():
        if name == "in form" and syntax == SYNTAXES["llama3"]:
            error = post(CHAT, {**HELLO, "tools": [TURN], **asked}, template=answering.template).json()["error"]
            assert (error["param"], "are JSON too" in error["message"]) == ("tools", True)
            continue
        grammar = answering.bound(**asked)
        assert [said for said in allowed if not answering.takes(grammar, spelt(syntax, said))] == [], name
        assert [said for said in refused if answering.takes(grammar, spelt(syntax, said))] == [], name
    # No marker is a token here.
    begun = syntax.written([LEFT])
    strict = answering.bound(**FORMS["strict"][0])
    assert not takes(answering.template, strict, *f"Well. {begun[: max(25, len(begun) // 2)]}")


WHOLE = {"type": "object", "properties": {"x": {"type": "integer"}, "label": {"type": "string"}}, "required": ["x"]}
KINDS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "words": {"type": ["string", "null"]},
        "size": {"enum": ["small", "very large", 3]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["count", "tags"],
    "additionalProperties": False,
    "$defs": {"place": {**WHOLE, "additionalProperties": False}},
}
TEXTS = ["", "5", "null", "true", "a < b & c", "two\nlines", 'it\'s "so"', "</para", "[1]", "x: 1, y", "ü☃"]
SOME: dict[str, Callable[[random.Random], Any]] = {
    "text": lambda source: source.choice(TEXTS),
    "count": lambda source: source.choice([0, -7, 9_007_199_254_740_993]),
    "ratio": lambda source: source.choice([0.5, -1.25]),
    "flag": lambda source: source.random() < 0.5,
    "maybe": lambda source: source.choice([None, 3]),
    "words": lambda source: source.choice([None, *(text for text in TEXTS if text != "null")]),
    "size": lambda source: source.choice(["small", "very large", 3]),
    "tags": lambda source: source.sample(["a", "b c", "d"], source.randrange(3)),
    "place": lambda source: {"x": 1, "label": "here"} if source.random() < 0.5 else {"x": 2},
}
WRONG = [
    ("count", 1.5),
    ("count", "many"),
    ("maybe", [1]),
    ("flag", 1),
    ("size", "medium"),
    ("tags", [1]),
    ("place", {}),
]
FLAT = ("tags", "place")
"""What function_gemma's calls can't have."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(3))
def test_arguments_are_held_to_their_types_and_read_as_them(answering: Model, seed: int):
    source = random.Random(seed)
    flat = answering.syntax == SYNTAXES["function_gemma"]
    names = [name for name in SOME if not (flat and name in FLAT)]
    kinds = {**KINDS, "properties": {name: KINDS["properties"][name] for name in names}}
    kinds["required"] = [name for name in KINDS["required"] if name in names]
    tools = [tool("f", kinds)]
    grammar = answering.bound(tools=tools, tool_choice="required")

    for _ in range(6):
        chosen = [name for name in names if name in kinds["required"] or source.random() < 0.6]
        arguments = {name: SOME[name](source) for name in chosen}
        written = answering.syntax.written([("f", arguments)])
        assert answering.takes(grammar, written), written
        assert answering.read(written, tools) == [("f", arguments)]
        name, wrong = source.choice([(name, wrong) for name, wrong in WRONG if name in names])
        changed = {key: {**arguments, name: wrong}[key] for key in names if key in {*arguments, name}}
        assert not answering.takes(grammar, answering.syntax.written([("f", changed)])), changed
    assert not answering.takes(grammar, answering.syntax.written([("f", {"text": "a"})]))


@pytest.mark.sampled(5)
def test_what_a_strict_function_s_schema_says_is_enforced_or_refused(answering: Model):
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[0-9]+$"}}, "required": ["a"]}
    strict = tool("f", {**pattern, "additionalProperties": False}, strict=True)
    response = post(CHAT, {**HELLO, "tools": [strict], "tool_choice": "required"}, template=answering.template)
    if response.status_code == 400:
        assert "'a' in the strict function 'f' can't be enforced" in response.json()["error"]["message"]
        return
    grammar = answering.bound(tools=[strict], tool_choice="required")
    assert answering.takes(grammar, answering.syntax.written([("f", {"a": "12"})]))
    assert not answering.takes(grammar, answering.syntax.written([("f", {"a": "x"})]))


def test_what_the_grammar_allows_is_read_as_calls(answering: Model):
    assert answering.read(answering.syntax.written([LEFT, BACK])) == [LEFT, BACK]
    codec = answering.template.codec
    end = min(codec.eos)
    rules = Grammars(answering.template.folder, 1 << 13).open(answering.bound(tool_choice="required"), (end,), ())
    source, tokens = random.Random(1), []
    shown = ChatPrompts(answering.template).form.shown
    while end not in tokens and len(tokens) < 300:
        (mask,) = rules.allowed([()])
        assert mask is not None
        tokens.append(end if mask[end] else int(source.choice(mask.nonzero()[0])))
        rules.advance(tokens[-1:])

    assert tokens[-1] == end
    found = answering.read(codec.decode(tokens[:-1], shown))
    assert found
    assert all(call == BACK or call in (LEFT, ("turn", {"to": "right"})) for call in found), found


@pytest.mark.sampled(1)
def test_a_syntax_whose_texts_can_not_be_told_from_numbers_is_not_bound(answering: Model):
    assert MUSE_SPARK.writer(answering.template) is None


@pytest.mark.sampled(3)
def test_a_token_beyond_the_vocabulary_is_refused(answering: Model):
    grammar = answering.bound(tool_choice="required")
    assert grammar.calls is not None
    beyond = replace(grammar, calls=replace(grammar.calls, start=(1 << 19,)))
    with pytest.raises(GrammarError):
        Grammars(answering.template.folder, 1 << 13).open(beyond, tuple(answering.template.codec.eos), ())
