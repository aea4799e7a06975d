"""The prefill worker's process: builds the engine it was told to use and serves."""

import sys
import time
from pathlib import Path

from draft_worker.engines.mlx_prefill import MlxPrefillEngine
from draft_worker.prefill import PrefillWorker
from protocol.errors import InputError
from protocol.kv_exchange import KvExchange
from protocol.model_fingerprint import model_fingerprint
from protocol.worker_process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _built(setup))


def _built(setup: WorkerSetup) -> PrefillWorker:
    if setup.engine != "mlx":
        raise InputError(f"There is no prefill engine called {setup.engine!r}: choose mlx or none.")
    if setup.owner is None:
        raise InputError("A prefill worker needs shared memory: set --kv-memory above 0, or --prefill-engine none.")
    engine = MlxPrefillEngine.load(Path(setup.model))
    fingerprint = model_fingerprint(Path(setup.model))
    exchange = KvExchange(engine.layout, fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner)
    return PrefillWorker(engine, exchange, time.perf_counter, setup.prefill_chunk)


if __name__ == "__main__":
    sys.exit(main())
