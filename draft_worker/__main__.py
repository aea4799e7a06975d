"""The draft's process: builds the engine it was told to use and serves."""

import importlib
import sys
import time
from functools import partial
from pathlib import Path

from draft_worker.engine_interface import Engine
from draft_worker.features import attached_ring
from draft_worker.worker import DraftWorker
from protocol.contracts.engines import draft_engine
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.model_report import recorded
from protocol.inference.light_import import import_models
from protocol.worker.failed_calls import SurvivingWorker
from protocol.worker.interface import Worker
from protocol.worker.pacing import Pacer
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _built(setup))


def _built(setup: WorkerSetup) -> Worker:
    engine, pacer = open_engine(setup), Pacer(setup.pace)
    attach = partial(attached_ring, epoch=setup.epoch)
    kept, pool = setup.kept_bytes, setup.kv_pool
    worker = DraftWorker(engine, time.perf_counter, setup.prefill_chunk, pacer, kept, attach, pool)
    return SurvivingWorker(worker)


def open_engine(setup: WorkerSetup) -> Engine:
    """Imports only the engine that is used: MLX costs time that prompt lookup does not need."""
    runs = draft_engine(setup.engine).model
    if runs != "none":
        import_models()
    began = time.perf_counter()
    engine: Engine = importlib.import_module(f"draft_worker.engines.{setup.engine}").load(setup)
    if runs == "drafter" and (check := recorded(Path(setup.model), Path(setup.target or setup.model))) is not None:
        engine.expected = check.first
    if runs in ("checkpoint", "drafter"):
        from protocol.inference.device import BESIDE_TARGET, wire

        wire(setup.gpu_share, BESIDE_TARGET)
        if setup.pace is None:
            # A trained drafter has its target's embedding and head.
            folders = (setup.model, setup.target) if runs == "drafter" else (setup.model,)
            prints = [ModelFolder(Path(folder)).fingerprint for folder in folders if folder]
            engine.costs = engine.measured(time.perf_counter() - began, " ".join((setup.engine, *prints)))
    return engine


if __name__ == "__main__":
    sys.exit(main())
