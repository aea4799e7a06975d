"""The draft as a converted model on Core AI: the engine `coreml` with another runtime."""

from pathlib import Path

from draft_worker.engines.coreml import CoreMlEngine
from protocol.contracts.engines import EngineDeclaration
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="a converted model by Core AI (macOS 27; needs coreai-core)", model="package")


def load(setup: WorkerSetup) -> "CoreAiEngine":
    """Raises InputError as `CoreMlEngine.load` does, and where Core AI is not installed."""
    return CoreAiEngine.load(Path(setup.model), "coreai", epoch=setup.epoch, owner=setup.owner)


class CoreAiEngine(CoreMlEngine):
    """A folder that `launch-pipeline convert` made, with its cache as input and output."""

    name = "coreai"
