"""The draft's process: builds the engine it was told to use and serves."""

import sys
import time
from pathlib import Path

from draft_worker.engine import Engine
from draft_worker.paced_engine import paced
from draft_worker.worker import DraftWorker
from protocol.errors import InputError
from protocol.worker.pacing import Pacer
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _built(setup))


def _built(setup: WorkerSetup) -> DraftWorker:
    engine, pacer = _open(setup), Pacer(setup.pace)
    if setup.pace is not None:
        engine = paced(engine, pacer, time.perf_counter)
    return DraftWorker(engine, time.perf_counter, setup.prefill_chunk, pacer, setup.prefix_cache << 20)


def _open(setup: WorkerSetup) -> Engine:
    """Imports only the engine that is used: MLX costs a second that prompt lookup does not need."""
    if setup.engine == "mlx":
        from draft_worker.engines.mlx import MlxEngine

        return MlxEngine.load(Path(setup.model))
    if setup.engine == "random":
        from draft_worker.engines.mlx import MlxEngine
        from draft_worker.engines.random import RandomEngine

        return RandomEngine(MlxEngine.load(Path(setup.model)))
    if setup.engine == "ngram":
        from draft_worker.engines.ngram import NgramEngine

        return NgramEngine(Path(setup.model) if setup.model else None)
    if setup.engine == "coreml":
        from draft_worker.engines.coreml import CoreMlEngine

        return CoreMlEngine.load(Path(setup.model), epoch=setup.epoch, owner=setup.owner)
    raise InputError(f"There is no draft engine called {setup.engine!r}: choose mlx, coreml or ngram.")


if __name__ == "__main__":
    sys.exit(main())
