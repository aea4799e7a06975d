"""Laws of a service's log: all output is in it, it stays small, and the service ends with its starter."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.cli.commands.service.command import run_logged


def _program(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


def test_both_streams_are_in_the_log_with_the_time(tmp_path: Path):
    file = tmp_path / "logs" / "serve.log"

    code = run_logged(_program("import sys; print('Ready.'); print('Oh.', file=sys.stderr); sys.exit(3)"), file)

    lines = file.read_text().splitlines()
    assert code == 3
    assert [line.split(" ", 2)[2] for line in lines] == ["Ready.", "Oh.", "The service ended with exit code 3."]


def test_the_log_stays_small(tmp_path: Path):
    file = tmp_path / "serve.log"

    run_logged(_program("for i in range(1000): print(f'line {i}')"), file, size=2000, kept=2)

    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["serve.log", "serve.log.1", "serve.log.2"]
    assert all(each.stat().st_size <= 2000 for each in files)
    assert "exit code 0" in file.read_text()


@pytest.mark.parametrize(("code", "told"), [(2, 0), (1, 1), (0, 0)])
def test_a_mistake_in_the_input_is_not_tried_again(code: int, told: int, tmp_path: Path):
    assert run_logged(_program(f"raise SystemExit({code})"), tmp_path / "log") == told


def test_the_service_ends_with_its_starter(tmp_path: Path):
    """launchd ends only the process that it started, and waits for it."""
    file = tmp_path / "log"
    service = "import signal, time; signal.signal(signal.SIGTERM, signal.default_int_handler); print('up')\n"
    service += "try: time.sleep(60)\nexcept KeyboardInterrupt: print('tidy'); raise SystemExit(130)"
    starter = f"""
import signal, sys
from pathlib import Path
from orchestrator.cli.commands.service.command import run_logged
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(run_logged([sys.executable, "-u", "-c", {service!r}], Path({str(file)!r})))
"""
    process = subprocess.Popen([sys.executable, "-c", starter])
    end = time.monotonic() + 20
    while not (file.exists() and "up" in file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 130
    assert "tidy" in file.read_text()
