"""The examination process: runs one stage of a converted model's examination on its device. Judges nothing.

`python -m draft_worker.coreml.examine ORDER`: an ExaminationOrder in JSON; reports as lines of JSON.
"""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import msgspec
import numpy as np
from tokenizers import Tokenizer

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Package, Single
from draft_worker.coreml.runtime.apple import compiled
from draft_worker.coreml.runtime.calls import PackageForward, Runtime
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.coreml.toolchain import toolchain
from protocol.child_process import claim_output
from protocol.contracts.coreml import (
    Agreed,
    Broken,
    ExaminationOrder,
    ExaminationReport,
    Loaded,
    Loading,
    Placed,
    Predicted,
    Timed,
    Units,
    Written,
)
from protocol.errors import PipelineError
from protocol.inference.device import compute_on_processor
from protocol.inference.slots import PREFIX

OpenRuntime: TypeAlias = Callable[[Converted, Units], Runtime]
_PROMPT = 24
_PLACES = 32
"""Tokens behind the prompt whose logits are compared, at each width."""
_CLEAR = 8.0
"""A favourite is clear if it is ahead of the second token by so many deviations of its row, which is more than five
standard deviations of the difference of two logits."""
_TEXT = (
    "The museum opens at nine in the morning and closes at five. Visitors who come by train should leave the station "
    "by the north exit, cross the bridge and follow the river for about ten minutes. There is a small café on the "
    "left, and behind it one sees the old brick building with the clock."
)
_REPORT_EVERY = 25
_STEADY = 1e-3
"""Two predictions of the same input may differ by this many standard deviations of the logits."""


def main() -> int:
    tell = claim_output()
    order = msgspec.json.decode(sys.argv[-1], type=ExaminationOrder)
    try:
        for report in carry_out(order, _core_ml):
            tell(report)
    except (PipelineError, RuntimeError, ValueError, OSError) as error:
        tell(Broken(f"{type(error).__name__}: {error}"[:2000], lasting=not isinstance(error, OSError)))
        return 1
    return 0


def carry_out(order: ExaminationOrder, open_core_ml: OpenRuntime) -> Iterator[ExaminationReport]:
    """Run one stage and yield its reports. Errors of the runtime propagate."""
    compute_on_processor()
    converted = Converted.open(Path(order.folder))
    if order.stage == "golden":
        logits = answers(calls(converted, ExecutorRuntime(converted.file)))
        named: dict[str, Any] = {str(width): rows for width, rows in logits.items()}
        np.savez(order.golden, **named)
        yield Written()
        return
    if order.stage == "plan":
        if order.runtime == "coreml":  # Only Core ML has several devices.
            yield from placements(converted.folder)
        return
    yield Loading(None)
    executing = order.runtime == "executor"
    runtime = ExecutorRuntime(converted.file) if executing else open_core_ml(converted, order.units)
    yield from load(runtime, converted.package, time.perf_counter)
    with np.load(order.golden) as golden:
        expected = {width: golden[str(width)] for width in converted.package.widths}
    repeatable = calls(converted, runtime)
    yield from compare(answers(repeatable), expected)
    yield from soak(repeatable, order.predicts, time.perf_counter)


def load(runtime: Runtime, package: Package, clock: Callable[[], float]) -> Iterator[Loading | Loaded]:
    """Load the functions one by one, with a report before and after each."""
    for width in package.widths:
        yield Loading(width)
        began = clock()
        runtime.load(package.function(width))
        yield Loaded(width, clock() - began)


def calls(converted: Converted, runtime: Runtime) -> "dict[int, RepeatableCall]":
    """One call for each width."""
    return {width: RepeatableCall(converted, runtime, width) for width in converted.package.widths}


def answers(calls: "Mapping[int, RepeatableCall]") -> dict[int, Single]:
    """By width: (places, rows of the head) logits of a chain behind a short prompt."""
    return {width: call.chain() for width, call in calls.items()}


def compare(got: dict[int, Single], expected: dict[int, Single]) -> Iterator[Agreed]:
    for width, want in expected.items():
        # A number that is added to all logits of a token changes no probability.
        difference = (got[width] - want).std(-1)
        deviation = float(np.sqrt(np.mean(np.square(difference / want.std(-1)))))
        if not np.isfinite(deviation):
            yield Agreed(width, None, 0, 0)
            continue
        second, first = np.sort(want, -1)[:, -2:].T
        clear = first - second > _CLEAR * difference
        same = clear & (got[width].argmax(-1) == want.argmax(-1))
        yield Agreed(width, deviation, int(clear.sum()), int(same.sum()))


