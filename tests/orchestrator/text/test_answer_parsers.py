"""Laws of answers: reasoning, text and calls are told apart, however they are cut, in the syntax a template shows."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text import families
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer.parts import Arguments, Call, Part, Reasoning, Spoken, ThoughtJoiner
from orchestrator.text.answer_format import AnswerFormat, AnswerParser, infer_answer_format, infer_tool_syntax
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.families import THOUGHTS
from orchestrator.text.families.generic import GENERIC
from orchestrator.text.families.harmony import HarmonyParser
from orchestrator.text.families.qwen import JSON_SYNTAX
from orchestrator.text.tokenizer import MARK
from tests.support.call_syntaxes import SYNTAXES, UNBOUND
from tests.support.paths import DEMO_TARGET

THINK = THOUGHTS[0]
NAMED = {syntax.name: syntax for syntax in families.SYNTAXES}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
WEATHER = Call("get_weather", '{"city":"Oslo","days":2}')
"""What each of CALLS says."""
CLOSING_CITY = Call("get_weather", '{"city":"</think>","days":2}')
SAID = (WEATHER.name, json.loads(WEATHER.arguments))
CALLS = {name: each.written([SAID]) for name, each in (SYNTAXES | UNBOUND).items() if name in NAMED}
UNQUOTED = ("kimi_k3", "minimax_m2", "minicpm5")
"""Their readers end a call at the first end marker."""
MISTRAL, LISTED = CALLS["mistral"], SYNTAXES["older mistral"].written([SAID])
DEEPSEEK_R1 = SYNTAXES["deepseek v3"].call(*SAID)


def joined(parts: Sequence[Part]) -> list[Part]:
    """With adjacent pieces of a kind as one."""
    found: list[Part] = []
    for part in parts:
        match (found[-1] if found else None), part:
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case Spoken(before), Spoken(text):
                found[-1] = Spoken(before + text)
            case Call(name, before, id), Arguments(text):
                found[-1] = Call(name, before + text, id)
            case _:
                found.append(part)
    return found


def parts(parser: AnswerParser, pieces: Sequence[str]) -> list[Part]:
    """Arguments without white space."""
    found = joined([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])
    return [replace(part, arguments=compact(part.arguments)) if isinstance(part, Call) else part for part in found]


def thinking(pieces: Sequence[str], *, opened: bool = False, markers: ThoughtMarkers = THINK) -> list[Part]:
    return parts(AnswerFormat(markers).parser(opened, (), None), pieces)


def calling(name: str, pieces: Sequence[str], most: int | None = None) -> list[Part]:
    found = parts(AnswerFormat(THINK, NAMED[name]).parser(False, TOOLS, most), pieces)
    return [Call(part.name, part.arguments) if isinstance(part, Call) else part for part in found]


def compact(arguments: str) -> str:
    """Without white space, if it is JSON."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return arguments


def harmony(pieces: Sequence[str], *, tools: bool = True, most: int | None = None) -> list[Part]:
    return parts(HarmonyParser(TOOLS if tools else (), most), pieces)


# Reasoning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("markers", THOUGHTS, ids=[markers.start for markers in THOUGHTS])
def test_a_thought_is_told_from_the_answer(markers: ThoughtMarkers):
    said = f"{markers.start}\nHm, \n2.\n{markers.end}\n\nTwo, \nI say.\n"

    assert thinking([said], markers=markers) == [Reasoning("Hm, \n2."), Spoken("Two, \nI say.\n")]


@pytest.mark.parametrize("said", ["Hm.\n</think>\n\nTwo.", "<think>\nHm.</think>Two.", "\n<think>Hm.</think> Two."])
def test_an_answer_may_begin_inside_the_thought(said: str):
    assert thinking([said], opened=True) == [Reasoning("Hm."), Spoken("Two.")]


