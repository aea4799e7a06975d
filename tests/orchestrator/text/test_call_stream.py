"""Laws of calls while they are written: pieces add up to the call, in every syntax, and come before its end."""

import json
import re
from typing import Any

import pytest

from orchestrator.text import families
from orchestrator.text.answer.parts import Arguments, Call, Part, Spoken
from orchestrator.text.answer_format import AnswerFormat, AnswerParser
from orchestrator.text.families.harmony import HarmonyParser
from tests.orchestrator.text.test_answer_parsers import joined
from tests.support.call_syntaxes import SYNTAXES, UNBOUND

TEXT = 'def f(x):\n\treturn {"a": "<b>", \'c\': x} # \\n ü </p>\n\n  "x" <para>'
GIVEN = {"path": "a.py", "content": TEXT, "mode": 420, "append": True, "note": None}
TYPES: dict[str, Any] = {"path": "string", "content": "string", "mode": "integer", "append": "boolean"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    **{name: {"type": kind} for name, kind in TYPES.items()},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["path", "content"],
            },
        },
    }
]
HEADER = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"


WRITTEN = {
    **{
        name: lambda arguments, one=one: one.written([("write", arguments)])
        for name, one in (SYNTAXES | UNBOUND).items()
    },
    "harmony": lambda arguments: f"{HEADER}{json.dumps(arguments)}<|call|>",
}
NAMES = {"older mistral": "mistral", "deepseek v3": "deepseek", "glm 4.5": "glm47"}


def parser(name: str) -> AnswerParser:
    if name == "harmony":
        return HarmonyParser(TOOLS, None)
    syntax = next(one for one in families.SYNTAXES if one.name == NAMES.get(name, name))
    return AnswerFormat(None, syntax).parser(False, TOOLS, None)


def said(name: str, text: str, size: int) -> list[Part]:
    reads = parser(name)
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    return [*(part for piece in pieces for part in reads.push(piece)), *reads.finish()]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_pieces_of_a_call_add_up_to_it(name: str):
    text = WRITTEN[name](GIVEN)

    (whole,) = joined(said(name, text, len(text)))

    assert isinstance(whole, Call)
    assert (whole.name, json.loads(whole.arguments)) == ("write", GIVEN)
    for size in (1, 3, 7):
        found = said(name, text, size)
        assert joined(found) == [whole]
        assert len(found) > len(TEXT) / 10
        if size == 1:
            assert max(len(part.text) for part in found if isinstance(part, Arguments)) < 40


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_off_is_the_beginning_of_the_whole_one(name: str):
    """Or text, before its name is certain."""
    text = WRITTEN[name](GIVEN)
    (whole,) = joined(said(name, text, len(text)))
    assert isinstance(whole, Call)
    called = False

    for end in range(len(text)):
        cut = text[:end]
        found = joined(said(name, cut, 5))
        assert found == joined(said(name, cut, len(cut) or 1))
        match found:
            case [Call(arguments=arguments), *_]:
                called = arguments != "{}"
                try:
                    # What may be left out is missing.
                    assert json.loads(arguments).items() <= GIVEN.items()
                except ValueError:
                    # A word's or a marker's beginning is the last of it.
                    assert whole.arguments.startswith(re.sub(r'(\\n|\s|<[^<]{0,24}|"|[A-Za-z]+)*$', "", arguments))
            case _:
                assert not called
                assert "".join(part.text for part in found if isinstance(part, Spoken)) in (cut, "{", "")
    assert called
