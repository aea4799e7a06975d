"""LayerSkip (arXiv 2404.16710): the first layers of the target's own folder, its norm and head, or a trained exit.

All else is the MLX engine. Where the KV of these layers is the target's own, number for number of its weights, it is
adopted from the target's arenas instead of computed again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from draft_worker.drafters.files import stored_tensors
from draft_worker.engines.mlx import MlxEngine, MlxSequence
from draft_worker.short_head import HeadTokens, read_head_tokens
from protocol.contracts.drafters.description import KINDS
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.drafters.early_exit import LAYER, NORM
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
    model = LanguageModel.load(target, FirstLayers(exit_.layers, folder))
    # A trained layer of its own behind the target's has KV that no target computes.
    whole = len(model.network.layers) == exit_.layers
    exchange = _exchange(setup, model) if whole else None
    head_tokens = read_head_tokens(folder, model.vocabulary)
    engine = LayerSkipEngine(model, folder, vocabulary_fingerprint(target), exchange, head_tokens)
    engine.trained_exit = exit_.parameters > 0
    return engine


def _exchange(setup: WorkerSetup, model: LanguageModel) -> KvExchange | None:
    if setup.owner is None or model.layout is None or model.level != "tree":
        return None
    fingerprint = kv_fingerprint(Path(setup.target), setup.kv_bits)
    return KvExchange(model.layout, fingerprint=fingerprint, epoch=setup.epoch, owner=setup.owner)


class LayerSkipEngine(MlxEngine):
    """`exchange`: knows the arenas with the target's KV; None if it can't be the same as this draft's."""

    name = "layerskip"

    def __init__(
        self,
        model: LanguageModel,
        folder: Path,
        tokenizer: str,
        exchange: KvExchange | None,
        head: HeadTokens | None = None,
    ) -> None:
        super().__init__(model, tokenizer, head)
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


_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f")
_DEPTHS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
"""What `make_cache` of some architectures counts the layers by."""


class FirstLayers:
    """A `Division` that keeps the first `layers` layers of a network. The tensors of the others are never read.

    A trained exit brings a norm, and perhaps a decoder layer behind the kept ones
    (`protocol.contracts.drafters.early_exit` names the tensors).
    """

    def __init__(self, layers: int, trained: Path) -> None:
        """`trained`: a folder with the tensors of a trained exit, if there are any."""
        self._layers = layers
        self._trained = trained

    def divide(self, network: Any) -> None:
        """Raises InputError for an architecture without such layers, and for a trained exit that does not fit."""
        body, name = _body(network)
        tensors = stored_tensors(self._trained, KINDS["exit"].name)
        own = {name.removeprefix(LAYER): tensor for name, tensor in tensors.items() if name.startswith(LAYER)}
        kept = body[name][: self._layers]
        if own:
            kept.append(_trained_layer(body[name][self._layers], own))
        setattr(body, name, kept)
        for module in [network, *network.modules()]:
            _count(getattr(module, "args", None), len(kept))
        if NORM in tensors:
            _load(_norm(body), {"weight": tensors[NORM]}, NORM)

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


def _count(arguments: Any, layers: int) -> None:
    for name in _DEPTHS:
        if isinstance(getattr(arguments, name, None), int):
            setattr(arguments, name, layers)


def _trained_layer(layer: Any, tensors: Mapping[str, mx.array]) -> Any:
    """The target's next layer with other weights: its own are never read."""
    plain = dequantize_model(layer)
    _load(plain, tensors, f"{LAYER}*")
    return plain


def _norm(body: Any) -> nn.Module:
    found = next((body[name] for name in _NORMS if name in body), None)
    if found is None:
        raise InputError("The target's architecture has no final norm that a trained exit could replace.")
    return found


def _load(module: nn.Module, tensors: Mapping[str, mx.array], name: str) -> None:
    arrays: Any = dict(tree_flatten(module.parameters()))
    given = {name: tensor.astype(arrays[name].dtype) if name in arrays else tensor for name, tensor in tensors.items()}
    try:
        module.load_weights(list(given.items()))
    except ValueError as error:
        reason = str(error).splitlines()[0].rstrip(":. ")
        raise InputError(
            f"The trained exit's {name} does not fit the target's layers ({reason}): it was trained for another target."
        ) from error
