"""LayerSkip (arXiv 2404.16710): the first layers of the target's own folder, its norm and head.

All else is the MLX engine. Where the KV of these layers is the target's own, number for number of its weights, it is
adopted from the target's arenas instead of computed again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draft_worker.engines.mlx import MlxEngine, MlxSequence
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.model_folder import kv_fingerprint
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.inference.path_sequence import PathSequence
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena_header import ArenaError
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.kv import KvReference
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="the first layers of the target itself (--draft exit)", model="drafter")


def load(setup: WorkerSetup) -> "LayerSkipEngine":
    """`setup.model` is the folder of an exit. Raises InputError if it is none, or does not fit the target."""
    folder, target = Path(setup.model), Path(setup.target)
    exit_ = read_drafter(folder)
    if exit_ is None or exit_.kind != "exit":
        raise InputError(f"{folder} holds no early exit: pass exit:LAYERS.")
    if not setup.target:
        raise InputError("The draft engine layerskip needs the target's folder: pass --target.")
    model = LanguageModel.load(target, FirstLayers(exit_.layers))
    return LayerSkipEngine(model, folder, vocabulary_fingerprint(target), _exchange(setup, model))


def _exchange(setup: WorkerSetup, model: LanguageModel) -> KvExchange | None:
    if setup.owner is None or model.layout is None or model.level != "tree":
        return None
    fingerprint = kv_fingerprint(Path(setup.target), setup.kv_bits)
    return KvExchange(model.layout, fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner)


class LayerSkipEngine(MlxEngine):
    """`exchange`: knows the arenas with the target's KV; None if it can't be the same as this draft's."""

    name = "layerskip"

    def __init__(self, model: LanguageModel, folder: Path, tokenizer: str, exchange: KvExchange | None) -> None:
        super().__init__(model, tokenizer)
        self.model = str(folder)
        self.exchange = exchange
        if exchange is not None:
            self.kv, self.model_fingerprint = exchange.form, exchange.fingerprint

    def measured(self, loading: float) -> tuple[tuple[int, float], ...]:
        """Nothing: the target measures its own layers."""
        return ()

    def around(self, rows: TreeSequence | PathSequence, sampling: Sampling, vocabulary: int) -> "LayerSkipSequence":
        return LayerSkipSequence(self, rows, sampling, self.columns(vocabulary))


class LayerSkipSequence(MlxSequence):
    """Adopts the first layers of an arena that the target wrote."""

    _engine: LayerSkipEngine

    def adopt(self, reference: KvReference, tokens: Sequence[int]) -> str:
        exchange = self._engine.exchange
        if exchange is None or not isinstance(self._rows, TreeSequence):
            return super().adopt(reference, tokens)
        try:
            arena = exchange.adopt(reference, deeper=True)
        except (ArenaError, SegmentError) as error:
            return str(error)
        layers = exchange.form.layers
        keys, values = ([*half[:layers, :, : reference.tokens]] for half in (arena.keys, arena.values))
        self._rows.adopt(keys, values, reference.tokens, arena.layout.dtype)
        del keys, values
        arena.close()
        return ""


_DEPTHS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
"""What `make_cache` of some architectures counts the layers by."""


class FirstLayers:
    """A `Division` that keeps the first `layers` layers of a network. The tensors of the others are never read."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def divide(self, network: Any) -> None:
        """Raises InputError for an architecture without such layers."""
        body, name = _body(network)
        setattr(body, name, body[name][: self._layers])
        for module in [network, *network.modules()]:
            arguments = getattr(module, "args", None)
            for depth in _DEPTHS:
                if isinstance(getattr(arguments, depth, None), int):
                    setattr(arguments, depth, self._layers)

    def await_loaded(self) -> None:
        """No other process loads a part of it."""


def _body(network: Any) -> tuple[Any, str]:
    """The module that has the list of layers, and its attribute."""
    every: list[Any] = getattr(network, "layers", [])
    for module in network.modules():
        for name, value in module.items():
            # Some models' own `layers` is a copy of the list, the part for one rank of a pipeline.
            if isinstance(value, list) and len(value) == len(every) > 0 and value[0] is every[0]:
                return module, name
    raise InputError("The target's architecture has no plain list of layers to leave early: choose another draft.")
