"""A target's forwards and weights, examined and unpacked by programs that import MLX."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.lab.first_light.forward_messages import ForwardOrder, ForwardReport
from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.reporting_process import reports
from protocol.errors import PipelineError
from protocol.own_modules import module_command

_EXAMINATION, _COPY = "orchestrator.lab.first_light.forward_examination", "target_worker.float32_copy"
_FORM: Any = ForwardReport
_GRACE = 10.0


def examined(order: ForwardOrder) -> Iterator[ForwardReport]:
    """The reports, as they come. Raises PipelineError if the process fails."""
    variables = worker_environment("target", ())
    return reports(_EXAMINATION, order, _FORM, name="The comparison of forwards", grace=_GRACE, variables=variables)


@contextmanager
def float32_copy(folder: Path) -> Iterator[Path]:
    """The model in `folder` with every weight in 32 bits, as a folder that lasts as long as the context."""
    with tempfile.TemporaryDirectory() as room:
        copy = Path(room) / "float32"
        command = [*module_command(_COPY), str(folder), str(copy)]
        out = subprocess.run(command, capture_output=True, env={**os.environ, **worker_environment("target", ())})
        if out.returncode:
            raise PipelineError(f"The target's weights could not be unpacked: {_last_line(out.stderr)}")
        yield copy


def _last_line(words: bytes) -> str:
    return (words.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
