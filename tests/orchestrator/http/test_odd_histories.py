"""Laws of histories: whatever an earlier turn contains, the model reads it as well as it can, and warnings say so."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.http.openai.history import readable, template_messages
from orchestrator.text.chat_template import ChatTemplate
from tests.support.asked_server import CHAT, COMPLETIONS, MESSAGES, OLLAMA, RESPONSES, TEMPLATE, asked, post
from tests.support.fake_pipeline import FakePipeline
from tests.support.models.chat_models import model

Asks: TypeAlias = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def ask(templates: dict[str, ChatTemplate]) -> Asks:
    """What the model reads, and the warnings of the answer."""

    def read(template: str, path: str, **body: Any) -> tuple[str, list[str]]:
        given = {OLLAMA: {"stream": False}, MESSAGES: {"max_tokens": 9}}.get(path, {})
        found = asked(path, {**given, **body}, templates[template])
        return found.prompt, found.warnings

    return read


def user(text: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: Any = "Yes?", *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(id: str = "call_1", arguments: Any = '{"a": 1}', name: str = "add") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str = "call_1", text: Any = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def system(text: str = "Be brief.", role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


# What differs in the instructions of each session, or of each request -----------------------------

CLIENTS = {
    "Claude Code": "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch={};Be brief.\n<env>?</env>",
    "Claude Code by a proxy": "x-anthropic-billing-header: cch={}\nBe brief.",
    "Continue": (
        '<env>\nWorking directory: {}\nPlatform: linux\n</env>\n\n<context name="gitStatus">M {}\n</context>\nBe brief.'
    ),
    "opencode": "You help.\n<env>\n  Working directory: {}\n</env>\nBe brief.",
    "Cline": "<env>\n1. Platform: linux\n2. Date: {}\n</env>\nBe brief.",
    "Qwen Code": "Git snapshot at conversation start. Frozen.\n```text\ngit: {}\n```\n\nBe brief.",
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_what_differs_in_each_session_costs_nothing_that_stands_behind_it(ask: Asks, path: str, client: str):
    def read(differs: str) -> tuple[list[str], list[str]]:
        rules = CLIENTS[client].format(differs, differs)
        given = {MESSAGES: {"system": [{"type": "text", "text": rules}]}, RESPONSES: {"instructions": rules}}
        turns = [user("Go"), said(), user()]
        asks = (
            {"input": turns} if path == RESPONSES else {"messages": turns if path in given else [system(rules), *turns]}
        )
        text, warnings = ask("qwen", path, **asks, **given.get(path, {}))
        return text.split("<user>"), warnings

    (one, first, second), warnings = read("a1")
    other, _ = read("b2")

    assert one == other[0]
    assert "Be brief." in one
    assert (first.endswith("Go<assistant>Yes?"), second, len(warnings)) == (True, "Hi", 1)
    assert first.count("a1") == (0 if "Claude" in client else CLIENTS[client].count("{}"))


def test_a_user_s_own_text_stays_where_it_is(ask: Asks):
    text = "".join(CLIENTS.values())

    assert ask("chatml", CHAT, messages=[system("Be brief."), user(text)])[0] == f"<system>Be brief.<user>{text}"


# What a template refuses --------------------------------------------------------------------------

NINE = "abc123XYZ"
ADD = '[add({"a": 1})'
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RESULT = "Result of add:\n4"
MENDED: list[tuple[str, list[dict[str, Any]], str, list[str]]] = [
    # The template, the messages, what the model reads, a word of each warning.
    ("chatml", [system(), user(), system("Now."), said()], "<system>Be brief.<user>Hi<system>Now.<assistant>Yes?", []),
    ("chatml", [user(), user(), said(), said()], "<user>Hi<user>Hi<assistant>Yes?<assistant>Yes?", []),
    ("qwen", [system(), user(), system("Now."), said(), user()],
     "<system>Be brief.<user>Hi\n\nNow.<assistant>Yes?<user>Hi", ["user's turn beside"]),
    ("qwen", [user(), said(), system("Now.", "developer"), user("Go")],
     "<user>Hi<assistant>Yes?<user>Now.\n\nGo", ["user's turn beside"]),
    ("qwen", [system(), system("Be kind."), user()], "<system>Be brief.\n\nBe kind.<user>Hi", []),
    ("qwen", [system()], "<system>Be brief.<user>", ["an empty one"]),
    ("qwen", [system(), said("", call()), result()],
     f"<system>Be brief.<user><assistant>{ADD}call_1]<tool>4", ["an empty one"]),
    ("mistral", [user(), user("So?"), said(), user()], "<user>Hi\n\nSo?<assistant>Yes?<user>Hi", ["alternation"]),
    ("mistral", [said(), user()], "<user><assistant>Yes?<user>Hi", ["an empty one"]),
    ("mistral", [user(), said("", call(NINE)), result(NINE), user("So?"), said(), user()],
     f"<user>Hi<assistant>{ADD}{NINE}]<tool>4\n\nSo?{NINE}<assistant>Yes?<user>Hi", ["behind the result"]),
    ("mistral", [user(), said("", call(NINE)), result(NINE), system("Now."), said(), user()],
     f"<user>Hi<assistant>{ADD}{NINE}]<tool>4\n\nNow.{NINE}<assistant>Yes?<user>Hi",
     ["user's turn beside", "behind the result"]),
    ("mistral", [user(), said("I add."), said("", call(NINE)), result(NINE), said()],
     f"<user>Hi<assistant>I add.{ADD}{NINE}]<tool>4{NINE}<assistant>Yes?", ["behind a text"]),
    # Before the next answer as behind it.
    ("mistral", [user(), said("I add."), said("", call(NINE)), result(NINE)],
     f"<user>Hi<assistant>I add.{ADD}{NINE}]<tool>4{NINE}", ["behind a text"]),
    ("mistral", [user(), said("I add."), said("", call(NINE)), result(NINE), user("So?")],
     f"<user>Hi<assistant>I add.<assistant>{ADD}{NINE}]<tool>4{NINE}<user>So?", []),
    ("mistral", [user(), user("Go"), said("", call(NINE)), result(NINE), said("I add."), said("", call(NINE)),
                 result(NINE), user("So?")],
     f"<user>Hi\n\nGo<assistant>{ADD}{NINE}]<tool>4{NINE}"
     f"<assistant>I add.<assistant>{ADD}{NINE}]<tool>4{NINE}<user>So?",
     ["alternation"]),
    ("mistral", [user(), said(), user(), said("", call(NINE)), result(NINE), said(), user()],
     f"<user>Hi<assistant>Yes?<user>Hi<assistant>{ADD}{NINE}]<tool>4{NINE}<assistant>Yes?<user>Hi", []),
    ("llama", [user(), said("I add.", call("1"), call("2", '{"b": 2}')), result("2", "5"), result("1")],
     f'<user>Hi<assistant>I add.{ADD}1]<tool>4<assistant>[add({{"b": 2}})2]<tool>5', ["one call in a turn"]),
    ("gemma", [system(), user(), said(), user()],
     "<user>Be brief.\n\nHi<assistant>Yes?<user>Hi", ["no system message"]),
    ("firm", [user(), said("I add.", call()), result(), user("So?")],
     f"<user>Hi<assistant>I add.\n{WRITTEN}<user>{RESULT}\n\nSo?", ["became text"]),
    # It knows no tools.
    ("gemma", [user(), said("I add.", call(), call("2")), result(), result("2"), said(), user("So?")],
     f"<user>Hi<assistant>I add.\n{WRITTEN}\n{WRITTEN}<user>{RESULT}\n\n{RESULT}<assistant>Yes?<user>So?", []),
    ("gemma", [system(), said(), user(), user()], "<user>Be brief.<assistant>Yes?<user>Hi\n\nHi",
     ["no system message", "alternation"]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "read", "words"), MENDED)
def test_what_a_template_refuses_is_mended_and_told(
    ask: Asks, template: str, messages: list[Any], read: str, words: list[str]
):
    text, warnings = ask(template, CHAT, messages=messages)

    assert text == read
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_ids_of_another_provider_are_replaced_consistently(ask: Asks):
    messages = [user(), said("", call("toolu_01"), call(NINE)), result("toolu_01"), result(NINE, "5")]

    text, (warning,) = ask("mistral", CHAT, messages=messages)
    longer, _ = ask("mistral", CHAT, messages=[*messages, said(), user(), said("", call("x")), result("x")])

    first, second = re.findall(r"\)(\w+)\]", text)
    assert (len(first), first.isalnum(), second) == (9, True, NINE)
    assert f"<tool>4{first}<tool>5{NINE}" in text
    assert "nine letters" in warning
    assert longer.startswith(text)


@given(
    roles=st.lists(st.sampled_from(["user", "system", "assistant", "calls"]), max_size=7),
    alone=st.booleans(),
    name=st.sampled_from(["chatml", "qwen", "llama", "gemma", "mistral"]),
)
def test_a_conversation_that_goes_on_is_mended_as_before(
    templates: dict[str, ChatTemplate], roles: list[str], alone: bool, name: str
):
    messages = [system("S"), user("first")]
    for place, role in enumerate(roles):
        ids = [f"{place} {number}" for number in range(1 + place % 2)]
        text = f"{role} {place}"
        if role == "calls":
            messages += [said("" if alone else text, *map(call, ids)), *map(result, ids)]
        else:
            messages.append({"role": role, "content": text})
    messages = readable(messages).messages
    whole = templates[name].render(template_messages(messages), answering=False).text

    # The KV of what the model read before each answer is used again.
    for end in range(2, len(messages)):
        if messages[end]["role"] == "assistant":
            assert whole.startswith(templates[name].render(template_messages(messages[:end]), answering=False).text)


def test_tools_without_a_description_or_parameters_are_completed_where_the_template_needs_them(ask: Asks):
    bare = [{"type": "function", "function": {"name": "add"}}]

    refused, (warning,) = ask("strict", CHAT, messages=[user()], tools=bare)
    taken, warnings = ask("chatml", CHAT, messages=[user()], tools=bare)

    assert refused.endswith("</tool_call><user>Hi")
    assert "description and parameters" in warning
    assert (taken.startswith('{"type": "function", "function": {"name": "add"}}'), warnings) == (True, [])


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_none(ask: Asks, calls: Any):
    turns = [user(), {**said(), "tool_calls": calls}, user("So?")]

    assert ask("mistral", CHAT, messages=turns) == ("<user>Hi<assistant>Yes?<user>So?", [])


# What can't be read -------------------------------------------------------------------------------

IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
IMAGE_URL: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
TEXT: dict[str, Any] = {"type": "text", "text": "Look."}
FOUND = {"type": "search_result", "source": "https://x", "title": "X", "content": [{"type": "text", "text": "Four."}]}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Five."}}
SEARCHED = {
    "type": "web_search_tool_result",
    "tool_use_id": "1",
    "content": [{"type": "web_search_result", "url": "u"}],
}
USED = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
PARTS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    # The route, the body, what the model reads behind the first turn, the kinds that the warning names.
    (CHAT, {"messages": [user([TEXT, IMAGE_URL]), said(), user()]},
     "<user>Look.[image_url left out]<assistant>Yes?<user>Hi", ["image_url"]),
    (CHAT, {"messages": [user(), said("", call()), result(text=[TEXT, IMAGE_URL])]},
     f"<user>Hi<assistant>{ADD}call_1]<tool>Look.[image_url left out]", ["image_url"]),
    (CHAT, {"messages": [user(), said("", call()), result(), user([TEXT, IMAGE_URL])]},
     f"<user>Hi<assistant>{ADD}call_1]<tool>4<user>Look.[image_url left out]", ["image_url"]),
    (CHAT, {"messages": [user(), said([{"type": "thinking", "thinking": "Hm."}, TEXT]), user()]},
     "<user>Hi<assistant>Look.<user>Hi", []),
    (CHAT, {"messages": [user(), result(text={"sum": 4}), user(None), {"role": "user"}]},
     '<user>Hi<tool>{"sum":4}<user><user>', []),
    (CHAT, {"messages": [user(), {"role": "model", "content": "Yes?"}, {"role": "human", "content": "So?"}]},
     "<user>Hi<assistant>Yes?<user>So?", []),
    (CHAT, {"messages": [{"role": "narrator", "content": "Rain."}, user()]}, "<user>Rain.<user>Hi", ["'narrator'"]),
    (MESSAGES, {"messages": [user([IMAGE, TEXT]), said(), user()]},
     "<user>[image left out]Look.<assistant>Yes?<user>Hi", ["image"]),
    (MESSAGES, {"messages": [user(), said([USED]),
                             user([{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE, TEXT]}])]},
     f"<user>Hi<assistant>{ADD}1]<tool>[image left out]Look.", ["image"]),
    (MESSAGES, {"messages": [user([DOCUMENT, FOUND])]}, "<user>Five.Four.", []),
    (MESSAGES, {"messages": [user(), said([{"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
                                           SEARCHED, TEXT]), user()]},
     "<user>Hi<assistant>[server_tool_use left out][web_search_tool_result left out]Look.<user>Hi",
     ["server_tool_use", "web_search_tool_result"]),
    (MESSAGES, {"messages": [user(), said([USED]), user([
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "add"}]}])]},
     f"<user>Hi<assistant>{ADD}1]<tool>[tool_reference left out]", ["tool_reference"]),
    (RESPONSES, {"input": [user([{"type": "input_image", "image_url": "x"}]), said(), user()]},
     "<user>[input_image left out]<assistant>Yes?<user>Hi", ["input_image"]),
    (OLLAMA, {"messages": [{**user("Look."), "images": ["aGk="]}, said(), user()]},
     "<user>Look.[image left out]<assistant>Yes?<user>Hi", ["image"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "read", "words"), PARTS)
def test_what_can_not_be_read_of_an_earlier_turn_is_a_placeholder(
    ask: Asks, path: str, body: dict[str, Any], read: str, words: list[str]
):
    text, warnings = ask("chatml", path, **body)

    assert text == read
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


# Broken calls -------------------------------------------------------------------------------------

CUT = '{"path": "a.txt", "content": "abc'


@pytest.mark.parametrize(
    ("arguments", "read", "told"),
    [
        ('{"a": 1}', {"a": 1}, False),
        ({"a": 1}, {"a": 1}, False),
        ("", {}, False),
        (None, {}, False),
        (CUT, {"arguments": CUT}, True),
        ("[1, 2]", {"arguments": "[1, 2]"}, True),
        ([1, 2], {"arguments": "[1,2]"}, True),
        ("null", {"arguments": "null"}, True),
        ('"text"', {"arguments": '"text"'}, True),
        ("text", {"arguments": "text"}, True),
    ],
)
def test_arguments_of_earlier_calls_are_always_objects(ask: Asks, arguments: Any, read: Any, told: bool):
    turns = {"messages": [user(), said("", call("1", arguments)), result("1")]}
    item = {"type": "function_call", "call_id": "1", "name": "add", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "1", "output": "4"}
    answer = {"type": "tool_result", "tool_use_id": "1", "content": "4"}
    blocks = {"messages": [user(), said([{**USED, "input": arguments}]), user([answer])]}
    bodies = {CHAT: turns, OLLAMA: turns, RESPONSES: {"input": [user(), item, output]}, MESSAGES: blocks}

    for path, body in bodies.items():
        text, warnings = ask("chatml", path, **body)
        written = re.search(r"\[add\((.*)\)\w+\]", text)
        assert written is not None
        assert json.loads(written[1]) == read
        assert ["no JSON object" in warning for warning in warnings] == [True] * told


@pytest.mark.parametrize("calls", [3, [{}], {"a": 1}, ["x"], [{"function": {"arguments": "{}"}}]])
@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_calls_without_a_name_are_left_out(ask: Asks, path: str, calls: Any):
    text, (warning,) = ask("chatml", path, messages=[user(), {**said(), "tool_calls": calls}, user()])

    assert text == "<user>Hi<assistant>Yes?<user>Hi"
    assert "without a name" in warning


# Going on with the last turn ----------------------------------------------------------------------

PREFILL = {"messages": [user(), said("The answer is ")]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"continue_final_message": True}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {"add_generation_prompt": False}),
        (MESSAGES, {}),
        (OLLAMA, {"stream": False}),
        (RESPONSES, {"input": [user(), {**said("The answer is "), "status": "incomplete"}]}),
    ],
)
def test_an_answer_goes_on_with_the_assistant_s_last_turn(
    tmp_path: Path, templates: dict[str, ChatTemplate], path: str, fields: dict[str, Any]
):
    ending = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    asked = "{% if add_generation_prompt %}<assistant>{% endif %}"
    pipeline = FakePipeline()

    answer = post(path, {"max_tokens": 9, **PREFILL, **fields}, pipeline, template=model(tmp_path, ending + asked))

    prompt = templates["chatml"].codec.decode(pipeline.asked[0][0])
    assert prompt == "<user>Hi<end><assistant>The answer is "
    assert '"Hello"' in answer.text


def test_without_a_template_the_last_turn_goes_on_too():
    pipeline = FakePipeline()

    post(CHAT, {**PREFILL, "continue_final_message": True}, pipeline)

    assert TEMPLATE.codec.decode(pipeline.asked[0][0]) == "User: Hi\nAssistant: The answer is "


def test_a_template_that_drops_the_last_turn_has_it_behind_its_beginning_of_an_answer(tmp_path: Path):
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    template = model(tmp_path, source + "{% if add_generation_prompt %}<assistant>{% endif %}")
    pipeline = FakePipeline()

    post(CHAT, {**PREFILL, "continue_final_message": True}, pipeline, template=template)

    assert template.codec.decode(pipeline.asked[0][0]) == "Hi<assistant>The answer is "


def test_a_last_turn_that_is_not_the_assistant_s_begins_an_answer(ask: Asks):
    assert ask("chatml", CHAT, messages=[user()], continue_final_message=True)[0] == "<user>Hi"
    assert ask("chatml", MESSAGES, messages=[user(), said([USED])])[0] == f"<user>Hi<assistant>{ADD}1]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content|center(1000000000) }}", "takes over 512 MiB of memory: choose another model"),
        ("{% if %}", "is broken (Expected an expression"),
    ],
)
def test_a_template_that_is_broken_or_exceeds_its_bounds_refuses_chats_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, words: str
):
    hostile = model(tmp_path, source)

    refused = post(CHAT, {"messages": [user()]}, template=hostile)

    assert refused.status_code == 400
    assert f"The model's chat template {words}" in refused.text
    assert ("demo can't chat" in caplog.text) == ("broken" in words)
    assert post(COMPLETIONS, {"prompt": "Hi"}, template=hostile).status_code == 200
