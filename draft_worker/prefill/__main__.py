"""The prefill worker's process: builds the engine that its arguments name and serves."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draft_worker.prefill.worker import ArenaSink, OpenSink, PrefillWorker, RemoteSink
from protocol.contracts.model_folder import UNQUANTIZED, kv_fingerprint
from protocol.errors import InputError
from protocol.inference.light_import import import_models
from protocol.kv.exchange import KvExchange
from protocol.worker.failed_calls import SurvivingWorker
from protocol.worker.interface import Worker
from protocol.worker.process import WorkerSetup, serve

if TYPE_CHECKING:
    from draft_worker.prefill.coreml import CoreMlPrefillEngine
    from draft_worker.prefill.mlx import MlxPrefillEngine


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _build(setup))


def _build(setup: WorkerSetup) -> Worker:
    import_models()
    engine = _load_engine(setup)
    fingerprint = kv_fingerprint(Path(setup.source or setup.model), setup.kv_bits)
    open_sink: OpenSink = RemoteSink
    if not setup.server:
        if setup.owner is None:
            raise InputError(
                "A prefill worker needs shared memory: set --arena-memory above 0, or --prefill-engine none."
            )
        exchange = KvExchange(engine.layout, fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner)
        open_sink = partial(ArenaSink, exchange)
    worker = PrefillWorker(engine, open_sink, time.perf_counter, setup.prefill_chunk, fingerprint)
    return SurvivingWorker(worker)


def _load_engine(setup: WorkerSetup) -> "MlxPrefillEngine | CoreMlPrefillEngine":
    """Imports only the engine that is used."""
    if setup.engine == "mlx":
        from draft_worker.prefill.mlx import MlxPrefillEngine
        from protocol.inference.device import BESIDE_TARGET, wire

        engine = MlxPrefillEngine.load(Path(setup.model), setup.kv_bits)
        wire(setup.gpu_share, BESIDE_TARGET)
        return engine
    if setup.engine == "coreml" and setup.kv_bits == UNQUANTIZED:
        from draft_worker.prefill.coreml import CoreMlPrefillEngine

        return CoreMlPrefillEngine.load(Path(setup.model), Path(setup.source))
    if setup.engine == "coreml":
        raise InputError("A Core ML prefill worker can't quantize KV: use --prefill-engine mlx, or --kv-bits 16.")
    raise InputError(f"Prefill engine {setup.engine!r} does not exist: choose mlx, coreml or none.")


if __name__ == "__main__":
    sys.exit(main())
