"""Laws of the server's end."""

import asyncio
import threading
import time

import pytest

from orchestrator.http.run import LeftThreads


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
