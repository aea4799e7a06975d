"""Laws of /v1/responses: items are a chat's messages, events add up to the answer, and answers can be referred to."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.http.errors import ApiError
from orchestrator.http.responses.answer import CustomInput, custom_input
from orchestrator.http.responses.request import Response, custom_arguments
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.text.chat_template import ChatTemplate
from protocol.messages.grammar import Json
from tests.support.asked_server import TEMPLATE, post, talk
from tests.support.dialects import RESPONSES as RESPONSES_API
from tests.support.fake_pipeline import READY, FakePipeline

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]


# What is answered --------------------------------------------------------------------------------


def test_an_answer_says_what_was_asked():
    answer = post(RESPONSES, {"input": "Hi", "temperature": 0.5, "metadata": {"a": "b"}, "user": "u"}).json()

    assert (answer["temperature"], answer["top_p"], answer["metadata"]) == (0.5, 1.0, {"a": "b"})
    (item,) = answer["output"]
    assert (item["role"], item["content"][0]["type"]) == ("assistant", "output_text")
    assert (answer["user"], "user" in post(RESPONSES, {"input": "Hi"}).json()) == ("u", False)


# What is referred to -----------------------------------------------------------------------------


def held(*asked: Callable[[list[Any]], dict[str, Any]], **settings: Any) -> tuple[list[Any], FakePipeline]:
    """The answers to questions that each are made from the answers before."""
    pipeline = FakePipeline(condition=structs.replace(READY, context=4096))

    async def ask(client: httpx.AsyncClient) -> list[Any]:
        answers: list[Any] = []
        for body in asked:
            answers.append((await client.post(RESPONSES, json=body(answers))).json())
        return answers

    return talk(ask, pipeline, **settings), pipeline


def test_a_conversation_goes_on_from_an_answer_without_its_instructions():
    _, pipeline = held(
        lambda _: {"input": "Hi", "instructions": "Be brief."},
        lambda answers: {"input": "Why?", "previous_response_id": answers[0]["id"]},
        lambda answers: {"input": "So?", "previous_response_id": answers[1]["id"], "store": False},
    )

    texts = ["Hi", "Hello", "Why?", "Hello", "So?"]
    spoken = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    assert list(pipeline.asked[1][0]) == TEMPLATE.tokens(spoken[:3])
    assert list(pipeline.asked[2][0]) == TEMPLATE.tokens(spoken)


def test_answers_can_be_read_again_until_they_are_deleted():
    async def ask(client: httpx.AsyncClient) -> list[Any]:
        kept = (await client.post(RESPONSES, json={"input": "Hi"})).json()
        unkept = (await client.post(RESPONSES, json={"input": "Hi", "store": False})).json()
        place = f"{RESPONSES}/{kept['id']}"
        found, gone = await client.get(place), await client.get(f"{RESPONSES}/{unkept['id']}")
        deleted, again = await client.delete(place), await client.get(place)
        return [kept == found.json(), gone.status_code, deleted.json()["deleted"], again.status_code]

    assert talk(ask) == [True, 404, True, 404]


@given(sizes=st.lists(st.integers(0, 60), max_size=12))
def test_the_store_is_bounded_and_drops_the_oldest_first(sizes: list[int]):
    store = ResponseStore(120)
    for number, size in enumerate(sizes):
        store.add(str(number), {"said": "x" * size}, [])

    def there(number: int) -> bool:
        try:
            return store.get(str(number)).answer == {"said": "x" * sizes[number]}
        except ApiError:
            return False

    kept = [number for number in range(len(sizes)) if there(number)]
    assert kept == list(range(len(sizes) - len(kept), len(sizes)))
    spent = [len('{"answer":{"said":""},"items":[]}') + size for size in sizes]
    assert sum(spent[number] for number in kept) <= 120
    assert len(kept) == len(sizes) or sum(spent[len(sizes) - len(kept) - 1 :]) > 120


def test_a_used_response_stays_longer():
    store = ResponseStore(100)
    for name in ("a", "b"):
        store.add(name, {}, [])
    store.get("a")
    store.add("c", {"said": "x" * 30}, [])

    with pytest.raises(ApiError):
        store.get("b")
    assert store.get("a").answer == {}


# The store, used by threads ----------------------------------------------------------------------


_ANSWER = {"output": [], "text": "x" * 80}


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_threads_that_add_read_and_delete_do_not_disturb_each_other():
    store = ResponseStore(1_000)

    def use(thread: int) -> None:
        for turn in range(1_500):
            store.add(f"{thread}-{turn}", _ANSWER, [])
            for id in (f"{(thread + 1) % 4}-{turn}", f"{thread}-{turn - 3}"):
                # It may have been dropped.
                with suppress(ApiError):
                    assert store.get(id).answer == _ANSWER
                if turn % 3 == 0:
                    with suppress(ApiError):
                        store.delete(id)

    with ThreadPoolExecutor(4) as threads:
        for ended in [threads.submit(use, thread) for thread in range(4)]:
            ended.result()

    # The bytes were counted right: as many responses fit as in a new store.
    fresh = ResponseStore(1_000)
    for each in (store, fresh):
        for turn in range(20):
            each.add(f"last-{turn}", _ANSWER, [])
    assert _held(store) == _held(fresh)


def _held(store: ResponseStore) -> list[int]:
    found: list[int] = []
    for turn in range(20):
        with suppress(ApiError):
            store.get(f"last-{turn}")
            found.append(turn)
    return found


# Namespaces and custom tools ---------------------------------------------------------------------


ADD = TOOLS[0]
NAMESPACE = {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": [ADD, {**ADD, "name": "sub"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SEARCH = {"type": "web_search", "external_web_access": False}
CODEX = [ADD, NAMESPACE, PATCH, SEARCH, {"type": "image_generation"}, SEARCH]
"""The kinds of tools that Codex sends."""


def called(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def offered(*tools: Any) -> dict[str, Any]:
    """What the model is told of each tool, by its name."""
    offered = [tool["function"] for tool in Response(input="a", tools=[*tools]).chat([]).offered]
    return {function.pop("name"): function for function in ({**each} for each in offered)}


def test_functions_of_namespaces_get_joined_names_and_the_description_of_a_namespace_is_read_once():
    about_add = {**ADD, "description": "Adds."}
    found = offered(NAMESPACE, {**NAMESPACE, "name": "crm_", "tools": [{**ADD, "name": "_add"}]})
    described = offered({**NAMESPACE, "tools": [about_add, {**about_add, "name": "more"}]})

    assert list(found) == ["mcp__sums__add", "mcp__sums__sub", "crm__add"]
    assert found["mcp__sums__sub"] == {"parameters": {"type": "object"}, "strict": False}
    assert [function["description"] for function in described.values()] == ["Sums.\n\nAdds.", "Adds."]


def test_a_custom_tool_is_a_function_of_one_text_which_its_grammar_describes():
    (function,) = offered(PATCH).values()

    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert function["description"] == "Patches files.\n\nThe input follows this lark grammar:\nstart: /.+/"


def test_the_same_tool_may_come_twice():
    assert list(offered(ADD, ADD)) == ["add"]


HI = {"type": "message", "role": "user", "content": "Hi"}


def added(*tools: Any) -> dict[str, Any]:
    """An item that offers tools."""
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


def test_of_two_definitions_of_a_tool_the_later_one_counts_also_of_an_item():
    described = {**ADD, "description": "Adds."}
    items = [added(NAMESPACE), HI, added({**NAMESPACE, "tools": [described]}), added({**PATCH, "name": "add"})]

    chat = Response(input=items[1:], tools=[ADD, SEARCH]).chat(items[:1])

    functions = {tool["function"]["name"]: tool["function"] for tool in chat.offered}
    assert list(functions) == ["add", "mcp__sums__add", "mcp__sums__sub"]
    assert list(functions["add"]["parameters"]["properties"]) == ["input"]
    assert functions["mcp__sums__add"]["description"] == "Sums.\n\nAdds."
    assert [message["content"] for message in chat.messages] == ["Hi"]


def test_tools_of_an_item_stay_when_the_conversation_is_continued_or_compacted(hermes: ChatTemplate):
    for items in ([added(ADD), HI], [added(ADD), HI, {"type": "compaction_trigger"}]):
        _, pipeline = held(
            lambda _, items=items: {"input": items},
            lambda answers: {"input": "So?", "previous_response_id": answers[0]["id"]},
            template=hermes,
        )

        assert '"name": "add"' in hermes.codec.decode(pipeline.asked[1][0])


@pytest.mark.parametrize("in_item", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_back_as_what_the_client_offered(hermes: ChatTemplate, stream: bool, in_item: bool):
    said = [
        called("add", {"a": 1}),
        called("mcp__sums__add", {"a": 2}),
        called("apply_patch", {"input": "*** Begin\nü"}),
        called("apply_patch", {"patch": 1}),
        called("exec", {}),
    ]
    default = {**NAMESPACE, "name": "functions", "tools": [{**ADD, "name": "exec"}]}
    given = {"input": [added(*CODEX, default), HI]} if in_item else {"input": [HI], "tools": [*CODEX, default]}

    pipeline = FakePipeline(lambda _: [*"\n".join(said)], condition=structs.replace(READY, context=4096))
    answer = post(RESPONSES, {**given, "stream": stream}, pipeline, template=hermes)

    output = (RESPONSES_API.whole(RESPONSES_API.events(answer)) if stream else answer.json())["output"]
    kept = ("type", "namespace", "name", "arguments", "input")
    assert {item["status"] for item in output} == {"completed"}
    assert [{name: item[name] for name in kept if name in item} for item in output] == [
        {"type": "function_call", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "namespace": "mcp__sums", "name": "add", "arguments": '{"a": 2}'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\nü"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch": 1}'},
        {"type": "function_call", "namespace": "functions", "name": "exec", "arguments": "{}"},
    ]


def test_tools_that_are_not_run_here_are_left_out_and_told(hermes: ChatTemplate):
    answer = post(RESPONSES, {"input": "Hi", "tools": CODEX, "stream": True}, template=hermes)

    for event in (RESPONSES_API.events(answer)[0], RESPONSES_API.events(answer)[-1]):
        told = [warning.split("'")[1] for warning in event["response"]["warnings"]]
        assert told == ["web_search", "image_generation"]
        assert event["response"]["tools"] == CODEX
    # A model without tools answers if none is left.
    assert post(RESPONSES, {"input": "Hi", "tools": [SEARCH], "top_logprobs": 1}).status_code == 200


def test_earlier_calls_have_the_names_that_the_model_knows():
    call = {"call_id": "1", "name": "add", "namespace": "mcp__sums"}

    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {**call, "type": "function_call", "arguments": "{}"},
        {**call, "type": "custom_tool_call", "name": "apply_patch", "namespace": None, "input": "abc"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "5"}]},
    ]
    assistant, added, patched = Response(input=items).chat([]).messages

    assert [each["function"] for each in assistant["tool_calls"]] == [
        {"name": "mcp__sums__add", "arguments": "{}"},
        {"name": "apply_patch", "arguments": '{"input":"abc"}'},
    ]
    assert (added["content"], patched["content"]) == ("4", "5")


@pytest.mark.parametrize("text", ["", "*** Begin", '{"input": 1}', '\n\\"ü☃😀'])
def test_the_input_of_a_custom_tool_survives_being_arguments(text: str):
    assert custom_input(custom_arguments(text)) == text
    for arguments in (custom_arguments(text), json.dumps({"input": text})):
        assert "".join(map(CustomInput().push, arguments)) == text


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "add", "namespace": "mcp__sums"}, "mcp__sums__add"),
    ],
)
def test_a_named_tool_is_forced_by_the_name_that_the_model_knows(
    hermes: ChatTemplate, choice: dict[str, str], name: str
):
    pipeline = FakePipeline()

    post(RESPONSES, {"input": "Hi", "tools": CODEX, "tool_choice": choice}, pipeline, template=hermes)

    ((_, params),) = pipeline.asked
    assert params.grammar is not None
    assert params.grammar.calls is not None
    (form,) = params.grammar.calls.forms
    assert any(isinstance(part, Json) and f'"const": "{name}"' in part.schema for part in form)


def test_a_choice_may_leave_some_of_the_tools():
    listed = [{"type": "function", "name": "sub", "namespace": "mcp__sums"}, {"type": "custom", "name": "apply_patch"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [*listed, {"type": "image_generation"}]}

    chat = Response(input="a", tools=[*CODEX], tool_choice=choice).chat([])

    assert [tool["function"]["name"] for tool in chat.offered] == ["mcp__sums__sub", "apply_patch"]