def soak(
    calls: "Mapping[int, RepeatableCall]", predicts: int, clock: Callable[[], float]
) -> Iterator[Predicted | Timed]:
    """Repeat the calls of all widths in turn; then report the time of each width."""
    first = {width: call.logits() for width, call in calls.items()}
    turns = itertools.cycle(calls)
    times: dict[int, list[float]] = {width: [] for width in calls}
    steady = True
    for done in range(1, predicts + 1):
        width = next(turns)
        began = clock()
        logits = calls[width].logits()
        times[width].append(clock() - began)
        drift = float(np.abs(logits - first[width]).max())
        steady = steady and drift <= _STEADY * float(first[width].std())
        if done % _REPORT_EVERY == 0 or done == predicts:
            yield Predicted(done, steady)
    for width, seconds in times.items():
        if seconds:
            yield Timed(width, median(seconds) * 1e3)


def placements(folder: Path) -> Iterator[Loading | Placed]:
    """The device that Core ML plans for each operation, one report per function of a converted model. Needs a Mac."""
    coremltools = toolchain().coremltools
    kinds: Any = import_module("coremltools.models.compute_plan")
    yield Loading(None)
    # Load the plan from the compiled model: an .mlpackage crashes the process (coremltools issue 2757).
    plan = kinds.MLComputePlan.load_from_path(
        path=str(compiled(folder)), compute_units=coremltools.ComputeUnit.CPU_AND_NE
    )
    for name, function in plan.model_structure.program.functions.items():
        yield _placement(name, function, plan)


class RepeatableCall:
    """One call of a package that can be repeated: it drops its rows each time."""

    def __init__(self, converted: Converted, runtime: Runtime, width: int) -> None:
        package = converted.package
        self._forward = PackageForward(package, converted.tables, runtime)
        self._memory = HostMemory(CachePool(package))
        self._head_rows, vocabulary = package.head_rows, package.shape.vocabulary
        text = _tokens(converted.folder, vocabulary)
        prompt = text[: min(_PROMPT, package.context // 2)]
        self._width = width
        self._tokens = text[len(prompt) :][: min(_PLACES, package.context - len(prompt))]
        self._forward.prefill(self._memory, prompt)

    def logits(self) -> Single:
        """Of one call."""
        return self._dropped(self._run(self._tokens[: self._width])[1])

    def chain(self) -> Single:
        """Of all places, in as many calls as they need."""
        rows: list[Single] = []
        last = PREFIX
        for begin in range(0, len(self._tokens), self._width):
            numbers, logits = self._run(self._tokens[begin : begin + self._width], last)
            last = numbers[-1]
            rows.append(logits.copy())
        return self._dropped(np.concatenate(rows))

    def _dropped(self, logits: Single) -> Single:
        self._memory.slots.keep([], ())
        return logits[:, : self._head_rows].copy()

    def _run(self, tokens: list[int], behind: int = PREFIX) -> tuple[list[int], Single]:
        first = self._memory.slots.next_row
        numbers = self._memory.slots.add(tokens, [behind, *range(first, first + len(tokens) - 1)])
        return numbers, self._forward.evaluate([self._memory.rows(numbers)])


def _tokens(folder: Path, vocabulary: int) -> list[int]:
    """Enough tokens of ordinary text: behind random ones, which a package without a tokenizer gets, a model is often
    undecided."""
    with suppress(Exception):  # the border to `tokenizers`, which raises plain Exceptions
        text = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT).ids
        if len(text) >= _PROMPT + _PLACES and max(text) < vocabulary:
            return text
    return np.random.default_rng(0).integers(0, vocabulary, _PROMPT + _PLACES).tolist()


def _placement(name: str, function: Any, plan: Any) -> Placed:
    engine: Any = import_module("coremltools.models.compute_device").MLNeuralEngineComputeDevice
    count = on_engine = 0
    cost, cost_on_engine = 0.0, 0.0
    elsewhere: Counter[str] = Counter()
    for operation in function.block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation=operation)
        if usage is None:
            # A constant runs on no device.
            continue
        estimate = plan.get_estimated_cost_for_mlprogram_operation(operation=operation)
        weight = 0.0 if estimate is None else estimate.weight
        count, cost = count + 1, cost + weight
        if isinstance(usage.preferred_compute_device, engine):
            on_engine, cost_on_engine = on_engine + 1, cost_on_engine + weight
        else:
            elsewhere[operation.operator_name] += 1
    share = cost_on_engine / cost if cost else on_engine / max(count, 1)
    return Placed(name, count, on_engine, share, dict(elsewhere.most_common()))


def _core_ml(converted: Converted, units: Units) -> Runtime:
    from draft_worker.coreml.runtime.apple import CoreMlRuntime

    return CoreMlRuntime(converted, units, functions=())


if __name__ == "__main__":
    sys.exit(main())
