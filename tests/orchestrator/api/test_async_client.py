"""Laws of the clients: a call of a closed one ends with an error, and a request outlasts a pipeline that is held up."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from orchestrator import AsyncClient, Client
from orchestrator.api import async_client, client
from protocol.errors import PipelineError
from protocol.messages.client import FromClient, Inquire, Refused, Submit
from protocol.transport import decode, encode
from tests.support.fake_pipeline import READY


async def _all(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


CALLS: dict[str, Callable[[AsyncClient], Any]] = {
    "state": lambda client: client.state(),
    "generate": lambda client: client.generate(["a", "b"]),
    "stream": lambda client: _all(aiter(client.stream("a"))),
    "watch": lambda client: _all(client.watch()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("begun", [False, True])
def test_a_call_of_a_client_that_is_closed_says_that_no_pipeline_answers(tmp_path: Path, name: str, begun: bool):
    async def closed() -> None:
        client = AsyncClient(f"ipc://{tmp_path}/nobody")
        if not begun:
            client.close()
        call = asyncio.ensure_future(CALLS[name](client))
        # Until it waits for an answer.
        await asyncio.sleep(0.05)
        client.close()
        with pytest.raises(PipelineError, match="No pipeline answers"):
            await call

    asyncio.run(closed())


def test_a_call_that_is_cancelled_is_cancelled(tmp_path: Path):
    async def cancelled() -> None:
        client = AsyncClient(f"ipc://{tmp_path}/nobody")
        call = asyncio.ensure_future(client.state())
        await asyncio.sleep(0)
        call.cancel()
        client.close()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())


def _answer_after(pause: float, address: str) -> None:
    """A pipeline that is held up for `pause` seconds after a request, then answers all, and the request last."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        client, frame = router.recv_multipart()
        stamp, submit = decode(frame, FromClient)
        assert isinstance(submit, Submit)
        time.sleep(pause)
        peer, frame = router.recv_multipart()
        assert decode(frame, FromClient)[1] == Inquire()
        router.send_multipart([peer, encode(READY, stamp)])
        router.send_multipart([client, encode(Refused(submit.request, "Here at last.", "pipeline"), stamp)])


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_outlasts_a_pipeline_that_is_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
):
    for module in (client, async_client):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 0.05)
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    address = f"ipc://{tmp_path}/busy"
    pipeline = threading.Thread(target=_answer_after, args=(0.5, address))
    pipeline.start()

    async def ask() -> None:
        asking = AsyncClient(address)
        try:
            await asking.generate("a")
        finally:
            asking.close()

    with pytest.raises(PipelineError, match="Here at last"):
        asyncio.run(ask()) if asynchronous else Client(address).generate("a")
    pipeline.join()
