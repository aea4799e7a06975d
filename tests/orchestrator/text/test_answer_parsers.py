"""Laws of answers: reasoning, text and calls are told apart, however they are cut, in the syntax a template shows."""

import itertools
import json
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text import families
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer.parts import AnswerParser, Call, Part, Reasoning, Spoken, ThoughtJoiner
from orchestrator.text.answer_format import AnswerFormat, infer_answer_format, infer_tool_syntax
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.families import THOUGHTS
from orchestrator.text.families.generic import GENERIC
from orchestrator.text.families.harmony import HarmonyParser
from orchestrator.text.families.qwen import JSON_SYNTAX
from orchestrator.text.tokenizer import MARK
from tests.support.call_syntaxes import SYNTAXES
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
SAID = (WEATHER.name, json.loads(WEATHER.arguments))
CALLS = {
    **{name: SYNTAXES[name].written([SAID]) for name in NAMED if name in SYNTAXES},
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>'
    "argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Oslo'
    '</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
}
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
            case _:
                found.append(part)
    return found


def parts(parser: AnswerParser, pieces: Sequence[str]) -> list[Part]:
    return joined([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])


def thinking(pieces: Sequence[str], *, opened: bool = False, markers: ThoughtMarkers = THINK) -> list[Part]:
    return parts(AnswerFormat(markers).parser(opened, (), None), pieces)


def calling(name: str, pieces: Sequence[str], most: int | None = None) -> list[Part]:
    found = parts(AnswerFormat(THINK, NAMED[name]).parser(False, TOOLS, most), pieces)
    return [Call(part.name, part.arguments) if isinstance(part, Call) else part for part in found]


def harmony(pieces: Sequence[str], *, tools: bool = True, most: int | None = None) -> list[Part]:
    return parts(HarmonyParser(tools, most), pieces)


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
        [MARK, f"{MARK}<think>", "<think>", "</think>", "<thi", "nk>", "</", "a", "<", "\n", " ", "<tool_call>"]
    )
    | st.sampled_from(["</tool_call>", '{"name": "f"}', '{"name": ', "<tool", "_call>", "[TOOL_CALLS]", "[ARGS]", "{}"])
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


@pytest.mark.parametrize(
    "syntax", [each for each in families.SYNTAXES if each.reader is None], ids=lambda syntax: syntax.name
)
def test_the_markers_are_those_that_mlx_lm_s_parser_knows(syntax: CallSyntax):
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "tool_parsers" / f"{syntax.name}.py").read_text()

    assert re.findall(r'^tool_call_\w+[:\w ]* = "(.*)"', source, re.MULTILINE) == [
        *(syntax.section or (syntax.start, syntax.end))
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_complete_call_before_an_incomplete_one_is_kept(name: str):
    said = CALLS[name]
    cut = said[: -len(said) // 2]

    assert calling(name, [said + "\n" + cut]) == [WEATHER, Spoken(cut)]
    assert calling(name, [*(said + cut)]) == [WEATHER, Spoken(cut)]


@pytest.mark.parametrize("name", [name for name in CALLS if NAMED[name].section])
def test_calls_of_a_section_come_when_each_is_complete(name: str):
    syntax, said = NAMED[name], CALLS[name]
    assert syntax.section is not None
    opening, closing = syntax.section
    call = said.removeprefix(opening).removesuffix(closing).strip()
    parser = AnswerFormat(None, syntax).parser(False, TOOLS, None)

    assert [part for part in parser.push(f"I look.{opening}\n{call}") if isinstance(part, Call)]
    assert [type(part) for part in parser.push(f"\n{call}")] == [Call]
    assert [*parser.push(f"\n{closing}"), *parser.finish()] == []
    assert calling(name, [f"{opening}\n{call}\n{call[:-5]}"]) == [WEATHER, Spoken(call[:-5])]
    assert calling(name, [f"{opening}{call}{call[:-5]}{closing}"]) == [WEATHER, Spoken(call[:-5] + closing)]
    assert calling(name, [f"{opening}\n{closing} is a section."]) == [Spoken(f"{opening}\n{closing} is a section.")]
    assert calling(name, [f"{opening} and "]) == [Spoken(f"{opening} and ")]


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        (
            "pythonic",
            CALLS["pythonic"].split(")]")[0] + '), get_weather(city="(a)',
            [WEATHER, Spoken(', get_weather(city="(a)')],
        ),
        ("pythonic", CALLS["pythonic"].split("<|tool_call_end")[0], [WEATHER, Spoken("]")]),
        ("gemma4", CALLS["gemma4"].removesuffix("<tool_call|>"), [WEATHER]),
        ("mistral", LISTED[:-1] + ', {"name": "get_wea', [WEATHER, Spoken(', {"name": "get_wea')]),
        ("mistral", f"{MISTRAL} I wait.", [WEATHER, Spoken(" I wait.")]),
        ("mistral", f"{MISTRAL}{MISTRAL.removeprefix('[TOOL_CALLS]')}", [WEATHER, WEATHER]),
        (
            "mistral",
            f'{MISTRAL}get_weather[ARGS]{{"city": "O',
            [WEATHER, Spoken('get_weather[ARGS]{"city": "O')],
        ),
        ("mistral", LISTED, [WEATHER]),
        ("mistral", LISTED.replace('{"city": "Oslo", "days": 2}', r'"{\"city\": \"Oslo\", \"days\": 2}"'), [WEATHER]),
        ("mistral", f"{LISTED}\nI wait.", [WEATHER, Spoken("\nI wait.")]),
    ],
)
def test_complete_calls_are_kept_and_the_rest_is_text(name: str, said: str, expected: list[Part]):
    assert calling(name, [said]) == calling(name, [*said]) == expected


