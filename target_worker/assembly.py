"""Builds a target worker from its set-up. A slow import: MLX and mlx-lm."""

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from protocol.contracts.model_folder import ModelFolder, kv_fingerprint
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.inference.device import TARGET, wire
from protocol.inference.forward_costs import ForwardCosts, costs_at_load
from protocol.inference.language_model import LanguageModel
from protocol.inference.tap import LayerTap
from protocol.kv.exchange import KvExchange
from protocol.messages.base import plain
from protocol.messages.features import Outputs
from protocol.messages.worker import Hello
from protocol.worker.pacing import Pacer
from protocol.worker.process import WorkerSetup
from protocol.worker.recorded_texts import RecordedTexts
from target_worker.disk_cache.cache import DiskCache
from target_worker.disk_cache.snapshot import CacheShape
from target_worker.engine import TargetEngine
from target_worker.feature_rings import FeatureRings
from target_worker.recorded import RecordedEngine, RecordedModel
from target_worker.tensor_parallel.ranks import load_leading_model
from target_worker.worker import TargetWorker


def device() -> str:
    """The device's kind and, where MLX knows it, its name."""
    name = str(mx.device_info().get("device_name", "")).strip()
    kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return f"{kind} ({name})" if name else kind


_DIVIDED_PREFILL_CHUNK = 128
"""Most tokens of one prefill forward of a divided target: the GPUs of faster ranks wait for slower ones meanwhile, and
macOS ends the work of a GPU that waits for about 5 s."""


def build(setup: WorkerSetup) -> TargetWorker:
    """Loads the model, or the recorded texts. Raises InputError for what can't be served."""
    match setup.engine:
        case "mlx":
            return _computing(setup)
        case "recorded":
            return _replaying(setup)
        case _:
            raise InputError(f"The target has no engine named {setup.engine!r}: choose mlx.")


def _computing(setup: WorkerSetup) -> TargetWorker:
    folder, began = Path(setup.model), time.perf_counter()
    if setup.hosts is None:
        model, share = LanguageModel.load(folder, kv_bits=setup.kv_bits), setup.gpu_share
    else:
        share = setup.gpu_share / (setup.hosts.ranks if setup.hosts.local else 1)
        model = load_leading_model(folder, setup.hosts, share, setup.kv_bits)
    wire(share, TARGET)
    loading, fingerprint = time.perf_counter() - began, kv_fingerprint(folder, setup.kv_bits)
    # Only this process could make up a context, so the other ranks of a divided target would have none; and its costs
    # are those of other machines too.
    whole = setup.hosts is None
    identity = fingerprint if whole else ""
    loaded = time.perf_counter()
    costs = ForwardCosts() if setup.pace else costs_at_load(model, loading, identity, contexts=whole)
    start = ("weights", loading), ("warm-up and costs", time.perf_counter() - loaded)
    exchange, rings = _exchange(setup, model, fingerprint), _rings(setup, model.tap, model.record)
    disk = _disk(setup, model, fingerprint)
    hello = Hello(
        role="target",
        engine="mlx",
        model=plain(str(folder)),
        architecture=model.architecture,
        vocabulary=model.vocabulary,
        context=model.context,
        tokenizer_fingerprint=vocabulary_fingerprint(folder),
        device=device(),
        pid=os.getpid(),
        kv=exchange and exchange.form,
        model_fingerprint=fingerprint,
        costs=costs.by_width,
        context_costs=costs.by_context,
        level=model.level,
        level_reason=plain(model.level_reason),
        deviation=model.deviation,
        joint_deviation=model.joint_deviation,
        batch_dependent=model.batch_dependent,
        taps=rings and rings.taps,
        start=start,
    )
    chunk = setup.prefill_chunk if setup.hosts is None else min(setup.prefill_chunk, _DIVIDED_PREFILL_CHUNK)
    engine = TargetEngine(model, chunk, exchange)
    return TargetWorker(
        engine, time.perf_counter, hello, Pacer(setup.pace), setup.kept_bytes, rings, disk, setup.kv_pool
    )


def _replaying(setup: WorkerSetup) -> TargetWorker:
    """A target without a model. It shares no KV, because it has none."""
    folder = Path(setup.model)
    texts = RecordedTexts.read(Path(setup.texts), ModelFolder(folder).fingerprint)
    hello = Hello(
        role="target",
        engine="recorded",
        model=plain(str(folder)),
        architecture="recorded",
        vocabulary=texts.target.vocabulary,
        context=texts.target.context,
        tokenizer_fingerprint=vocabulary_fingerprint(folder),
        device=device(),
        pid=os.getpid(),
    )
    engine = RecordedEngine(RecordedModel(folder, texts), texts, setup.prefill_chunk)
    return TargetWorker(engine, time.perf_counter, hello, Pacer(setup.pace))


def _exchange(setup: WorkerSetup, model: LanguageModel, fingerprint: str) -> KvExchange | None:
    if setup.owner is None or model.layout is None or setup.hosts is not None:
        # Each rank of a divided model holds a slice of the KV, and an arena needs all of it.
        return None
    limit = setup.arena_memory << 20 if setup.arena_memory else None
    made = KvExchange(model.layout, fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner, limit=limit)
    made.touches_ahead = True
    return made


def _disk(setup: WorkerSetup, model: LanguageModel, fingerprint: str) -> DiskCache | None:
    if not setup.disk_cache or setup.hosts is not None:
        return None
    shape, waiting = CacheShape.of(model.sequence()), setup.arena_memory << 20
    disk = DiskCache(fingerprint, device(), setup.model, shape, setup.disk_cache, waiting)
    atexit.register(disk.close)
    return disk


def _rings(setup: WorkerSetup, tap: LayerTap | None, record: Callable[[Outputs], None]) -> FeatureRings | None:
    if tap is None:
        return None
    fingerprint = ModelFolder(Path(setup.model)).fingerprint
    return FeatureRings(tap, record, fingerprint=fingerprint, epoch=setup.epoch, remote=bool(setup.server))