@pytest.mark.parametrize(
    ("said", "opened", "expected"),
    [
        ("<think>Hm", False, [Reasoning("Hm")]),
        ("Hm </th", True, [Reasoning("Hm </th")]),
        ("<thi", True, [Reasoning("<thi")]),
        ("<thi", False, [Spoken("<thi")]),
        (f" Two: {MARK}</think>", False, [Spoken(" Two: </think>")]),
        (" Two: <think>a</think>", False, [Spoken(" Two: <think>a</think>")]),
        ("<think></think>\n\nTwo", False, [Spoken("Two")]),
        ("<think>a</think>b<think>c</think>", False, [Reasoning("a"), Spoken("b<think>c</think>")]),
        (" \n", False, [Spoken(" \n")]),
        ("", True, []),
    ],
)
def test_unfinished_and_misplaced_markers_lose_no_text(said: str, opened: bool, expected: list[Part]):
    assert thinking([said], opened=opened) == expected


@pytest.mark.parametrize("markers", THOUGHTS, ids=[markers.start for markers in THOUGHTS])
def test_a_later_thought_begins_where_its_marker_is_a_token(markers: ThoughtMarkers):
    start, end = markers.start, markers.end
    said = f"{MARK}{start}a{end}\n\nOne. {MARK}{start}\nb\n{end}\nTwo, {start}.{MARK}{start}c{end} Three.{MARK}{start}d"
    expected = [
        Reasoning("a"),
        Spoken("One. "),
        Reasoning("b"),
        Spoken(f"Two, {start}."),
        Reasoning("c"),
        Spoken(" Three."),
        Reasoning("d"),
    ]

    assert thinking([said], markers=markers) == thinking([*said], markers=markers) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_character_that_is_used_as_a_mark_may_be_text(size: int):
    said = f"{MARK}<think>a{2 * MARK}</think>b{2 * MARK}<think>{4 * MARK}{MARK}<think>c</think>d"
    expected = [Reasoning(f"a{MARK}"), Spoken(f"b{MARK}<think>{2 * MARK}"), Reasoning("c"), Spoken("d")]

    assert thinking([said[place : place + size] for place in range(0, len(said), size)]) == expected
    assert AnswerFormat(THINK).parser(False, (), None, marks=False).push(f"b{MARK}c") == [Spoken(f"b{MARK}c")]


@pytest.mark.parametrize("name", CALLS)
def test_a_thought_may_follow_a_call(name: str):
    said = f"{CALLS[name]}\n{MARK}<think>Hm.</think>\n\n{CALLS[name]}"

    assert calling(name, [said]) == calling(name, [*said]) == [WEATHER, Reasoning("Hm."), WEATHER]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_call_in_a_thought_is_one_unless_an_answer_follows_the_thought(name: str, size: int):
    call, quoted = CALLS[name], CALLS[name].replace("Oslo", "</think>")
    values = "<" not in NAMED[name].start or bool(NAMED[name].values)
    for said, expected in (
        (f"Hm.\n{call}", [Reasoning("Hm."), WEATHER]),
        (f"Hm.\n{call}\n{call}\n", [Reasoning("Hm."), WEATHER, WEATHER]),
        (f"Hm.\n{call}\n</think>\n\n", [Reasoning("Hm."), WEATHER]),
        (f"Hm.\n{call}\nNo.</think>\n\nSo.", [Reasoning(f"Hm.\n{call}\nNo."), Spoken("So.")]),
        (f"Hm.\n{call}\n</think>\n\n{call}", [Reasoning(f"Hm.\n{call}"), WEATHER]),
        (f"Hm. `{call}` So.</think>\nSo.", [Reasoning(f"Hm. `{call}` So."), Spoken("So.")]),
        *([(f"Hm.\n{quoted}", [Reasoning("Hm."), CLOSING_CITY])] if values else []),
    ):
        parser = AnswerFormat(THINK, NAMED[name]).parser(True, TOOLS, None)
        found = parts(parser, [said[place : place + size] for place in range(0, len(said), size)])
        assert [Call(part.name, part.arguments) if isinstance(part, Call) else part for part in found] == expected


