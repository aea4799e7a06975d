"""Laws of work whose client disconnects."""

import asyncio
import threading

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
