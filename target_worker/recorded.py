"""Recorded texts generated again without the model. Knows no message flow and no clock."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from protocol.errors import PipelineError
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.recorded_network import KnownText
from protocol.inference.tree_sequence import Tokens, TreeSequence
from protocol.kv.prefix_sharing import Found
from protocol.messages.base import Level
from protocol.messages.worker import Start
from protocol.sampling.logits_processors import LogitsProcessors
from protocol.worker.recorded_texts import RecordedText, RecordedTexts
from target_worker.engine import TargetEngine, TargetSequence
from target_worker.kv import TargetKv


class RecordedEngine(TargetEngine):
    """Verifies the proposals of requests whose texts are recorded, and refuses every other request."""

    def __init__(self, model: "RecordedModel", texts: RecordedTexts, prefill_chunk: int = 512) -> None:
        """`texts`: those of the model."""
        super().__init__(model, prefill_chunk)
        self._texts = texts

    def refusal(self, start: Start) -> str | None:
        return super().refusal(start) or (None if self._text(start) else _UNKNOWN)

    def open(
        self, start: Start, processors: LogitsProcessors | None, found: Found[TargetKv] | None = None
    ) -> TargetSequence:
        sequence, text = super().open(start, processors, found), self._text(start)
        assert isinstance(sequence.cache, RecordedSequence)
        assert text is not None
        known = KnownText(text.whole, self.model.vocabulary)
        sequence.cache.follow(known)
        return sequence

    def _text(self, start: Start) -> RecordedText | None:
        return self._texts.beginning_with(start.tokens, start.sampling)


class RecordedModel:
    """The recorded target in place of a `LanguageModel`."""

    def __init__(self, folder: Path, texts: RecordedTexts) -> None:
        """`folder` holds the tokenizer and the config of the recorded target. Its weights are not read."""
        self.folder = folder
        self.vocabulary = texts.target.vocabulary
        self.context = texts.target.context
        self.level: Level = "tree"
        self.prompt_logits = self.chains = False

    def sequence(self) -> "RecordedSequence":
        """A new, empty sequence, which follows no text yet."""
        return RecordedSequence()

    def lower(self, reason: str) -> bool:
        """No forward is computed that a lower level would do without."""
        return False

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        """(L, V) logits of each part, not yet computed."""
        return [part.evaluate() for part in parts]


class RecordedSequence(TreeSequence):
    """The rows of a sequence without their KV. The logits of a row depend on its position only.

    They are right for every node on the path of the recorded text. No other node is accepted, and no logits behind it
    are read.
    """

    copyable = False

    def __init__(self) -> None:
        super().__init__(_NoLayers())
        self._text: KnownText | None = None

    def follow(self, text: KnownText) -> None:
        """Verify against this text from now on."""
        self._text = text

    def prefill(self, tokens: Sequence[int], *, remember: bool = True) -> None:
        """Without logits: those of a prompt were not recorded."""
        super().prefill(tokens)

    def evaluate(self, tokens: Tokens, parents: Sequence[int], first: int | None = None) -> mx.array:
        assert first is None, "a target replaces no committed tokens"
        assert self._text is not None
        if self.committed + 1 >= len(self._text.tokens):
            raise PipelineError(f"The recorded text ends after {len(self._text.tokens)} tokens: record a longer one.")
        row = self.next_row
        self.begin(parents)
        return self._text.logits([self.position(row) for row in range(row, row + len(tokens))])


class _NoLayers:
    """A network without layers, and so without KV. A prefill discards its logits."""

    layers = ()

    def __call__(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        assert not cache
        return tokens


_UNKNOWN = (
    "This target replays recorded texts, and none is recorded for this prompt, temperature and seed without filters or "
    "penalties: record it first, or use the model."
)
