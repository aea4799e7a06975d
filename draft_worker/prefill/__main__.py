"""The prefill worker's process: loads the target's model and serves."""

import sys
import time
from functools import partial
from pathlib import Path

from protocol.contracts.model_folder import kv_fingerprint
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.inference.light_import import import_models
from protocol.kv.exchange import KvExchange
from protocol.worker.failed_calls import SurvivingWorker
from protocol.worker.interface import Worker
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _build(setup))


def _build(setup: WorkerSetup) -> Worker:
    import_models()
    # Behind it, since they import mlx-lm.
    from draft_worker.prefill.worker import ArenaSink, OpenSink, PrefillWorker, RemoteSink, layout_of
    from protocol.inference.device import BESIDE_TARGET, wire
    from protocol.inference.language_model import LanguageModel

    folder = Path(setup.model)
    model = LanguageModel.load(folder, kv_bits=setup.kv_bits)
    wire(setup.gpu_share, BESIDE_TARGET)
    fingerprint = kv_fingerprint(folder, setup.kv_bits)
    open_sink: OpenSink = RemoteSink
    if not setup.server:
        if setup.owner is None:
            raise InputError(
                "A prefill worker needs shared memory: set --arena-memory above 0, or --prefill-engine none."
            )
        exchange = KvExchange(layout_of(model), fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner)
        open_sink = partial(ArenaSink, exchange)
    tokenizer = vocabulary_fingerprint(folder)
    worker = PrefillWorker(model, open_sink, time.perf_counter, setup.prefill_chunk, fingerprint, tokenizer)
    return SurvivingWorker(worker)


if __name__ == "__main__":
    sys.exit(main())
