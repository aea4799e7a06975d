"""Laws of tools: a call in what a model says comes out as one, however it was cut; what is none stays text."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from orchestrator.http.openai.history import readable, template_messages
from orchestrator.http.openai.request import ChatRequest, read
from orchestrator.text.chat_template import ChatTemplate
from tests.orchestrator.http.test_dialects import DEEPSEEK, TOOLS, each
from tests.support.asked_server import CHAT, HELLO, TEMPLATE, asked, chunks, post, saying
from tests.support.dialects import Dialect
from tests.support.fake_pipeline import READY, FakePipeline, FakeStream
from tests.support.models.chat_models import model, takes

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
LISTED = '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "parameters": {"a": 3}}]'
SAID = "Let me see.\n" + CALL + "\n" + CALL.replace("1", "3")


def ask(hermes: ChatTemplate, said: list[str | None], **more: Any) -> httpx.Response:
    return post(CHAT, {**HELLO, "tools": TOOLS, **more}, saying(said), template=hermes)


def functions(calls: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


BOTH = [("add", {"a": 1, "b": [2]}), ("add", {"a": 3, "b": [2]})]


def test_a_client_may_take_one_call_alone(hermes: ChatTemplate):
    (choice,) = ask(hermes, [SAID], parallel_tool_calls=False).json()["choices"]

    assert functions(choice["message"]["tool_calls"]) == BOTH[:1]


def test_a_stream_shows_life_while_a_call_is_generated(hermes: ChatTemplate, monkeypatch: pytest.MonkeyPatch):
    class Slow(FakeStream):
        async def __aiter__(self) -> AsyncIterator[str]:
            async for piece in super().__aiter__():
                await asyncio.sleep(0.01)
                yield piece

    monkeypatch.setattr("tests.support.fake_pipeline.FakeStream", Slow)

    answer = ask(hermes, [*CALL], stream=True)

    assert answer.text.count(": keep-alive") >= 2
    pieces = [call for chunk in chunks(answer) for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": 1, "b": [2]}'


def test_calls_are_looked_for_only_where_tools_were_offered(hermes: ChatTemplate):
    (choice,) = ask(hermes, [SAID], tool_choice="none").json()["choices"]

    assert choice["message"]["content"] == SAID


@pytest.fixture(params=["plain", "gemma", "chatml", "unknown"])
def untaught(request: pytest.FixtureRequest, tmp_path: Path, templates: dict[str, ChatTemplate]) -> ChatTemplate:
    """No template, one that takes no system message, one that knows no tools, and one with an unknown syntax."""
    chatml = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}<assistant>"
    made = {"chatml": chatml.replace("{{ m.tool_calls }}", ""), "unknown": "{{ tools or '' }}" + chatml}
    known = {"plain": TEMPLATE, "gemma": templates["gemma"]}
    return known[request.param] if request.param in known else model(tmp_path, made[request.param])


@each
@pytest.mark.parametrize("said", [SAID, LISTED])
def test_a_model_that_was_not_taught_is_told_the_tools(untaught: ChatTemplate, dialect: Dialect, said: str):
    pipeline = FakePipeline(lambda _: said, condition=replace(READY, context=4096))
    for stream in (False, True):
        reply = dialect.reply(dialect.answer(pipeline, untaught, stream=stream, tools=TOOLS))
        assert [name for name, _ in reply.calls] == ["add", "add"]
        assert [arguments["a"] for _, arguments in reply.calls] == [1, 3]
        assert any("knows no tools" in warning for warning in reply.warnings)
    prompt = untaught.codec.decode(pipeline.asked[0][0])
    assert prompt.count(json.dumps(TOOLS[0]["function"])) == 1
    assert prompt.index("# Tools") < prompt.index("Hello")
    assert dialect.reply(dialect.answer(template=untaught)).warnings == []


def test_it_reads_its_calls_as_it_wrote_them(untaught: ChatTemplate):
    rules = {"role": "system", "content": "Be brief."}
    first = asked(CHAT, {"messages": [rules, *HELLO["messages"]], "tools": TOOLS}, untaught).prompt
    calls = [{"id": id, "function": {"name": "add", "arguments": {"a": a, "b": [2]}}} for id, a in (("x", 1), ("y", 3))]
    turn = {"role": "assistant", "content": "Let me see.\n", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": id, "content": f"Answer {id}"} for id in "xy"]

    messages = [rules, *HELLO["messages"], turn, *results]
    found = asked(CHAT, {"messages": messages, "tools": TOOLS}, untaught)

    # A stripped text behind a heading, or a template that begins no answer.
    begun = " " if untaught is TEMPLATE else "" if first.endswith("<assistant>") else "<assistant>"
    assert found.prompt.startswith(first + begun + SAID)
    assert "Result of add:\nAnswer x\n\nResult of add:\nAnswer y" in found.prompt
    assert not any("leaves out" in warning for warning in found.warnings)


def test_its_calls_are_enforced(untaught: ChatTemplate):
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        grammar = asked(CHAT, {**HELLO, "tools": TOOLS, "tool_choice": choice}, untaught).params.grammar
        assert takes(untaught, grammar, CALL)
        assert not takes(untaught, grammar, "Let me see.")
        assert not takes(untaught, grammar, CALL.replace("add", "sub"))


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": id, "function": {"name": name, "arguments": "{}"}} for id, name in (("1", "f"), ("2", "g"))],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "2", "content": '{"a": 1}'},
    {"role": "tool", "tool_call_id": "1", "content": "[1]"},
    {"role": "tool", "tool_call_id": [3], "content": "?"},
]


def read_by_a_template(messages: list[dict[str, Any]], **form: bool) -> list[dict[str, Any]]:
    return template_messages(readable(messages).messages, **form)


def test_results_have_the_names_of_their_functions():
    found = read_by_a_template([CALLED, *RESULTS, {**RESULTS[0], "name": "h"}])

    assert [message.get("name") for message in found] == [None, "g", "f", None, "h"]
    for odd in (3, {"a": 1}, [3], [{"id": "1"}]):
        assert read_by_a_template([{**CALLED, "tool_calls": odd}, *RESULTS], joined=True)


def test_results_join_their_calls_where_the_template_has_it_so():
    parts = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": '{"b"'}, {"text": ": 2}"}]}
    turns = [{**CALLED, "tool_responses": 3}, *RESULTS, parts, {"role": "user", "content": "Hi"}]

    (called, user) = read_by_a_template(turns, joined=True)

    assert [(each["name"], each["response"]) for each in called["tool_responses"]] == [
        ("g", {"a": 1}),
        ("f", "[1]"),
        ("unknown", "?"),
        ("f", {"b": 2}),
    ]
    assert user == {"role": "user", "content": "Hi"}


def test_templates_read_the_arguments_of_earlier_calls(hermes: ChatTemplate):
    function = {"name": "add", "arguments": '{"a": 41}'}
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]

    assert hermes.text(read_by_a_template(messages)) == "assistant: 41"
    assert read_by_a_template([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}, 3]}])


def test_deepseek_is_told_the_tools_and_its_earlier_calls(models: dict[str, ChatTemplate]):
    earlier = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]

    prompt = asked(CHAT, {"messages": messages, "tools": TOOLS}, models["deepseek"]).prompt

    assert prompt.startswith("<｜system｜>Be brief.\n\n## Tools")
    assert "### add" in prompt
    assert DEEPSEEK.replace("{}", '{"a": 2}') in prompt


def test_without_tools_deepseek_is_told_nothing_and_its_markers_are_text(models: dict[str, ChatTemplate]):
    answer = post(CHAT, HELLO, saying([DEEPSEEK]), template=models["deepseek"]).json()

    assert "Tools" not in asked(CHAT, HELLO, models["deepseek"]).prompt
    assert answer["choices"][0]["message"]["content"] == DEEPSEEK


def test_a_call_without_an_id_gets_one_that_every_template_reads(models: dict[str, ChatTemplate]):
    """Mistral's read nine letters and digits alone."""
    answer = post(CHAT, {**HELLO, "tools": TOOLS}, saying([DEEPSEEK]), template=models["deepseek"]).json()

    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call["id"])


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a":2}'])
def test_arguments_stay_text_where_the_template_joins_texts(arguments: Any):
    call = {"id": "1", "function": {"name": "add", "arguments": arguments}}

    (message,) = read_by_a_template([{"role": "assistant", "tool_calls": [call]}], written=True)

    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":2}'
    assert read_by_a_template([{"role": "assistant", "tool_calls": [3, {}]}], written=True)


