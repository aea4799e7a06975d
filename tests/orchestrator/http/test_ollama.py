"""Laws of Ollama's API: a request is the chat it stands for, lines add up to the object, errors have its shape."""

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.http.errors import ApiError
from orchestrator.http.model_host import ModelHost
from orchestrator.http.model_table import ModelName
from orchestrator.http.ollama.request import chat_messages, keep_seconds, own_name
from tests.support.asked_server import CHAT, COMPLETIONS, asked, get, post
from tests.support.fake_models import FakeModels
from tests.support.fake_pipeline import FakePipeline
from tests.support.models.chat_models import QWEN, model

CHATS, GENERATE = "/api/chat", "/api/generate"
TURNS: list[Any] = [{"role": "user", "content": "Hi"}]
HI: dict[str, Any] = {"model": "demo", "messages": TURNS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def lines(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


# What is asked -----------------------------------------------------------------------------------


def test_a_prompt_is_a_user_s_message_and_a_raw_one_is_continued():
    pipeline = FakePipeline()

    post(GENERATE, {"prompt": "Hi", "system": "Be brief.", "options": {"seed": 7}}, pipeline)
    post(CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *TURNS], "seed": 7}, pipeline)
    post(GENERATE, {"prompt": "Hi", "raw": True, "options": {"seed": 7}}, pipeline)
    post(COMPLETIONS, {"prompt": "Hi", "seed": 7, "max_tokens": 10_000}, pipeline)

    assert pipeline.asked[0] == pipeline.asked[1]
    assert [list(prompt) for prompt, _ in pipeline.asked[2:]] == [list(pipeline.asked[3][0])] * 2
    assert pipeline.asked[2][1] == pipeline.asked[3][1]


@pytest.mark.parametrize("form", ["json", SCHEMA, ""])
@pytest.mark.parametrize("raw", [False, True])
def test_a_format_of_a_prompt_is_enforced(form: Any, raw: bool):
    question = {"prompt": "Hi", "stream": False, "format": form, "options": {"seed": 1}}
    chat = {"messages": TURNS, "stream": False, "format": form, "options": {"seed": 1}}

    found = asked(GENERATE, {**question, "raw": raw}).params.grammar

    assert found == asked(CHATS, chat).params.grammar
    assert (found is None) == (form == "")


def test_earlier_calls_and_results_are_those_of_a_chat():
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "find", "add")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("find", "add", "add", "other")]

    said, *answers = chat_messages([{"role": "assistant", "thinking": "Hm.", "tool_calls": calls}, *results])

    ids = [call["id"] for call in said["tool_calls"]]
    assert (len({*ids}), said["content"], said["reasoning_content"]) == (3, "", "Hm.")
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [answer.get("tool_call_id") for answer in answers] == [ids[1], ids[0], ids[2], None]
    assert [answer["name"] for answer in answers] == ["find", "add", "add", "other"]


@pytest.mark.parametrize(
    ("result", "id"), [({"content": "2"}, "call00000"), *(({"name": name}, None) for name in (["add"], {}, 3, ""))]
)
def test_a_result_without_a_name_answers_the_first_open_call_and_one_of_no_function_none(result: Any, id: str | None):
    call = {"function": {"name": "add"}}

    *_, answer = chat_messages([{"role": "assistant", "tool_calls": [call]}, {"role": "tool", **result}])

    assert answer.get("tool_call_id") == id
    assert id is None or answer["name"] == "add"


@pytest.mark.parametrize("named", [True, False])
def test_many_calls_and_results_take_time_in_proportion(named: bool):
    names = [f"f{place}" for place in range(10_000)]
    calls = [{"function": {"name": name}} for name in names]
    results = [{"role": "tool", "tool_name": name if named else None} for name in reversed(names)]

    began = time.process_time()
    said, *answers = chat_messages([{"role": "assistant", "tool_calls": calls}, *results])

    # Looking through the open calls for each result took two to four seconds.
    assert time.process_time() - began < 1
    ids = [call["id"] for call in said["tool_calls"]]
    assert len({*ids}) == len(names)
    assert [answer["tool_call_id"] for answer in answers] == (ids[::-1] if named else ids)


def test_the_tag_latest_is_none():
    assert post(CHATS, {**HI, "model": "demo:latest", "stream": False}).json()["model"] == "demo"
    assert (own_name("a:latest"), own_name("a:3b"), own_name("")) == ("a", "a:3b", None)


# What is answered --------------------------------------------------------------------------------


