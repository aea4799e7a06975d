"""The comparison of servers ends every server that it starts, also when it is interrupted."""

import signal
import subprocess
import sys

import pytest

from tests.support.processes import until

pytestmark = pytest.mark.slow
MODULE = "orchestrator.tools.bench.servers"
KEY = "a-key-for-comparing"


def servers() -> set[str]:
    """Command lines of the servers that the program starts; each has a port of its own."""
    listed = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if KEY in line or "-m mlx_lm server" in line}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_no_server(number: signal.Signals):
    before = servers()
    running = subprocess.Popen(
        [sys.executable, "-m", MODULE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: servers() - before, 60)
    finally:
        running.send_signal(number)
        output, errors = running.communicate(timeout=60)

    assert (running.returncode, output) == (130, ""), errors
    assert "Traceback" not in errors
    assert not servers() - before