@pytest.mark.parametrize("markers", THOUGHTS, ids=[markers.start for markers in THOUGHTS])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_end_marker_in_quotation_marks_is_a_part_of_the_thought(markers: ThoughtMarkers, size: int):
    start, end = markers.start, markers.end
    for thought in (
        f"See `{end}`.",
        f"See `{start}a{end}` so.",
        f'print("{end}")',
        f"It's '{end}'.",
        f"`{end}` {end[:3]}",
    ):
        said = f'{start}{thought}\n{end}\n\nA `b` "c".'
        found = thinking([said[place : place + size] for place in range(0, len(said), size)], markers=markers)
        assert found == [Reasoning(thought), Spoken('A `b` "c".')]
    assert thinking([*f'{start}A 5" pipe.{end}\n"b"'], markers=markers) == [Reasoning('A 5" pipe.'), Spoken('"b"')]
    assert thinking([f"{start}'a'{end}It's b."], markers=markers) == [Reasoning("'a'"), Spoken("It's b.")]
    assert thinking([*f"{start}`a{end}"], markers=markers) == [Reasoning("`a")]


def test_no_thought_begins_inside_a_call():
    said = CALLS["json"].replace("Oslo", f"{MARK}<think>a</think>")

    assert calling("json", [said]) == [Call("get_weather", '{"city":"<think>a</think>","days":2}')]


def test_the_thoughts_of_an_answer_are_one_text_for_apis_that_have_one():
    pieces = [Reasoning("a"), Reasoning("b"), Spoken("x"), Reasoning("c"), Reasoning("d")]

    assert joined([*map(ThoughtJoiner().push, pieces)]) == [Reasoning("ab"), Spoken("x"), Reasoning("\n\ncd")]


def test_markers_around_the_text_are_dropped():
    k3 = next(markers for markers in THOUGHTS if markers.wrappers)
    said = f"{k3.start}Hm.{k3.end}<|open|>response<|sep|>I look.<|close|>response<|sep|>{CALLS['kimi_k3']}"
    form = AnswerFormat(k3, NAMED["kimi_k3"])

    for pieces in ([said, "<|close|>message<|sep|>"], [*said, "<|close"]):
        found = parts(form.parser(False, TOOLS, None), pieces)
        assert found[:3] == [Reasoning("Hm."), Spoken("I look."), WEATHER]
    assert found[3:] == [Spoken("<|close")]
    assert thinking(["<|open|>response<|sep|>Yes."], markers=k3) == [Spoken("Yes.")]


def test_the_place_of_the_answer_is_known():
    parser = AnswerFormat(THINK).parser(True, (), None)

    parser.push("Hm. </thi")
    assert parser.thoughts == [(0, None)]
    parser.push("nk>\n\nTwo")
    assert parser.thoughts == [(0, len("Hm. </think>"))]
    plain = AnswerFormat(THINK).parser(False, (), None)
    plain.push("Two")
    assert plain.thoughts == []


PIECES = st.lists(
    st.sampled_from(
        [
            MARK,
            f"{MARK}<think>",
            "<think>",
            "</think>",
            "<thi",
            "nk>",
            "</",
            "a",
            "<",
            "\n",
            " ",
            "<tool_call>",
            "`",
            '"',
        ]
    )
    | st.sampled_from(["</tool_call>", '{"name": "get_weather"}', '{"name": ', "<tool", "_call>", "get_weather"])
    | st.sampled_from(
        ["[TOOL_CALLS]", "[ARGS]", "{}", "<function=get_weather>", "</function>", "<parameter=a>", "```\n"]
    )
)


@given(pieces=PIECES, opened=st.booleans(), name=st.sampled_from([None, "json", "mistral", "qwen3_coder"]))
def test_borders_between_pieces_do_not_change_the_parts(pieces: list[str], opened: bool, name: str | None):
    form = AnswerFormat(THINK, NAMED[name] if name else None)
    said = "".join(pieces)

    cut, whole, single = (form.parser(opened, TOOLS, None) for _ in range(3))

    assert parts(cut, pieces) == parts(whole, [said]) == parts(single, [*said])
    assert cut.thoughts == whole.thoughts == single.thoughts


