"""The draft as a converted model on Core AI: the engine `coreml` with another runtime."""

from draft_worker.engine import Engine
from draft_worker.engines.coreml import CoreMlEngine
from protocol.contracts.engines import EngineDeclaration
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="a converted model by Core AI (macOS 27; needs coreai-core)", model="package")


def load(setup: WorkerSetup) -> Engine:
    """Raises InputError as `CoreMlEngine.of` does, and where Core AI is not installed."""
    return CoreAiEngine.of(setup, "coreai")


class CoreAiEngine(CoreMlEngine):
    """A folder that `launch-pipeline convert` made, with its cache as input and output."""

    name = "coreai"