def test_lines_of_a_continuation_add_up_to_the_object():
    told = lines(post(GENERATE, {"prompt": "Hi"}))
    whole = post(GENERATE, {"prompt": "Hi", "stream": False}).json()

    assert [part["done"] for part in told] == [False] * (len(told) - 1) + [True]
    assert "".join(part["response"] for part in told) == whole["response"] == "Hello"
    assert {**told[-1], "created_at": 0, "response": 0} == {**whole, "created_at": 0, "response": 0}


@pytest.mark.parametrize(("keep", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")])
@pytest.mark.parametrize("path", [CHATS, GENERATE])
def test_a_request_without_a_prompt_only_loads_or_unloads(path: str, keep: Any, reason: str):
    pipeline = FakePipeline()

    answer = post(path, {"model": "demo", "keep_alive": keep}, pipeline)

    assert (answer.json()["done"], answer.json()["done_reason"], pipeline.asked) == (True, reason, [])


def test_a_model_is_not_called_loaded_before_it_is():
    answer = post(CHATS, {"model": "demo"}, FakePipeline(condition=None))

    assert (answer.status_code, "still being loaded" in answer.json()["error"]) == (503, True)
    assert get("/api/ps", FakePipeline(condition=None)).json() == {"models": []}


# Models ------------------------------------------------------------------------------------------


def test_the_list_of_models_names_them_and_their_sizes():
    tags, running = get("/api/tags").json()["models"], get("/api/ps").json()["models"]

    assert [model["name"] for model in tags] == [model["model"] for model in running] == ["demo"]
    assert tags[0]["size"] == running[0]["size"] > 1 << 20
    assert (tags[0]["details"]["format"], tags[0]["details"]["family"]) == ("safetensors", "llama")
    assert running[0]["context_length"] == 256
    assert running[0]["expires_at"] > tags[0]["modified_at"]


@pytest.mark.parametrize("name", [{"model": "demo"}, {"name": "demo:latest"}, {}])
def test_show_tells_what_a_model_can(name: dict[str, str], tmp_path: Path):
    told = post("/api/show", name, template=model(tmp_path, QWEN)).json()

    assert told["capabilities"] == ["completion", "tools", "thinking"]
    assert told["model_info"]["general.architecture"] == told["details"]["family"] == "llama"
    assert told["model_info"]["llama.context_length"] == 256
    assert post("/api/show", {"model": "llama3"}).status_code == 404


# How long a model stays --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(300, 300.0), (0, 0.0), (-1, None), ("5m", 300.0), ("1h30m", 5400.0), ("-1", None), ("-1m", None), ("1.5s", 1.5)],
)
def test_a_time_is_seconds_or_a_duration(given: Any, seconds: float | None):
    assert keep_seconds(given) == seconds


@given(st.one_of(st.text(max_size=8), st.booleans(), st.lists(st.integers(), max_size=2)))
def test_no_other_time_gets_through(given: Any):
    with suppress(ApiError):
        found = keep_seconds(given)
        assert found is None or found >= 0


# Several models ----------------------------------------------------------------------------------


TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
SMALL = ModelName("small")


def test_the_lists_say_what_is_there_and_what_is_loaded():
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[Any]:
        await client.post(CHATS, json={**TURN, "model": "small:latest"})
        lists = [(await client.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")]
        return [*lists, (await client.post("/api/show", json={"model": "gpt-4o-mini"})).json()]

    tags, running, shown = FakeModels().talk(ask)

    assert [model["name"] for model in tags] == ["big", "other", "small", "gpt-4o-mini"]
    assert [(model["name"], model["size"]) for model in running] == [("small", 4), ("gpt-4o-mini", 4)]
    assert "completion" in shown["capabilities"]


@pytest.mark.parametrize(("keep", "left"), [("5m", 300.0), (-1, None)])
def test_a_request_says_how_long_its_model_stays(keep: Any, left: float | None):
    async def ask(client: httpx.AsyncClient, host: ModelHost) -> float | None:
        await client.post(CHATS, json={**TURN, "model": "small", "keep_alive": keep})
        found = host.left(SMALL)
        return found if found is None else round(found, -1)

    assert FakeModels().talk(ask) == left


@pytest.mark.parametrize("path", [CHATS, GENERATE])
def test_a_request_without_a_prompt_loads_and_unloads(path: str):
    models = FakeModels()

    async def ask(client: httpx.AsyncClient, host: ModelHost) -> list[Any]:
        asked = [{"model": "small", "keep_alive": 0}, {"model": "small"}, {"model": "small", "keep_alive": 0}]
        reasons = [(await client.post(path, json=each)).json()["done_reason"] for each in asked]
        while not models.unloads:
            await asyncio.sleep(0.01)
        return [reasons, host.loaded(SMALL)]

    assert models.talk(ask) == [["unload", "load", "unload"], None]
    assert (models.loads, models.unloads) == (["small"], ["small"])
