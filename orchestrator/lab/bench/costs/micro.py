"""`launch-pipeline bench micro`: single steps of the workers, each measured in processes of its own."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from orchestrator.lab.bench.models import weights_read
from orchestrator.lab.calibration.calibrate import forward_times
from orchestrator.lab.findings import Field, Findings, Listener, Table, Value, tabulated
from orchestrator.machine.hardware import chip, partition_cores, worker_environment
from protocol.errors import PipelineError
from protocol.messages.base import Role
from protocol.own_modules import module_command

T = TypeVar("T")


class CostLine(NamedTuple):
    """Seconds of a forward of w tokens: fixed + marginal * w."""

    fixed: float
    marginal: float
    deviation: float
    """The largest distance of a measured time from the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """The forwards of one model on its own cores."""

    model: str
    """target or draft."""
    seconds: Mapping[int, float]
    """Medians by width."""
    weights: int
    """Bytes that a forward of one token reads."""
    bandwidth: float | None
    """Bytes a second of the stream test on the same cores; None where the model computes on a GPU."""

    @property
    def line(self) -> CostLine:
        return least_squares(self.seconds)

    @property
    def bandwidth_share(self) -> float | None:
        """Bytes a second of the weights in a forward of one token, as a share of the stream test's."""
        return None if self.bandwidth is None else self.weights / self.seconds[1] / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values. Times in milliseconds."""
        line = self.line
        return {
            "model": self.model,
            "milliseconds": {str(width): 1e3 * seconds for width, seconds in self.seconds.items()},
            "fixed_milliseconds": 1e3 * line.fixed,
            "marginal_milliseconds": 1e3 * line.marginal,
            "largest_deviation_milliseconds": 1e3 * line.deviation,
            "weights_bytes": self.weights,
            "stream_bytes_per_second": self.bandwidth,
            "bandwidth_share": self.bandwidth_share,
        }


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


def least_squares(seconds: Mapping[int, float]) -> CostLine:
    """The line through times by width, at least two, with the least sum of squared distances."""
    widths, times = np.array(list(seconds)), np.array(list(seconds.values()))
    design = np.stack([np.ones(len(widths)), widths], axis=1)
    (fixed, marginal), *_ = np.linalg.lstsq(design, times, rcond=None)
    deviation = np.abs(design @ (fixed, marginal) - times).max()
    return CostLine(float(fixed), float(marginal), float(deviation))


_ADOPTION = "orchestrator.lab.bench.costs.micro_adoption"
_STREAM = "orchestrator.lab.bench.costs.micro_bandwidth"
_IDLE = "orchestrator.lab.bench.costs.micro_idle"
_TIMEOUT_SECONDS = 600.0
_FORWARD_NOTE = """\
A target's forward verifies that many tokens; a draft's is a growth step that evaluates that many nodes. Medians of \
real workers, one computing at a time, each on its own cores. fixed, per token: the least-squares line through these \
times; off: the largest distance from it. read: weights that a forward of one token reads. stream: the best copy or \
dot product through memory on the same cores. share: read, divided by the time at width 1, as a share of stream."""
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


def measured_forwards(
    target: Path, draft: Path, *, samples: int = 15, notice: Callable[[str], None] = lambda _: None
) -> list[ForwardCost]:
    """The cost of the target's and of the draft's forwards on this machine, `samples` of each width.

    `target` and `draft` are folders. `notice` is called with what is measured now. Raises PipelineError if a process
    fails.
    """
    cores = partition_cores()
    times = forward_times(target, draft, samples=samples, notice=notice)
    notice("the memory's bandwidth")
    folders: dict[Role, Path] = {"target": target, "draft": draft}
    return [
        ForwardCost(
            model=role,
            seconds=times[role].steps,
            weights=weights_read(folder, on_processor=bool(cores)),
            bandwidth=_stream(role, cores[role]) if cores else None,
        )
        for role, folder in folders.items()
    ]


def measure(target: Path, draft: Path, watch: Listener) -> Findings:
    """Of the models in these folders. Raises PipelineError if a process fails."""
    costs = measured_forwards(target, draft, notice=watch.starting)
    watch.starting("adopting KV from shared memory")
    adopted = adoption()
    watch.starting("the host between two forwards")
    return findings(adopted, costs, host_costs())


def findings(values: Sequence[Value], costs: Sequence[ForwardCost], hosts: Sequence[HostCost]) -> Findings:
    """A row a model: milliseconds by width, the line through them, and the share of the memory's bandwidth; a row a
    loop: what the host does in a round; and the single steps as numbers."""
    widths = list(dict.fromkeys(width for cost in costs for width in cost.seconds))
    fields: list[Field[ForwardCost]] = [
        Field("model", lambda cost: cost.model),
        *(_of_width(width) for width in widths),
        Field("fixed", lambda cost: cost.line.fixed, ".2f", scale=1e3),
        Field("per token", lambda cost: cost.line.marginal, ".2f", scale=1e3),
        Field("off", lambda cost: cost.line.deviation, ".2f", scale=1e3),
        Field("read, MB", lambda cost: cost.weights, ".0f", scale=1e-6),
        Field("stream, GB/s", lambda cost: cost.bandwidth, ".1f", scale=1e-9),
        Field("share", lambda cost: cost.bandwidth_share, ".0%"),
    ]
    return Findings(
        title="single steps",
        conditions=(f"{chip()}; the single steps on one core, medians.",),
        values=tuple(values),
        tables=(
            tabulated("Forwards, ms by number of tokens", fields, costs, note=_FORWARD_NOTE),
            host_table(hosts),
        ),
        figures={
            "machine": chip(),
            "figures": [msgspec.to_builtins(value) for value in values],
            "forwards": [cost.to_json() for cost in costs],
            "host": [msgspec.to_builtins(cost) for cost in hosts],
        },
    )


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


def _of_width(width: int) -> Field[ForwardCost]:
    return Field(str(width), lambda cost: cost.seconds.get(width), ".2f", scale=1e3)


def _stream(role: Role, cores: Sequence[int]) -> float:
    """Bytes a second: the faster of the two streams."""
    # The program has a thread a core; BLAS must not add any.
    environment = worker_environment(role, cores) | {"OPENBLAS_NUM_THREADS": "1"}
    return max(figure.value for figure in _run([_STREAM, ",".join(map(str, cores))], environment, list[Value]))


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
