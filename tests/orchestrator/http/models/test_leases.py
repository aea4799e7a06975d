"""Laws of how long a request keeps its model: from its admission until its generation has ended."""

import asyncio
from typing import Any

import httpx
import pytest

from orchestrator.core.model_table import ModelName
from orchestrator.http.app import application
from orchestrator.http.models.host import ModelHost
from tests.orchestrator.http.models.test_models_server import ASKED, CHAT, HI
from tests.orchestrator.http.test_rules import SCOPE, receiving
from tests.support.fake_models import FakeModels
from tests.support.fake_pipeline import FakePipeline


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_does_not_read_its_answer_does_not_keep_its_model(path: str, stream: bool):
    models = FakeModels()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.Event().wait()

    async def ask() -> str:
        host, server = models.serve(key=None)
        scope, receive = {**SCOPE, "path": path}, receiving({**ASKED[path], "stream": stream}, asyncio.Event())
        asking = asyncio.create_task(application(server)(scope, receive, send))
        while not sent:
            await asyncio.sleep(0.01)
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
        asking = asyncio.create_task(client.post(CHAT, json={**HI, "seed": 0, "n": 2, "stream": True}))
        await models.pipelines["big"].stuck.wait()
        await asyncio.sleep(0.05)
        running = len(host.status(ModelName("big")).running)
        asking.cancel()
        return running

    assert models.talk(ask) == 1
