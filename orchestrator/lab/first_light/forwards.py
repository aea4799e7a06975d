"""A target's forwards and weights, examined and unpacked by programs that import MLX."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.lab.first_light.forward_messages import ForwardOrder, ForwardReport
from orchestrator.machine.target_programs import last_words, reports, target_environment
from protocol.errors import PipelineError
from protocol.own_modules import module_command

_EXAMINATION, _COPY = "orchestrator.lab.first_light.forward_examination", "target_worker.float32_copy"
_FORM: Any = ForwardReport


def examined(order: ForwardOrder) -> Iterator[ForwardReport]:
    """The reports, as they come. Raises PipelineError if the process fails."""
    return reports(_EXAMINATION, order, _FORM)


@contextmanager
def float32_copy(folder: Path) -> Iterator[Path]:
    """The model in `folder` with every weight in 32 bits, as a folder that lasts as long as the context."""
    with tempfile.TemporaryDirectory() as room:
        copy = Path(room) / "float32"
        command = [*module_command(_COPY), str(folder), str(copy)]
        out = subprocess.run(command, capture_output=True, env=target_environment())
        if out.returncode:
            raise PipelineError(f"The target's weights could not be unpacked: {last_words(out.stderr)}")
        yield copy