@given(said=st.text("ab< \n"))
def test_an_answer_without_markers_is_text(said: str):
    form = AnswerFormat(THINK, JSON_SYNTAX)

    assert parts(form.parser(False, TOOLS, None), [*said]) == ([Spoken(said)] if said else [])


# Tool calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_each_syntax_is_read(name: str):
    said = CALLS[name]

    assert calling(name, [said]) == [WEATHER]
    assert calling(name, [*said]) == [WEATHER]
    assert calling(name, ["<think>Rain?</think>\n\nI look.\n\n" + said]) == [
        Reasoning("Rain?"),
        Spoken("I look.\n\n"),
        WEATHER,
    ]
    assert calling(name, [said + "\n" + said]) == [WEATHER, WEATHER]
    assert calling(name, [said + "\n" + said], most=1) == [WEATHER]


@pytest.mark.parametrize("name", CALLS)
def test_a_complete_call_before_an_incomplete_one_is_kept(name: str):
    said = CALLS[name]
    cut = said[: -len(said) // 2]

    for found in (calling(name, [said + "\n" + cut]), calling(name, [*(said + cut)])):
        first, second = found
        assert first == WEATHER
        assert second.text.lstrip() == cut if isinstance(second, Spoken) else isinstance(second, Call)


@pytest.mark.parametrize("name", [name for name in CALLS if NAMED[name].section])
def test_calls_of_a_section_come_when_each_is_complete(name: str):
    syntax, said = NAMED[name], CALLS[name]
    assert syntax.section is not None
    opening, closing = syntax.section
    call = said.removeprefix(opening).removesuffix(closing).strip()
    parser = AnswerFormat(None, syntax).parser(False, TOOLS, None)

    assert [part for part in parser.push(f"I look.{opening}\n{call}") if isinstance(part, Call)]
    assert [type(part) for part in joined(parser.push(f"\n{call}"))] == [Call]
    assert [*parser.push(f"\n{closing}"), *parser.finish()] == []
    assert calling(name, [f"{opening}\n{call}\n{call[:-5]}"]) == [WEATHER, WEATHER]
    assert calling(name, [f"{opening}{call}{call[:-5]}{closing}"]) == [WEATHER, WEATHER]
    assert calling(name, [f"{opening}\n{closing} is a section."]) == [Spoken(f"{opening}\n{closing} is a section.")]
    assert calling(name, [f"{opening} and "]) == [Spoken(f"{opening} and ")]


UNENDED = [
    ("json", "\n</tool_call>"),
    ("qwen3_coder", "</function>\n</tool_call>"),
    ("glm47", "</tool_call>"),
    ("longcat", "</longcat_tool_call>"),
    ("minimax_m2", "</invoke>\n</minimax:tool_call>"),
    ("minicpm5", "</function>"),
    ("muse_spark", "</atem:invoke>\n</atem:function_calls>"),
    ("kimi_k2", "<|tool_call_end|><|tool_calls_section_end|>"),
    ("deepseek", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("gemma4", "<tool_call|>"),
    ("function_gemma", "<end_function_call>"),
    ("pythonic", "<|tool_call_end|>"),
]
STRAY = [("qwen3_coder", "<tool_call>\n"), ("qwen3_coder", "</function>"), ("kimi_k2", "<|tool_call_end|>")]
UNENDED_JSON, NAKED = CALLS["json"].removesuffix("</tool_call>"), CALLS["qwen3_coder"].split("\n", 1)[1]
ODD = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo}</tool_call>\n'
FENCED = f"```json\n{json.dumps({'name': SAID[0], 'arguments': SAID[1]})}\n```"
IN_VALUES = [
    *((name, f"a {NAMED[name].end} b") for name in CALLS if NAMED[name].end and name not in UNQUOTED),
    ("json", "<tool_call>"),
    ("qwen3_coder", "<tool_call></function></tool_call>"),
]


def in_city(text: str) -> Call:
    return Call("get_weather", f'{{"city":"{text}","days":2}}')


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        (
            "pythonic",
            CALLS["pythonic"].split(")]")[0] + '), get_weather(city="(a)',
            [WEATHER, Call("get_weather", '{"city":"(a)')],
        ),
        *((name, CALLS[name].removesuffix(end), [WEATHER]) for name, end in UNENDED),
        *((name, CALLS[name].replace(tag, ""), [WEATHER]) for name, tag in STRAY),
        ("json", f"{UNENDED_JSON}\n{UNENDED_JSON}", [WEATHER, WEATHER]),
        ("json", f"{UNENDED_JSON}\nI wait.", [WEATHER, Spoken("I wait.")]),
        *(("json", CALLS["json"].replace("}}", braces), [WEATHER]) for braces in ("}", "}}}")),
        ("json", CALLS["json"].replace("Oslo", "O\n"), [Call("get_weather", '{"city":"O\\n","days":2}')]),
        ("json", ODD + CALLS["json"], [Call("get_weather", '{"city": "Oslo}'), WEATHER]),
        ("fenced", f"So:\n{FENCED}\nI wait.", [Spoken("So:\n"), WEATHER, Spoken("\nI wait.")]),
        ("mistral", MISTRAL.replace("[ARGS]", ""), [WEATHER]),
        ("qwen3_coder", f"So.\n\n{NAKED}\n{NAKED}", [Spoken("So.\n\n"), WEATHER, WEATHER]),
        *((name, CALLS[name].replace("Oslo", text), [in_city(text)]) for name, text in IN_VALUES),
        ("mistral", LISTED[:-1] + ', {"name": "get_wea', [WEATHER, Spoken(', {"name": "get_wea')]),
        ("mistral", f"{MISTRAL} I wait.", [WEATHER, Spoken(" I wait.")]),
        ("mistral", f"{MISTRAL}{MISTRAL.removeprefix('[TOOL_CALLS]')}", [WEATHER, WEATHER]),
        (
            "mistral",
            f'{MISTRAL}get_weather[ARGS]{{"city": "O',
            [WEATHER, Call("get_weather", '{"city": "O')],
        ),
        ("mistral", LISTED, [WEATHER]),
        ("mistral", LISTED.replace('{"city": "Oslo", "days": 2}', r'"{\"city\": \"Oslo\", \"days\": 2}"'), [WEATHER]),
        ("mistral", f"{LISTED}\nI wait.", [WEATHER, Spoken("\nI wait.")]),
    ],
)
def test_complete_calls_are_kept_and_the_rest_is_text(name: str, said: str, expected: list[Part]):
    assert calling(name, [said]) == calling(name, [*said]) == expected


