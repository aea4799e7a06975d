"""Laws of the store of responses: threads may use it at the same time."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from orchestrator.http.errors import ApiError
from orchestrator.http.responses.routes import ResponseStore

_ANSWER = {"output": [], "text": "x" * 80}


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_threads_that_add_read_and_delete_do_not_disturb_each_other():
    store = ResponseStore(1_000)

    def use(thread: int) -> None:
        for turn in range(1_500):
            store.add(f"{thread}-{turn}", _ANSWER, [])
            for id in (f"{(thread + 1) % 4}-{turn}", f"{thread}-{turn - 3}"):
                # It may have been dropped.
                with suppress(ApiError):
                    assert store.get(id).answer == _ANSWER
                if turn % 3 == 0:
                    with suppress(ApiError):
                        store.delete(id)

    with ThreadPoolExecutor(4) as threads:
        for ended in [threads.submit(use, thread) for thread in range(4)]:
            ended.result()

    # The bytes were counted right: as many responses fit as in a new store.
    fresh = ResponseStore(1_000)
    for turn in range(20):
        store.add(f"last-{turn}", _ANSWER, [])
        fresh.add(f"last-{turn}", _ANSWER, [])
    assert _held(store) == _held(fresh)


def _held(store: ResponseStore) -> list[int]:
    found: list[int] = []
    for turn in range(20):
        with suppress(ApiError):
            store.get(f"last-{turn}")
            found.append(turn)
    return found
