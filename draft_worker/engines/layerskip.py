"""LayerSkip (arXiv 2404.16710): the first layers of the target's own folder, its norm and head, or a trained exit.

All else is the MLX engine. Where the KV of these layers is the target's own, number for number of its weights, it is
adopted from the target's arenas instead of computed again.
"""

from pathlib import Path

from draft_worker.engines.mlx import MlxEngine, MlxSequence
from draft_worker.first_layers import FirstLayers
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from protocol.contracts.drafters.checkpoint import config_in
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.kv_bits import kv_fingerprint
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.inference.device.wired_memory import BESIDE_TARGET, wire
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
        raise InputError(
            f"{folder} holds no early exit ({config_in(folder).get('model_type')!r:.60}): pass exit:LAYERS."
        )
    if not setup.target:
        raise InputError("The draft engine layerskip needs the target's folder: pass --target.")
    model = LanguageModel.load(target, FirstLayers(exit_.layers, folder))
    wire(setup.gpu_share, BESIDE_TARGET)
    # A trained layer of its own behind the target's has KV that no target computes.
    whole = len(model.network.layers) == exit_.layers
    exchange = _exchange(setup, model) if whole else None
    head_tokens = read_head_tokens(folder, model.vocabulary)
    return LayerSkipEngine(model, folder, vocabulary_fingerprint(target), exchange, head_tokens)


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

    def around(self, rows: TreeSequence | PathSequence, sampling: Sampling, vocabulary: int) -> "LayerSkipSequence":
        return LayerSkipSequence(self, rows, sampling, self.columns(vocabulary))


class LayerSkipSequence(MlxSequence):
    """Adopts the first layers of an arena that the target wrote."""

    _engine: LayerSkipEngine

    def adopt(self, reference: KvReference) -> str:
        exchange = self._engine.exchange
        if exchange is None or not isinstance(self._rows, TreeSequence):
            return super().adopt(reference)
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
