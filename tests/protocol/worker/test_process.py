"""Laws of the loop around every worker that need a process of their own, and of the cores that a worker computes on."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from protocol.worker import process
from protocol.worker.process import take_cores

BUILDING = """
import time
from protocol.worker.process import WorkerSetup, serve

def build():
    print("building", flush=True)
    while True:
        try:
            # A signal just before the call waits for its end.
            time.sleep(0.1)
        except BaseException:
            pass

serve(WorkerSetup(address="ipc:///tmp/nobody", epoch=1, incarnation=1, engine="", model=""), build)
"""


def test_a_worker_ends_when_asked_to_although_a_library_swallows_exceptions_while_it_is_built():
    with subprocess.Popen([sys.executable, "-c", BUILDING], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "building\n"
            worker.terminate()

            assert worker.wait(30) == 0
        finally:
            worker.kill()


affinity = getattr(os, "sched_getaffinity", None)
_PROGRAM = """
import os, threading
from protocol.worker.process import take_cores
ended = threading.Event()
threading.Thread(target=ended.wait).start()
first = min(os.sched_getaffinity(0))
take_cores([first])
threads = os.listdir("/proc/self/task")
print({frozenset(os.sched_getaffinity(int(thread))) for thread in threads} == {frozenset([first])})
ended.set()
"""


@pytest.mark.skipif(affinity is None, reason="this system has no affinity")
def test_all_threads_of_a_process_move():
    out = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=30, check=True)

    assert out.stdout.strip() == "True"


@pytest.mark.skipif(affinity is None, reason="this system has no affinity")
@pytest.mark.parametrize("name", ["openblas_set_num_threads", "scipy_openblas_set_num_threads64_"])
def test_openblas_has_a_thread_a_core(name: str, monkeypatch: pytest.MonkeyPatch):
    """Two spinning threads on one core would take a time slice for each product."""
    told: list[int] = []
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: SimpleNamespace(**{name: told.append}))
    take_cores(sorted(affinity(0)) if affinity else ())

    assert told == [len(affinity(0)) if affinity else 0]


def test_none_means_the_cores_that_there_are():
    before = affinity(0) if affinity else None
    take_cores(())

    assert (affinity(0) if affinity else None) == before
