"""Prefills with the target's model on MLX, in another process than the target. Knows no messages."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from protocol.contracts.model_folder import UNQUANTIZED, KvBits
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout


class MlxPrefillEngine:
    """Any model that `LanguageModel` can load and whose KV an arena can hold."""

    name = "mlx"

    def __init__(self, model: LanguageModel, tokenizer: str) -> None:
        """`tokenizer`: the fingerprint of the model's tokenizer. Raises InputError if no arena can hold the KV."""
        if model.layout is None:
            raise InputError(
                f"The KV of {model.folder} can't be shared, because its layers differ: use --prefill-engine none."
            )
        self.layout: ArenaLayout = model.layout
        self.model = str(model.folder)
        self.architecture = model.architecture
        self.vocabulary = model.vocabulary
        self.context = model.context
        self.device = str(mx.default_device())
        self.tokenizer = tokenizer
        self._network = model

    @classmethod
    def load(cls, folder: Path, kv_bits: KvBits = UNQUANTIZED) -> "MlxPrefillEngine":
        """Raises InputError if the folder holds no model that can serve."""
        return cls(LanguageModel.load(folder, kv_bits=kv_bits), vocabulary_fingerprint(folder))

    def open(self) -> "MlxPrefillSequence":
        return MlxPrefillSequence(self._network.sequence())


class MlxPrefillSequence:
    """The KV of one prompt."""

    def __init__(self, rows: TreeSequence) -> None:
        self._rows = rows

    def prefill(self, tokens: Sequence[int]) -> tuple[LayerRows, LayerRows]:
        begin = self._rows.committed
        self._rows.prefill(tokens)
        return self._rows.export(begin, begin + len(tokens))