def test_a_value_without_an_end_does_not_swallow_the_next_call():
    head, _, tail = CALLS["qwen3_coder"].rpartition("</parameter>")

    assert [type(part) for part in calling("qwen3_coder", [2 * (head + tail)])] == [Call, Call]


def test_gemma_s_values_are_read():
    said = 'call:get_weather{a:{b_1:[1,-2.5,true,null,<|"|>x,y:{"\\<|"|>],c: {}},d:<|"|><|"|>}'

    (call,) = calling("gemma4", [f"<|tool_call>{said}, call:get_weather{{}}<tool_call|>"], most=1)

    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"a": {"b_1": [1, -2.5, True, None, 'x,y:{"\\'], "c": {}}, "d": ""}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gemma4", "call:a{"),
        ("gemma4", '<|"|>'),
        ("kimi_k3", "<|open|>call"),
        ("kimi_k3", "<|open|>argument"),
        ("kimi_k3", '<|sep|><|open|>argument key="a"<|sep|>'),
        ("muse_spark", "<atem:invoke"),
        ("glm47", "<arg_key>a</arg_key><arg_value>"),
        ("glm47", "<arg_key>a</arg_key>"),
        ("longcat", "<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>"),
        ("muse_spark", '<atem:parameter name="a"'),
        ("function_gemma", "call:f{"),
    ],
)
def test_what_a_parser_would_search_again_and_again_is_text(name: str, content: str):
    syntax = NAMED[name]
    said = syntax.start + content * 20_000 + syntax.end

    assert calling(name, [said]) == [Spoken(said)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("json", f"<tool_call>{said}") for said in ("[1]</tool_call>", "", '{"name": 1}')),
        ("llama3", '{"name": "f"}'),
        ("llama3", '{"name": "f", "parameters": {}} is a call.'),
        ("llama3", '{"name": '),
        ("mistral", "[TOOL_CALLS] means calls."),
        ("json", CALLS["json"].replace("get_weather", "other")),
        ("qwen3_coder", f"So: {NAKED}"),
        ("qwen3_coder", f"```xml\n{NAKED}\n```"),
        ("qwen3_coder", NAKED.replace("get_weather", "other")),
        ("fenced", FENCED.replace("get_weather", "other")),
        *((name, f"Say `{said}` so.") for name, said in CALLS.items() if not NAMED[name].section),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
        ("glm47", "<tool_call>I would call it now.</tool_call>"),
        ("glm47", CALLS["glm47"].replace("get_weather", "other")),
        ("kimi_k3", CALLS["kimi_k3"].replace('tool="get_weather" ', "")),
        ("minimax_m2", CALLS["minimax_m2"].replace("get_weather", "other")),
        ("pythonic", f"<|tool_call_start|>{'(' * 500}<|tool_call_end|>"),
        *(("deepseek", DEEPSEEK_R1.replace(part, "")) for part in ("get_weather", "<｜tool▁sep｜>", '"city"', "```")),
    ],
)
def test_what_is_no_proper_call_stays_text(name: str, said: str):
    assert calling(name, [said]) == calling(name, [*said]) == [Spoken(said)]


