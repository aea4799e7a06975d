"""Single steps of the workers, each measured in a process of its own."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from orchestrator.lab.findings import Field, Table, Value, tabulated
from orchestrator.machine.hardware import worker_environment
from protocol.errors import PipelineError
from protocol.own_modules import module_command

T = TypeVar("T")


class HostCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of the host in a round of a network with so many layers, where computing takes no time."""

    layers: int
    loop: str
    host: float
    """In all."""
    answer: float
    """From a forward's result to the verdict."""
    commit: float
    """From there until the next forward begins to be built."""
    build: float
    """From there until the device has its first work."""
    stock: float
    """`host` of mlx-lm's own loop, with the same sampling."""

    @property
    def idle(self) -> float:
        """What the device waits for."""
        return self.answer + self.commit + self.build


_ADOPTION = "orchestrator.lab.bench.costs.micro_adoption"
_IDLE = "orchestrator.lab.bench.costs.micro_idle"
_TIMEOUT_SECONDS = 600.0
_HOST_NOTE = """\
Processor time of the target's thread with a network of so many layers and so few features that computing takes none; \
the orchestrator and its messages are left out. idle: from a forward's result until the device has work again, the sum \
of answer (until the verdict), commit (until the next forward begins to be built) and build. mlx-lm: the host's time \
of its own loop with the same network, over ours; with top_p, of that loop with mlx-lm's top_p. Rounds that hit \
verify trees of five tokens, two of which are accepted beside the bonus token."""


def adoption(*arguments: str) -> list[Value]:
    """How long a target takes to adopt the KV of another process, on one core. Raises PipelineError if that fails."""
    return _run([_ADOPTION, *arguments], worker_environment("draft", (0,)), list[Value])


def host_costs(*arguments: str) -> list[HostCost]:
    """What the target's host does between two forwards. Raises PipelineError if that fails."""
    return _run([_IDLE, *arguments], {}, list[HostCost])


def host_table(costs: Sequence[HostCost]) -> Table:
    return tabulated("The host between two forwards, ms", _HOST_FIELDS, costs, note=_HOST_NOTE)


_HOST_FIELDS: list[Field[HostCost]] = [
    Field("layers", lambda cost: cost.layers),
    Field("loop", lambda cost: cost.loop),
    Field("idle", lambda cost: cost.idle, ".2f", scale=1e3),
    Field("answer", lambda cost: cost.answer, ".2f", scale=1e3),
    Field("commit", lambda cost: cost.commit, ".2f", scale=1e3),
    Field("build", lambda cost: cost.build, ".2f", scale=1e3),
    Field("host", lambda cost: cost.host, ".2f", scale=1e3),
    Field("mlx-lm", lambda cost: cost.stock / cost.host, ".2f"),
]


def _run(program: Sequence[str], environment: Mapping[str, str], form: type[T]) -> T:
    command = [*module_command(program[0]), *program[1:]]
    everything = {**os.environ, **environment}
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=everything)
    except subprocess.TimeoutExpired as error:
        text = f"{program[0]} gave no figures within {_TIMEOUT_SECONDS:.0f} s: try again on an idle machine."
        raise PipelineError(text) from error
    if out.returncode:
        last_line = (out.stderr.strip().splitlines() or ["none"])[-1]
        raise PipelineError(f"{program[0]} failed; its last line: {last_line}")
    return msgspec.json.decode(out.stdout, type=form)
