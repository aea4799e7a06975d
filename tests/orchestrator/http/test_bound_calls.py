"""Laws of enforced calls: in each syntax whose arguments are JSON, what the grammar allows is read as proper calls."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken

from orchestrator.http.chat_prompts import ChatPrompts
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.request_bodies import converted
from orchestrator.text.answer.bound_calls import call_writer
from orchestrator.text.answer.parts import Call, Spoken
from orchestrator.text.answer.tool_syntax import ToolSyntax
from orchestrator.text.chat_template import ChatTemplate
from protocol.messages.sampling import Grammar
from protocol.sampling.grammar import GrammarError, Grammars, flaw
from tests.orchestrator.http.test_rules import CHAT, HELLO, post
from tests.orchestrator.http.test_structured_output import FORM, tool
from tests.orchestrator.http.test_thinking import model, takes
from tests.protocol.sampling.test_grammar import SAID

Called = Sequence[tuple[str, Any]]


class Syntax(NamedTuple):
    template: str
    """What its chat template has beside the tools."""
    marks: tuple[str, ...]
    written: Callable[[Called], str]


def _json(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
OPEN, CLOSE, BEGIN, END, SEPARATOR = DEEPSEEK
SYNTAXES = {
    "json": Syntax(
        '<tool_call>{"name": ..., "arguments": ...}</tool_call>',
        ("<tool_call>", "</tool_call>"),
        lambda calls: "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls),
    ),
    "llama 3": Syntax(
        '"parameters": dictionary of argument name',
        (),
        lambda calls: "\n".join(_json(*call, key="parameters") for call in calls),
    ),
    "mistral": Syntax(
        "[TOOL_CALLS] [ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls),
    ),
    "older mistral": Syntax(
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        lambda calls: f"[TOOL_CALLS] [{', '.join(_json(*call) for call in calls)}]",
    ),
    "deepseek v3": Syntax(
        f"{BEGIN}{SEPARATOR}```json",
        DEEPSEEK,
        lambda calls: (
            OPEN
            + "\n".join(
                f"{BEGIN}function{SEPARATOR}{name}\n```json\n{json.dumps(arguments)}\n```{END}"
                for name, arguments in calls
            )
            + CLOSE
        ),
    ),
    "deepseek v3.1": Syntax(
        f"{BEGIN}{SEPARATOR}",
        DEEPSEEK,
        lambda calls: (
            OPEN + "".join(f"{BEGIN}{name}{SEPARATOR}{json.dumps(arguments)}{END}" for name, arguments in calls) + CLOSE
        ),
    ),
}
CASES = [
    (name, special)
    for name, syntax in SYNTAXES.items()
    for special in (None, True, False)
    if special is None or syntax.marks
]
"""Each syntax with markers that are special tokens, other tokens, and no tokens."""
SIDE = {"type": "object", "properties": {"to": {"$ref": "#/$defs/side"}}, "required": ["to"]}
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

    def takes_letters(self, grammar: Grammar, said: str) -> bool:
        """Whether the grammar allows `said` as a complete answer in which no marker is a token."""
        codec = self.template.codec
        tokens = [token for letter in said for token in codec.encode(letter, special=False)]
        try:
            rules = Grammars(self.template.folder, 1 << 13).open(grammar, tuple(codec.eos), tokens)
        except GrammarError:
            return False
        (mask,) = rules.allowed([()])
        return mask is not None and bool(mask[list(codec.eos)].any())

    def read(self, said: str) -> list[tuple[str, Any] | str]:
        question = converted({**HELLO, "tools": [TURN, TURN_BACK]}, ChatRequest)
        parser = ChatPrompts(self.template).render(question).new_parser()
        parts = [*parser.push(said), *parser.finish()]
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


@pytest.mark.sampled(5)
def test_demanded_calls_are_of_offered_functions_with_arguments_of_their_schemas(answering: Model):
    written = answering.syntax.written
    grammar = answering.bound(tool_choice="required")

    for calls in ([LEFT], [BACK], [LEFT, BACK, LEFT]):
        assert answering.takes(grammar, written(calls))
    for said in ("No.", written([("turn", {"to": "up"})]), written([("turn", {})]), written([("other", {})])):
        assert not answering.takes(grammar, said)
    for said in ("Well. " + written([LEFT]), written([LEFT]) + ".", written([LEFT])[:-1]):
        assert not answering.takes(grammar, said)
    one = answering.bound(tool_choice="required", parallel_tool_calls=False)
    assert answering.takes(one, written([LEFT]))
    assert not answering.takes(one, written([LEFT, BACK]))
    named = answering.bound(tool_choice={"type": "function", "function": {"name": "turn_back"}})
    assert answering.takes(named, written([BACK]))
    assert not answering.takes(named, written([LEFT]))


@pytest.mark.sampled(5)
def test_strict_calls_are_optional_and_proper(answering: Model):
    written = answering.syntax.written
    strict = {**TURN, "function": {**TURN["function"], "strict": True}}
    grammar = answering.bound(tools=[strict, TURN_BACK])

    for said in ("", "I turn.", written([LEFT]), "I turn.\n" + written([LEFT]), written([LEFT, BACK])):
        assert answering.takes(grammar, said)
    for said in (written([("turn", {"to": "up"})]), "Well. " + written([("other", {})]), written([LEFT])[:-1]):
        assert not answering.takes(grammar, said)
    assert not answering.takes_letters(grammar, f"Well. {written([LEFT])[:25]}")


@pytest.mark.sampled(5)
def test_the_answer_has_the_form_or_consists_of_calls(answering: Model):
    if answering.syntax == SYNTAXES["llama 3"]:
        asked = {**HELLO, "tools": [TURN], "response_format": FORM}
        error = post(CHAT, asked, template=answering.template).json()["error"]
        assert (error["param"], "are JSON too" in error["message"]) == ("response_format", True)
        return
    grammar = answering.bound(response_format=FORM)

    for said in (SAID, answering.syntax.written([LEFT]), answering.syntax.written([LEFT, BACK])):
        assert answering.takes(grammar, said)
    for said in ("No.", SAID + answering.syntax.written([LEFT]), answering.syntax.written([("turn", {"to": 1})])):
        assert not answering.takes(grammar, said)


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


def test_a_syntax_whose_arguments_are_no_json_is_not_bound(answering: Model):
    assert call_writer(ToolSyntax("glm47"), answering.template) is None


def test_too_long_schemas_are_refused(answering: Model):
    asked = {**HELLO, "tools": [tool("f", {"enum": ["x" * 70_000]})], "tool_choice": "required"}
    error = post(CHAT, asked, template=answering.template).json()["error"]

    assert (error["code"], error["param"]) == ("invalid_value", "tools")
    assert "the limit is 65,536" in error["message"]


def test_a_token_beyond_the_vocabulary_is_refused(answering: Model):
    grammar = answering.bound(tool_choice="required")
    assert grammar.calls is not None
    beyond = replace(grammar, calls=replace(grammar.calls, start=(1 << 19,)))
    with pytest.raises(GrammarError):
        Grammars(answering.template.folder, 1 << 13).open(beyond, tuple(answering.template.codec.eos), ())