TEXTS = {name: end for name in CALLS for _, end in NAMED[name].values if end.startswith("</")}
"""Syntaxes whose arguments are texts, and the marks behind these."""
TYPES: list[tuple[dict[str, object], str, object]] = [
    # A schema, what a model says, and what is read.
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "  indented\n", "  indented\n"),
    ({"type": ["string", "integer"]}, "5", 5),
    *(({"type": ["string", "integer"]}, text, text) for text in ("02134", "1e5", "5.0", " 5", "null")),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
    ({}, "5", "5"),
    ({}, '{"a": [1]}', {"a": [1]}),
    ({"type": "integer"}, "1e5", 100000),
    ({"type": "number"}, "1.50", 1.5),
    *(({"type": "number"}, text, text) for text in ("NaN", "1e999", "-Infinity", "02134", "five")),
    ({"type": "integer"}, "1.5", "1.5"),
    ({"type": "boolean"}, " TRUE ", True),
    *(({"type": "boolean"}, text, text) for text in ("maybe", "1", "yes")),
    ({"type": "array"}, "['a', None]", ["a", None]),
    ({"type": "object"}, "{1, 2}", "{1, 2}"),
]


@pytest.mark.parametrize("name", TEXTS)
def test_an_argument_is_read_as_its_schema_says_or_stays_the_text_that_it_was(name: str):
    for schema, said, value in TYPES:
        for parameters in ({"properties": {"city": schema}}, {"additionalProperties": schema}):
            tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
            written = CALLS[name].replace("Oslo", said)
            (call,) = parts(AnswerFormat(None, NAMED[name]).parser(False, tools, None), [written])
            assert isinstance(call, Call)
            assert json.dumps(json.loads(call.arguments)["city"]) == json.dumps(value), (schema, said)


@pytest.mark.parametrize(("name", "end"), TEXTS.items())
def test_a_mark_that_is_missing_or_a_text_loses_nothing(name: str, end: str):
    said = CALLS[name]
    last = said.rindex(end)

    for cut in (said.replace(end, "", 1), said[:last] + said[last + len(end) :]):
        assert calling(name, [cut]) == [WEATHER]
    for marked in (f"a {end} b", f"{end}\n", f"a{end}{end}"):
        (call,) = calling(name, [said.replace("Oslo", marked)])
        assert isinstance(call, Call)
        assert json.loads(call.arguments) == {"city": marked, "days": 2}
    (call,) = calling(name, [said.replace("days", "city")])
    assert isinstance(call, Call)
    assert re.fullmatch("(?s)Oslo.*2", json.loads(call.arguments)["city"])
    assert calling(name, [said.replace(SAID[0], f"{SAID[0]} or")]) != [WEATHER]


