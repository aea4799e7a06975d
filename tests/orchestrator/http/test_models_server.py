"""Laws of a server with several models: the named one answers, waiting is told, one that fails does not stop others."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from orchestrator.http.app import application
from orchestrator.http.metrics import Metrics
from orchestrator.http.model_host import ModelHost, ModelPipeline, PipelineLoader
from orchestrator.http.model_table import ModelEntry, ModelName
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.settings import ServerSettings
from orchestrator.http.work import AdmissionLimit
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from tests.support.asked_server import (
    BODIES,
    CHAT,
    HELLO,
    RESPONSES,
    SCOPE,
    receiving,
)
from tests.support.fake_models import FakeModels
from tests.support.fake_pipeline import READY, FakePipeline


def events(response: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def said(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


async def soon(there: Callable[[], object]) -> None:
    while not there():
        await asyncio.sleep(0.01)


async def chat(client: httpx.AsyncClient, *names: str) -> list[httpx.Response]:
    """The answers to a chat with each of these models."""
    return [await client.post(CHAT, json={**HELLO, "model": name}) for name in names]


def test_the_named_model_answers_and_the_first_one_is_the_default():
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[httpx.Response]:
        names: list[dict[str, Any]] = [{"model": "small"}, {"model": "gpt-4o-mini"}, {}]
        return [await client.post(CHAT, json={**HELLO, **name}) for name in names]

    models = FakeModels()
    answers = models.talk(ask)

    assert [said(answer) for answer in answers] == ["small", "small", "big"]
    assert answers[1].json()["model"] == "gpt-4o-mini"
    assert models.loads == ["small", "big"]


@pytest.mark.parametrize("path", BODIES)
def test_every_api_reaches_its_model(path: str):
    models = FakeModels()

    answer = models.talk(lambda client, _: client.post(path, json={**BODIES[path], "model": "other"}))

    assert (answer.status_code, models.loads) == (200, ["other"])
    assert '"other"' in answer.text


@pytest.mark.parametrize(("path", "body"), BODIES.items())
@pytest.mark.parametrize("asked", ["claude-haiku-4-5", "claude-3-5-haiku-20241022", "gpt-5-nano", "gpt-4.1-mini"])
def test_a_clients_background_request_is_answered_by_the_model_that_is_there(
    path: str, body: dict[str, Any], asked: str
):
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> httpx.Response:
        await chat(client, "other")
        return await client.post(path, json={**body, "model": asked})

    models = FakeModels()
    answer = models.talk(ask)

    assert (answer.status_code, models.loads) == (200, ["other"])
    assert answer.json()["model"] == "other"
    assert answer.json()["warnings"] == [f"This server has no {asked}, so other answers."]


NAMES = ["gpt-5", "claude-sonnet-4-5", "mini", "x/gpt-5-mini", "claude-haiku/../x", "gpt-5-nano\n", "/etc"]


@pytest.mark.parametrize("name", [*NAMES, None])
def test_what_is_refused_loads_nothing_and_tells_the_names_that_there_are(name: str | None):
    """None: the body is no JSON."""
    models = FakeModels()
    body = "{" if name is None else json.dumps({**HELLO, "model": name})
    sent = {"content": body, "headers": {"content-type": "application/json"}}

    answer = models.talk(lambda client, _: client.post(CHAT, **sent))

    assert (answer.status_code, models.loads) == (400 if name is None else 404, [])
    told = "ask for big, other, small, gpt-4o-mini" in answer.json()["error"]["message"]
    assert told == (name is not None)


def test_the_lists_of_both_apis_say_what_is_loaded():
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[Any]:
        await chat(client, "small")
        anthropic = {"anthropic-version": "2023-06-01"}
        lists = [(await client.get("/v1/models", headers=headers)).json() for headers in ({}, anthropic)]
        return [*lists, (await client.get("/v1/models/small")).json(), (await client.get("/v1/models/no")).status_code]

    openai, anthropic, card, unknown = FakeModels().talk(ask)

    names = ["big", "other", "small", "gpt-4o-mini"]
    assert [(each["id"], each["loaded"]) for each in openai["data"]] == list(
        zip(names, [False, False, True, True], strict=True)
    )
    assert [each["id"] for each in anthropic["data"]] == names
    assert [each["max_input_tokens"] for each in anthropic["data"]] == [None, None, 256, 256]
    assert (card["level"], card["loaded"], unknown) == ("tree", True, 404)


def test_a_model_makes_room_for_another_when_its_requests_have_ended_and_the_figures_are_those_of_all():
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> tuple[list[httpx.Response], str]:
        return await chat(client, "big", "small", "other"), (await client.get("/metrics")).text

    models = FakeModels()
    answers, told = models.talk(ask)

    assert [*map(said, answers)] == ["big", "small", "other"]
    assert (models.loads, models.unloads) == (["big", "small", "other"], ["big"])
    assert 'launch_pipeline_generations_total{reason="stop"} 3.0' in told
    assert 'launch_pipeline_http_requests_total{route="/v1/chat/completions",status="200"} 3.0' in told


def test_a_model_whose_unloading_fails_leaves_its_room_to_others():
    models = FakeModels()

    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[httpx.Response]:
        first = await chat(client, "big")
        models.failures["big"] = "Its folder can't be removed."
        return [*first, *await chat(client, "other")]

    assert [*map(said, models.talk(ask))] == ["big", "other"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_tells_why_and_then_has_its_answer(path: str):
    models = FakeModels()
    waited = events(models.talk(lambda client, _: models.streamed_while_loading(client, path, BODIES[path])))
    plain = events(FakeModels().talk(lambda client, _: client.post(path, json={**BODIES[path], "stream": True})))

    loading = [event for event in waited if "loading" in event]
    assert loading[0]["loading"]["model"] == "big"
    assert loading[0]["loading"]["status"] == "reading weights"
    assert [shape(event) for event in waited if "loading" not in event] == [shape(event) for event in plain]


def shape(event: Any) -> Any:
    """Without what differs between two answers."""
    return event.get("type") or event.get("choices") or (event["model"], event["done"], event.keys())


def test_a_response_that_waited_keeps_its_id_and_its_numbers():
    models = FakeModels()

    async def ask(client: httpx.AsyncClient, _: ModelHost) -> tuple[httpx.Response, httpx.Response]:
        answer = await models.streamed_while_loading(client, RESPONSES, {"input": "Hi"})
        return answer, await client.get(f"{RESPONSES}/{events(answer)[-1]['response']['id']}")

    answer, stored = models.talk(ask)
    told = events(answer)

    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.queued"]
    assert len({event["response"]["id"] for event in told if "response" in event}) == 1
    assert stored.json()["output"] == told[-1]["response"]["output"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_can_not_be_loaded_is_an_error_with_the_reason(path: str, late: bool):
    models = FakeModels(failures={"big": "There is no such folder."})

    def ask(client: httpx.AsyncClient, _: ModelHost) -> Any:
        return (
            models.streamed_while_loading(client, path, BODIES[path]) if late else client.post(path, json=BODIES[path])
        )

    answer = models.talk(ask)

    assert "The model big can't be loaded. There is no such folder." in answer.text
    assert answer.status_code == (200 if late else 503)
    if not late:
        assert answer.headers["retry-after"] == "30"


def test_the_others_go_on_when_one_fails_and_health_names_it():
    models = FakeModels(failures={"big": "There is no such folder."})

    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[httpx.Response]:
        answers = await chat(client, "big", "big", "small")
        stranger = await client.get("/health", headers={"authorization": "Bearer no"})
        return [*answers, await client.get("/health"), stranger, await client.get("/metrics")]

    first, second, small, health, stranger, metrics = models.talk(ask)

    assert (first.status_code, second.status_code, said(small)) == (503, 503, "small")
    assert models.loads == ["big", "small"]
    told = health.json()
    assert (health.status_code, told["status"]) == (503, "degraded")
    assert {name: each["status"] for name, each in told["models"].items()} == {
        "big": "failed",
        "other": "unloaded",
        "small": "ok",
    }
    assert "no such folder" in told["models"]["big"]["reason"]
    assert (stranger.status_code, stranger.json()) == (503, {"status": "degraded"})
    assert 'launch_pipeline_status{status="degraded"} 1.0' in metrics.text


def test_a_pipeline_that_ends_by_itself_leaves_the_table():
    models = FakeModels()

    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[Any]:
        await chat(client, "small")
        models.ended["small"].set_result("The target was killed.")
        await soon(lambda: models.unloads)
        return [(await client.get("/health")).json()["models"]["small"], await client.post(CHAT, json=HELLO)]

    small, big = models.talk(ask)

    assert (small["status"], small["reason"]) == (
        "failed",
        "The pipeline of the model small has ended. The target was killed.",
    )
    assert (said(big), models.unloads) == ("big", ["small"])


@pytest.mark.parametrize("stream", [False, True])
def test_requests_in_a_pipeline_that_ends_by_itself_are_told_why(stream: bool):
    models = FakeModels(pipelines={"small": FakePipeline(pieces=lambda _: [*(["a"] if stream else []), None])})

    async def ask(client: httpx.AsyncClient, _: ModelHost) -> httpx.Response:
        asking = asyncio.create_task(client.post(CHAT, json={**HELLO, "model": "small", "stream": stream}))
        await models.pipelines["small"].stuck.wait()
        models.ended["small"].set_result("The target was killed.")
        return await asking

    answer = models.talk(ask)

    assert "The pipeline of the model small has ended. The target was killed." in answer.text
    if not stream:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")


def test_a_request_that_finds_too_many_waiting_gets_429():
    models = FakeModels(most_waiting=2)

    async def ask(client: httpx.AsyncClient, host: ModelHost) -> tuple[httpx.Response, int, dict[str, Any]]:
        models.held["big"] = asyncio.Event()
        waiting = [asyncio.create_task(client.post(CHAT, json=HELLO)) for _ in range(2)]
        await soon(lambda: host.waiting == 2)
        refused, health = await client.post(CHAT, json=HELLO), (await client.get("/health")).json()
        models.held["big"].set()
        return refused, sum([(await each).status_code == 200 for each in waiting]), health

    refused, served, health = models.talk(ask)

    assert (refused.status_code, refused.headers["retry-after"], served) == (429, "5", 2)
    assert (health["waiting"], health["models"]["big"]["status"]) == (2, "loading")


def test_a_client_that_goes_while_it_waits_frees_its_place_and_a_running_one_its_model():
    models = FakeModels(pipelines={"big": FakePipeline(pieces=lambda _: ["a", None])})

    async def ask(client: httpx.AsyncClient, host: ModelHost) -> tuple[int, str]:
        running = asyncio.create_task(client.post(CHAT, json={**HELLO, "stream": True}))
        await models.pipelines["big"].stuck.wait()
        waiting = asyncio.create_task(client.post(CHAT, json={**HELLO, "model": "other", "stream": True}))
        await soon(lambda: host.waiting)
        waiting.cancel()
        await soon(lambda: not host.waiting)
        left = len(host.status(ModelName("big")).running)
        running.cancel()
        return left, said(await client.post(CHAT, json={**HELLO, "model": "other"}))

    assert models.talk(ask) == (1, "other")
    assert models.unloads == ["big"]


def test_generation_ends_when_a_client_goes_that_waited_for_its_model():
    models = FakeModels(pipelines={"big": FakePipeline(pieces=lambda _: ["a", None])})

    async def ask(client: httpx.AsyncClient, _: ModelHost) -> None:
        asking = asyncio.create_task(models.streamed_while_loading(client, CHAT, HELLO))
        await models.pipelines["big"].stuck.wait()
        # Until its text goes on in the stream.
        await asyncio.sleep(0.1)
        asking.cancel()
        await models.pipelines["big"].cancelled.wait()

    models.talk(ask)

    assert models.pipelines["big"].running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_while_its_model_is_loaded_waits_no_more(stream: bool):
    models = FakeModels()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> int:
        models.held["big"], gone = asyncio.Event(), asyncio.Event()
        host, server = models.serve(key=None)
        receive = receiving({**HELLO, "stream": stream}, gone)
        asking = asyncio.create_task(application(server)(dict(SCOPE), receive, send))
        await soon(lambda: host.waiting and (not stream or len(sent) > 1))
        gone.set()
        await asking
        server.stop()
        return host.waiting

    assert asyncio.run(ask()) == 0
    assert [message["status"] for message in sent if "status" in message] == [200 if stream else 499]


def test_a_pinned_model_is_loaded_at_the_start():
    models = FakeModels(entries=(ModelEntry(ModelName("big"), 6), ModelEntry(ModelName("small"), 4, pinned=True)))

    async def ask(client: httpx.AsyncClient, host: ModelHost) -> Any:
        await soon(lambda: host.loaded(ModelName("small")))
        return (await client.get("/health")).json()["models"]["small"]["status"]

    assert (models.talk(ask), models.loads) == ("ok", ["small"])


# Loading a pipeline ------------------------------------------------------------------------------


class SlowPipeline:
    """Takes its time to start, like a real one."""

    address = "ipc:///nowhere"

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._closed = threading.Event()

    def start(self) -> PipelineState:
        self._closed.wait(0.1)
        self.steps.append("started")
        return READY

    def wait(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self.steps.append("closed")
        self._closed.set()


def test_a_model_without_a_tokenizer_is_closed_after_it_has_started(tmp_path: Path):
    pipeline = SlowPipeline()
    model = ModelPipeline(("m",), tmp_path, lambda _: cast(Any, pipeline))
    loader = PipelineLoader([model], ServerSettings(names=()), Metrics(AdmissionLimit(1)), ResponseStore())

    with pytest.raises(PipelineError):
        asyncio.run(loader.load(ModelName("m"), lambda _: None))

    assert pipeline.steps == ["started", "closed"]


# How long a request keeps its model --------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_does_not_read_its_answer_does_not_keep_its_model(path: str, stream: bool):
    models = FakeModels()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.Event().wait()

    async def ask() -> str:
        host, server = models.serve(key=None)
        scope, receive = {**SCOPE, "path": path}, receiving({**BODIES[path], "stream": stream}, asyncio.Event())
        asking = asyncio.create_task(application(server)(scope, receive, send))
        await soon(lambda: sent)
        with host.lease(ModelName("other")) as lease:
            model = await lease.model(5.0)
        asking.cancel()
        server.stop()
        return "" if model is None else model.server.model_name(None)

    assert asyncio.run(ask()) == "other"
    assert models.unloads == ["big"]


def test_a_model_stays_while_a_choice_is_generated():
    models = FakeModels(pipelines={"big": FakePipeline(pieces=lambda params: ["a", None] if params.seed else ["a"])})

    async def ask(client: httpx.AsyncClient, host: ModelHost) -> int:
        asking = asyncio.create_task(client.post(CHAT, json={**HELLO, "seed": 0, "n": 2, "stream": True}))
        await models.pipelines["big"].stuck.wait()
        await asyncio.sleep(0.05)
        running = len(host.status(ModelName("big")).running)
        asking.cancel()
        return running

    assert models.talk(ask) == 1
