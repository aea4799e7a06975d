"""Laws of the client for asyncio when it is closed: each call ends with an error, not with its task."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import AsyncClient
from protocol.errors import PipelineError


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
