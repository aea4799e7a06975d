"""The engine of a trained drafter that was converted: its kind's own engine, over the package."""

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.block_runner import PackageBlockRunner
from draft_worker.coreml.runtime.conditioned_runner import PackageRunner
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.engine import Engine
from draft_worker.engines.block import BlockEngine


def drafter_engine(name: str, converted: Converted, runtime: Runtime) -> Engine:
    """`name`: of the engine. The package is that of a trained drafter."""
    conditioning, folder = converted.package.conditioning, converted.folder
    assert conditioning is not None
    if conditioning.block is not None:
        return BlockEngine(folder, PackageBlockRunner(converted, runtime), folder, name)
    runner = PackageRunner(converted, runtime)
    return ConditionedEngine(name, folder, runner, converted.vocabulary_fingerprint(), folder)