def test_gemma_s_values_are_read():
    said = 'call:f{a:{b_1:[1,-2.5,true,null,<|"|>x,y:{"\\<|"|>],c: {}},d:<|"|><|"|>}'

    (call,) = calling("gemma4", [f"<|tool_call>{said}, call:g{{}}<tool_call|>"], most=1)

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


NUMBERS = [
    *itertools.product(["llama3", "mistral", "qwen3_coder", "minimax_m2", "gemma4"], ["1e999", "-Infinity", "NaN"]),
    ("pythonic", "1e999"),
]
"""Numbers that JSON does not have."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, CALLS[name].replace("2", number)) for name, number in NUMBERS),
        *(("json", f"<tool_call>{said}") for said in ("[1]</tool_call>", "", '{"name": 1}')),
        ("llama3", '{"name": "f"}'),
        ("llama3", '{"name": "f", "parameters": {}} is a call.'),
        ("llama3", '{"name": '),
        ("mistral", "[TOOL_CALLS] means calls."),
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


def test_a_call_comes_as_soon_as_it_is_complete():
    parser = AnswerFormat(None, JSON_SYNTAX).parser(False, TOOLS, None)

    assert parser.push(CALLS["json"]) == [WEATHER]
    assert parser.push(" And") == [Spoken(" And")]
    assert parser.push("<tool_call>x</tool_call>") == [Spoken("<tool_call>x</tool_call>")]
    assert parser.push(CALLS["json"]) == [WEATHER]


@pytest.mark.parametrize(
    ("name", "said", "id"),
    [
        ("kimi_k2", CALLS["kimi_k2"], "functions.get_weather:0"),
        ("mistral", MISTRAL.replace("[ARGS]", "[CALL_ID]a1[ARGS]"), "a1"),
    ],
)
def test_a_call_keeps_the_id_that_its_syntax_has(name: str, said: str, id: str):
    parser = AnswerFormat(None, NAMED[name]).parser(False, TOOLS, None)

    assert [*parser.push(said), *parser.finish()] == [Call(WEATHER.name, WEATHER.arguments, id)]


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
        | st.sampled_from(["<|message|>", "<|end|>", "<|call|>", "{}", "a", " ", "<|", "t", "end|>"])
    )
)
def test_borders_do_not_matter_in_harmony(pieces: list[str]):
    said = "".join(pieces)
    cut, whole, single = (HarmonyParser(True, None) for _ in range(3))

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
