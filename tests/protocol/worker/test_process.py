"""Laws of the loop around every worker that need a process of their own."""

import subprocess
import sys

BUILDING = """
import time
from protocol.worker.process import WorkerSetup, serve

def build():
    print("building", flush=True)
    while True:
        try:
            time.sleep(60)
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
