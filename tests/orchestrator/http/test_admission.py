"""Laws of places: whatever tokenizes a prompt takes one, and frees it when its client has gone or the server stops."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from orchestrator.http.app import application, server_of_one
from orchestrator.http.run import LeftThreads
from orchestrator.http.settings import ServerSettings
from orchestrator.http.work import in_thread
from tests.support.asked_server import BODIES, CHAT, CODEC, HELLO, SCOPE, TEMPLATE, Gate, client_of, receiving, talk
from tests.support.fake_pipeline import FakePipeline

COUNTS: list[tuple[str, Any]] = [
    ("/v1/messages/count_tokens", HELLO),
    ("/v1/responses/input_tokens", {"input": "Hello"}),
]
ASKED: list[tuple[str, Any]] = [*BODIES.items(), *COUNTS]


@pytest.fixture
def tokenizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate(CODEC.encode)
    monkeypatch.setattr(CODEC, "encode", held)
    yield held
    held.go.set()


@pytest.mark.parametrize(("path", "body"), COUNTS)
def test_counting_tokens_takes_a_place_while_it_lasts(path: str, body: Any, tokenizing: Gate):
    async def ask(client: httpx.AsyncClient) -> list[int]:
        first = asyncio.create_task(client.post(path, json=body))
        await asyncio.to_thread(tokenizing.begun.wait)
        second = await client.post(path, json=body)
        tokenizing.go.set()
        answers = [await first, second, await client.post(CHAT, json=HELLO)]
        return [each.status_code for each in answers]

    assert talk(ask, most_open=1) == [200, 429, 200]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_client_that_goes_while_its_prompt_is_tokenized_frees_its_place(path: str, body: Any, tokenizing: Gate):
    async def leave() -> tuple[int, int]:
        pipeline = FakePipeline()
        server = server_of_one(pipeline, CODEC, TEMPLATE, ServerSettings(names=("demo",)))
        app, gone = application(server), asyncio.Event()

        async def send(_: Any) -> None:
            pass

        asking = asyncio.create_task(app({**SCOPE, "path": path}, receiving(body, gone), send))
        await asyncio.to_thread(tokenizing.begun.wait)
        taken = server.figures.limit.taken
        gone.set()
        await asking
        freed = server.figures.limit.taken
        tokenizing.go.set()
        assert not pipeline.asked
        return taken, freed

    assert asyncio.run(leave()) == (1, 0)


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_stop_reaches_requests_whose_prompts_are_tokenized(path: str, body: Any, tokenizing: Gate):
    settings = ServerSettings(names=("demo",))

    async def stopped() -> list[httpx.Response]:
        server = server_of_one(FakePipeline(), CODEC, TEMPLATE, settings)
        async with client_of(application(server)) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            await asyncio.to_thread(tokenizing.begun.wait)
            server.stop()
            # A further request may still come over an open connection.
            answers = [await asking, await client.post(path, json=body)]
            tokenizing.go.set()
            return answers

    for response in asyncio.run(stopped()):
        assert response.status_code == 503
        assert "The server was stopped" in response.text


# Threads whose client disconnects ----------------------------------------------------------------


def test_a_cancelled_thread_holds_its_callers_lock_until_it_has_ended_and_its_failure_is_no_error_of_the_server():
    begun, end, told = threading.Event(), threading.Event(), list[Any]()

    def work() -> None:
        begun.set()
        end.wait()
        raise ZeroDivisionError

    async def cancelled() -> tuple[bool, bool]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        lock = asyncio.Lock()

        async def held() -> None:
            async with lock:
                await in_thread(work)

        task = asyncio.ensure_future(held())
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
        still = lock.locked()
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        return still, lock.locked()

    assert asyncio.run(cancelled()) == (True, False)
    gc.collect()
    assert told == []


# The end of the server ----------------------------------------------------------------------------


def test_the_end_waits_for_what_can_not_be_stopped_for_a_short_time_only():
    done = threading.Event()

    async def serve() -> None:
        asyncio.get_running_loop().set_default_executor(LeftThreads())
        await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(done.wait))}, timeout=0.1)

    began = time.monotonic()
    asyncio.run(serve())
    done.set()

    assert time.monotonic() - began < 10


def test_calls_give_their_results_and_errors():
    async def ask() -> tuple[int, int]:
        asyncio.get_running_loop().set_default_executor(LeftThreads())
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return await asyncio.to_thread(divmod, 7, 2)

    assert asyncio.run(ask()) == (3, 1)
