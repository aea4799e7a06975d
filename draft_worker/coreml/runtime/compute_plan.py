"""Where Core ML says it would run each operation of a package. Needs a Mac."""

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from draft_worker.coreml.runtime.apple import compiled
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.examination import Placed


def placements(folder: Path) -> Iterator[Placed]:
    """One for each function of a converted model. It says where the operations would go, not that they do."""
    coremltools = toolchain().coremltools
    kinds: Any = import_module("coremltools.models.compute_plan")
    # Of the compiled model: given an .mlpackage, the library ends the process (coremltools issue 2757).
    plan = kinds.MLComputePlan.load_from_path(
        path=str(compiled(folder)), compute_units=coremltools.ComputeUnit.CPU_AND_NE
    )
    for name, function in plan.model_structure.program.functions.items():
        yield _placed(name, function, plan)


def _placed(name: str, function: Any, plan: Any) -> Placed:
    engine: Any = import_module("coremltools.models.compute_device").MLNeuralEngineComputeDevice
    count = on_engine = 0
    cost, cost_on_engine = 0.0, 0.0
    elsewhere: Counter[str] = Counter()
    for operation in function.block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation=operation)
        if usage is None:
            # A constant: nothing runs.
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
