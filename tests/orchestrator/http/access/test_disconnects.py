"""Laws of work whose client disconnects."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from orchestrator.http.access.disconnects import in_thread


def test_a_cancelled_thread_holds_its_callers_lock_until_it_has_ended():
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait()

    async def cancelled() -> None:
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
        assert still
        assert not lock.locked()

    asyncio.run(cancelled())


def test_the_failure_of_a_thread_that_nobody_waits_for_is_no_error_of_the_server():
    begun, end, told = threading.Event(), threading.Event(), list[Any]()

    def work() -> None:
        begun.set()
        end.wait()
        raise ZeroDivisionError

    async def cancelled() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        task = asyncio.ensure_future(in_thread(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    asyncio.run(cancelled())
    gc.collect()

    assert told == []