@pytest.mark.parametrize("name", CALLS)
def test_a_function_may_have_no_parameters_in_its_tool(name: str):
    bare = [{"type": "function", "function": {"name": "get_weather"}}]

    (call,) = parts(AnswerFormat(None, NAMED[name]).parser(False, bare, None), [CALLS[name]])

    assert isinstance(call, Call)
    assert (call.name, json.loads(call.arguments)["city"]) == ("get_weather", "Oslo")


def test_calls_of_deepseek_r1_are_read_without_their_section_and_with_fences_inside():
    fenced = DEEPSEEK_R1.replace("Oslo", "```json```")

    assert calling("deepseek", [f"I look.{DEEPSEEK_R1}\n{DEEPSEEK_R1}"]) == [Spoken("I look."), WEATHER, WEATHER]
    assert calling("deepseek", [*fenced]) == [Call("get_weather", '{"city":"```json```","days":2}')]


@pytest.mark.parametrize("name", CALLS)
def test_a_marker_in_a_text_does_not_hold_the_text_back(name: str):
    start = NAMED[name].start
    for said in (f"You write `{start}` and then", f"You write {start} and then"):
        parser = AnswerFormat(THINK, NAMED[name]).parser(False, TOOLS, None)
        assert joined([part for piece in said for part in parser.push(piece)]) == [Spoken(said)]


@pytest.mark.parametrize(
    ("name", "said", "id"),
    [
        ("kimi_k2", CALLS["kimi_k2"], "functions.get_weather:0"),
        ("mistral", MISTRAL.replace("[ARGS]", "[CALL_ID]a1[ARGS]"), "a1"),
    ],
)
def test_a_call_keeps_the_id_that_its_syntax_has(name: str, said: str, id: str):
    parser = AnswerFormat(None, NAMED[name]).parser(False, TOOLS, None)

    assert parts(parser, [said]) == [replace(WEATHER, id=id)]


# Harmony -----------------------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>Rain?"
FINAL = "<|start|>assistant<|channel|>final<|message|>Sunny."
ARGUMENTS = '{"city": "Oslo", "days": 2}'


TO, COMMENTARY = "to=functions.get_weather", "<|channel|>commentary"
CHANNELS: list[tuple[str, list[Part]]] = [
    (f"{ANALYSIS}<|end|>{FINAL}", [Reasoning("Rain?"), Spoken("Sunny.")]),
    ("<|channel|>final<|message|>Sunny.", [Spoken("Sunny.")]),
    (ANALYSIS, [Reasoning("Rain?")]),
    (f"{ANALYSIS}<|end|><|start|>assist", [Reasoning("Rain?")]),
    (f"{ANALYSIS}<|end|><|start|>assistant<|channel|>commentary {TO} <|constrain|>json<|message|>{ARGUMENTS}",
     [Reasoning("Rain?"), WEATHER]),
    (f"{ANALYSIS}<|end|><|start|>assistant {TO}<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
     [Reasoning("Rain?"), WEATHER]),
    (f" {TO}<|channel|>commentary<|message|>{ARGUMENTS}", [WEATHER]),
    (f"{COMMENTARY}<|message|>I look.<|end|><|start|>assistant{COMMENTARY} {TO}<|message|>{ARGUMENTS}",
     [Spoken("I look."), WEATHER]),
    (f"<|channel|>commentary {TO}<|message|>{{", [Spoken("{")]),
    ("<|channel|>analysis to=python<|message|>1+1", [Reasoning("1+1")]),
    (f"{ANALYSIS}{COMMENTARY} {TO}<|message|>{ARGUMENTS}", [Reasoning("Rain?"), WEATHER]),
    (f"{COMMENTARY} to=get_weather <|constrain|>json{ARGUMENTS}<|call|>", [WEATHER]),
    (f" {TO} json{ARGUMENTS}<|call|>", [WEATHER]),
    (f"{COMMENTARY} to=other<|message|>{ARGUMENTS}<|call|>", [Spoken(f"other {ARGUMENTS}")]),
    (f"{COMMENTARY} to=functions.other<|message|>{ARGUMENTS}<|call|>", [Spoken(f"functions.other {ARGUMENTS}")]),
    ("Sunny.", [Spoken("Sunny.")]),
    ("Sunny.<|end|>" + FINAL, [Spoken("Sunny.Sunny.")]),
    ("to", [Spoken("to")]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), CHANNELS)
