"""The target process: load the model, then serve."""

import os
import sys
import time
from pathlib import Path

import mlx.core as mx

from protocol.errors import InputError
from protocol.fingerprint import tokenizer_fingerprint
from protocol.kv_exchange import KvExchange
from protocol.messages import Hello
from protocol.model_fingerprint import model_fingerprint
from protocol.pacing import Pacer
from protocol.tree_model import TreeModel
from protocol.worker_process import WorkerSetup, serve
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker

_HEADROOM = 4 << 30
"""Bytes wired beyond the weights, for KV. More would starve the rest of the machine."""
_KEPT_BUFFERS = 1 << 30
"""Bytes of freed buffers that MLX may hold on to."""


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _built(setup))


def _built(setup: WorkerSetup) -> TargetWorker:
    if setup.engine != "mlx":
        raise InputError(f"The target has no engine named {setup.engine!r}: choose mlx.")
    folder = Path(setup.model)
    model = TreeModel.load(folder)
    _wire()
    introduction = Hello(
        role="target",
        engine="mlx",
        model=str(folder),
        architecture=model.architecture,
        vocabulary=model.vocabulary,
        context=model.context,
        tokenizer=tokenizer_fingerprint(folder),
        device=_device(),
        pid=os.getpid(),
    )
    engine = TargetEngine(model, setup.prefill_chunk, _exchange(setup, model))
    return TargetWorker(engine, time.perf_counter, introduction, Pacer(setup.pace))


def _exchange(setup: WorkerSetup, model: TreeModel) -> KvExchange | None:
    if setup.owner is None or model.layout is None:
        return None
    fingerprint = model_fingerprint(Path(setup.model))
    return KvExchange(model.layout, fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner)


def _device() -> str:
    """The device's kind and, where MLX knows it, its name."""
    name = str(mx.device_info().get("device_name", "")).strip()
    kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return f"{kind} ({name})" if name else kind


def _wire() -> None:
    """Keep the loaded weights resident on Apple GPUs, where macOS would otherwise page them out between rounds."""
    if not mx.metal.is_available():
        return
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    mx.set_wired_limit(min(recommended, mx.get_active_memory() + _HEADROOM))
    mx.set_cache_limit(_KEPT_BUFFERS)


if __name__ == "__main__":
    sys.exit(main())
