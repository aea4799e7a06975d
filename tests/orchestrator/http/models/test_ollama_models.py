"""Laws of Ollama's API with several models: keep_alive, loading, unloading, and lines while a request waits."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from orchestrator.core.model_table import ModelName
from orchestrator.http.models.host import ModelHost
from tests.support.fake_models import FakeModels

CHAT, GENERATE = "/api/chat", "/api/generate"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
SMALL = ModelName("small")


def test_the_lists_say_what_is_there_and_what_is_loaded():
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> list[Any]:
        await client.post(CHAT, json={**HI, "model": "small:latest"})
        lists = [(await client.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")]
        return [*lists, (await client.post("/api/show", json={"model": "gpt-4o-mini"})).json()]

    tags, running, shown = FakeModels().talk(ask)

    assert [model["name"] for model in tags] == ["big", "other", "small", "gpt-4o-mini"]
    assert [(model["name"], model["size"]) for model in running] == [("small", 4), ("gpt-4o-mini", 4)]
    assert "completion" in shown["capabilities"]


@pytest.mark.parametrize(("keep", "left"), [("5m", 300.0), (-1, None)])
def test_a_request_says_how_long_its_model_stays(keep: Any, left: float | None):
    async def ask(client: httpx.AsyncClient, host: ModelHost) -> float | None:
        await client.post(CHAT, json={**HI, "model": "small", "keep_alive": keep})
        found = host.left(SMALL)
        return found if found is None else round(found, -1)

    assert FakeModels().talk(ask) == left


def test_a_model_that_stays_for_ages_is_listed():
    async def ask(client: httpx.AsyncClient, _: ModelHost) -> Any:
        await client.post(CHAT, json={**HI, "model": "small", "keep_alive": "99999999999h"})
        return (await client.get("/api/ps")).json()["models"][0]["name"]

    assert FakeModels().talk(ask) == "small"


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_request_without_a_prompt_loads_and_unloads(path: str):
    models = FakeModels()

    async def ask(client: httpx.AsyncClient, host: ModelHost) -> list[Any]:
        asked = [{"model": "small", "keep_alive": 0}, {"model": "small"}, {"model": "small", "keep_alive": 0}]
        reasons = [(await client.post(path, json=each)).json()["done_reason"] for each in asked]
        await asyncio.sleep(0.01)
        return [reasons, host.loaded(SMALL)]

    assert models.talk(ask) == [["unload", "load", "unload"], None]
    assert (models.loads, models.unloads) == (["small"], ["small"])


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("failure", ["", "There is no such folder."])
def test_a_stream_that_waits_has_lines_without_text(path: str, failure: str):
    models = FakeModels(failures={"big": failure} if failure else {})

    answer = models.talk(lambda client, _: models.streamed_while_loading(client, path, {**HI, "prompt": "Hi"}))

    told = [json.loads(line) for line in answer.text.splitlines()]
    assert (told[0]["loading"]["status"], told[0]["done"]) == ("reading weights", False)
    if failure:
        assert failure in told[-1]["error"]
    else:
        assert (told[-1]["done"], told[-1]["load_duration"] > 0) == (True, True)