def test_the_channels_of_harmony_are_told_apart(said: str, expected: list[Part]):
    assert harmony([said]) == harmony([*said]) == expected


def test_without_tools_a_call_in_harmony_is_reasoning():
    said = f"<|channel|>commentary to=functions.get_weather<|message|>{ARGUMENTS}"

    assert harmony([said], tools=False) == [Reasoning(ARGUMENTS)]
    assert harmony([said + "<|call|><|start|>assistant" + said], most=1) == [WEATHER]


@given(
    pieces=st.lists(
        st.sampled_from(["<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f"])
        | st.sampled_from([" to=get_weather", "<|message|>", "<|end|>", "<|call|>", "{}", "a", " ", "<|", "t", "end|>"])
    )
)
def test_borders_do_not_matter_in_harmony(pieces: list[str]):
    said = "".join(pieces)
    cut, whole, single = (HarmonyParser(TOOLS, None) for _ in range(3))

    assert parts(cut, pieces) == parts(whole, [said]) == parts(single, [*said])
    assert cut.thoughts == whole.thoughts == single.thoughts


# What a chat template shows ----------------------------------------------------------------------


SHOWN = {
    **CALLS,
    "json": '<tool_call>{"name": ..., "arguments": ...}</tool_call>',
    "llama3": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
}


def template(folder: Path, shown: str, **settings: str) -> ChatTemplate:
    """That of a model with tools, which shows how calls look."""
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((DEMO_TARGET / name).read_bytes())
    source = "{% if tools %}{{ tools | tojson }}{{ calls }}{% raw %}" + shown + "{% endraw %}{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate(folder)


@pytest.mark.parametrize("name", SHOWN)
def test_the_syntax_is_the_one_that_the_template_shows(tmp_path: Path, name: str):
    syntax = infer_tool_syntax(template(tmp_path, SHOWN[name]))

    assert syntax.name == name


@pytest.mark.parametrize(("named", "name"), [("laguna", "glm47"), ("json_tools", "json"), ("unknown", "qwen3_coder")])
def test_the_model_s_settings_may_name_it(tmp_path: Path, named: str, name: str):
    syntax = infer_tool_syntax(template(tmp_path, CALLS["qwen3_coder"], tool_parser_type=named))

    assert syntax.name == name


def test_no_syntax_is_guessed(tmp_path: Path):
    assert infer_tool_syntax(template(tmp_path, "<call>")) is GENERIC
    (tmp_path / "chat_template.jinja").write_text(CALLS["gemma4"])
    assert infer_tool_syntax(ChatTemplate(tmp_path)) is GENERIC


@pytest.mark.parametrize(
    ("shown", "start"),
    [
        ("<thought>{{ x }}{{ message.content.split('</thought>')[-1] }}", "<thought>"),
        ('<my:reasoning>{{ content.split( "</my:reasoning>" ) | last }}', "<my:reasoning>"),
        ("<|inner_prefix|>{{ thought }}<|inner_suffix|>", "<|inner_prefix|>"),
        ("{{ content.split('</thought>')[-1] }}", None),
        ("<answer>{{ content.split('</answer>')[0] }}", None),
    ],
)
def test_thoughts_are_known_by_the_markers_at_which_a_template_cuts(tmp_path: Path, shown: str, start: str | None):
    thought = infer_answer_format(template(tmp_path, shown)).thought

    assert (thought and thought.start) == start


def test_a_long_name_of_a_marker_takes_no_long_search(tmp_path: Path):
    read = template(tmp_path, "split('</" + "think" * 20_000)
    began = time.process_time()

    assert infer_answer_format(read).thought is None
    assert time.process_time() - began < 1
