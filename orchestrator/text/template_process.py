"""The program that renders conversations by a model's template: in a bounded process, and in Jinja's sandbox.

The only module that loads Jinja. Knows no tokenizer and no folder. What the template refuses, and instructions that it
would drop, are repaired.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.text.repairs import Conversation, Refusal, repaired
from orchestrator.text.template_sources import BOUNDS, END, REMEDY, Answer, Question
from protocol.bounded_process import answer_questions

_MOST_GROWTH = 16
_LEAST_BOUND = 1 << 20
"""A text has at most so many characters, or `_MOST_GROWTH` for each byte of the question."""
_COMPILED = 8
"""Templates that are kept."""
_WORDS = 300


def answer(line: bytes) -> Answer:
    """For a `Question`."""
    question = msgspec.json.decode(line, type=Question)
    try:
        template = _compiled(question.source)
        if question.messages is None:
            parsed = _environment().parse(question.source)
            return Answer(variables=frozenset(find_undeclared_variables(parsed)))
    except (TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        return Answer(wrong=f"is broken ({_words_of(error)}): download the model again.")
    try:
        found = _rendered(template, question, question.messages)
    except Refusal as error:
        return Answer(wrong=f"refuses these messages: {error}")
    if len(found.text) > max(_LEAST_BOUND, _MOST_GROWTH * len(line)):
        return Answer(wrong=f"makes a far longer text than the messages: {REMEDY}.")
    return found


def _rendered(template: Template, question: Question, messages: Sequence[Mapping[str, Any]]) -> Answer:
    """Raises Refusal for messages that the template refuses however they are repaired."""

    def text_of(conversation: Conversation, answering: bool = question.answering and not question.continued) -> str:
        told = {"messages": conversation.messages, "tools": list(conversation.tools) if conversation.tools else None}
        try:
            text = template.render({**question.known, **told, "add_generation_prompt": answering})
            # Half a character can't be sent.
            text.encode()
        # A faulty template raises Python's own errors in Jinja.
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise Refusal(_words_of(error)) from error
        return text

    found = repaired(Conversation([{**message} for message in messages], question.tools), text_of)
    if not question.continued:
        return Answer(text_of(found.conversation), found.left_out, found.notes)
    *before, last = found.conversation.messages
    ended = text_of(found.conversation._replace(messages=[*before, {**last, "content": END}]))
    head, there, _ = ended.rpartition(END)
    text = head if there else text_of(found.conversation._replace(messages=before), True)
    return Answer(text + last["content"], found.left_out, found.notes)


class _Generation(Extension):
    """`{% generation %}` marks the text that a model was trained on; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=_COMPILED)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that templates on Hugging Face expect."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(words: object) -> None:
    raise TemplateError(str(words))


def _words_of(error: Exception) -> str:
    """The first line of an error."""
    words = (str(error).strip().splitlines() or [type(error).__name__])[0][:_WORDS]
    return words.encode(errors="replace").decode()


if __name__ == "__main__":
    answer_questions(answer, BOUNDS)