def test_calls_of_the_older_api_in_earlier_turns_are_read(hermes: ChatTemplate):
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 41}'}}
    result = {"role": "function", "name": "add", "content": "42"}

    rendered = hermes.render(read_by_a_template([called, result]))
    assert (rendered.text, rendered.left_out, rendered.repaired) == ("assistant: 41tool: 42", (), ())
    assert ask(hermes, ["Fine."], messages=[*HELLO["messages"], called, result]).status_code == 200
    (first, second) = read_by_a_template([called, result])
    assert second["tool_call_id"] == first["tool_calls"][0]["id"]


def test_a_choice_may_leave_some_of_the_tools(hermes: ChatTemplate):
    other = {"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "walk"}}

    def choice(mode: str, *tools: Any) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}

    def request(choice: Any, *tools: Any) -> ChatRequest:
        return read(json.dumps({**HELLO, "tools": [*tools, other], "tool_choice": choice}).encode(), ChatRequest)

    assert [tool["function"]["name"] for tool in request(choice("auto", named), *TOOLS).offered] == ["walk"]
    assert request(choice("auto", named), *TOOLS).grammar() is None
    assert request(choice("required", named), *TOOLS).grammar() == request("required").grammar()
    for wrong in (choice("auto", {"type": "function", "function": {"name": "fly"}}), {"type": "allowed_tools"}):
        answer = ask(hermes, ["Fine."], tool_choice=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
