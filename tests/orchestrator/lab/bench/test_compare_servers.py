"""The comparisons of servers: they end every server that they start, also when they are interrupted."""

import json
import signal
import subprocess
import sys

import pytest

from tests.support.processes import until

pytestmark = pytest.mark.slow
BENCH = (sys.executable, "-m", "orchestrator.cli.app", "bench", "servers")
KEY = "a-key-for-comparing"


def servers() -> set[str]:
    """Command lines of the servers that the program starts; each has a port of its own."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if KEY in line or "-m mlx_lm server" in line}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [(), ("--lengths", "1024,2048")], ids=str)
def test_an_interrupted_comparison_leaves_no_server(options: tuple[str, ...], number: signal.Signals):
    before = servers()
    running = subprocess.Popen([*BENCH, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: servers() - before, 60)
    finally:
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)

    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    assert not servers() - before


@pytest.mark.timeout(600)
def test_a_table_by_length_has_every_server():
    arguments = ["--random", "--lengths", "64,200", "--max-tokens", "12", "--repeats", "1", "--json"]

    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["length"] for trial in trials] == [64] * 4 + [200] * 4
    assert len({trial["server"] for trial in trials}) == 4
    assert all(trial["speed"] and trial["memory"] for trial in trials)
