"""Runs the target's programs that import MLX, in processes of their own: comparing forwards, unpacking weights."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from orchestrator.machine.hardware import worker_environment
from protocol.contracts.forward_examination import ForwardOrder, ForwardReport
from protocol.errors import PipelineError
from protocol.own_modules import module_command

_EXAMINATION, _COPY = "target_worker.forward_examination", "target_worker.float32_copy"


def examined(order: ForwardOrder) -> Iterator[ForwardReport]:
    """The reports, as they come. Raises PipelineError if the process fails."""
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*module_command(_EXAMINATION), msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            env=_environment(),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=ForwardReport)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code:
            words.seek(0)
            raise PipelineError(f"The process that compares forwards failed: {_last(words.read())}")


@contextmanager
def float32_copy(folder: Path) -> Iterator[Path]:
    """The model in `folder` with every weight in 32 bits, as a folder that lasts as long as the context."""
    with tempfile.TemporaryDirectory() as room:
        copy = Path(room) / "float32"
        out = subprocess.run([*module_command(_COPY), str(folder), str(copy)], capture_output=True, env=_environment())
        if out.returncode:
            raise PipelineError(f"The target's weights could not be unpacked: {_last(out.stderr)}")
        yield copy


def _environment() -> dict[str, str]:
    return {**os.environ, **worker_environment("target", ())}


def _last(words: bytes) -> str:
    return (words.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
