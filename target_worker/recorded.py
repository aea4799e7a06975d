"""Recorded texts generated again without the model: the engine, and the hidden states that it gives to drafters.

python -m target_worker.recorded MODEL TEXTS OUTPUTS computes the states once. Knows no message flow and no clock.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError, PipelineError
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.recorded_network import KnownText
from protocol.inference.tap import Recorded
from protocol.inference.tree_sequence import Tokens, TreeSequence
from protocol.kv.arena_header import ElementType
from protocol.kv.prefix_sharing import Found
from protocol.messages.base import Level
from protocol.messages.features import Outputs, Taps
from protocol.messages.worker import Start
from protocol.sampling.logits_processors import LogitsProcessors
from protocol.security.private_files import replacing
from protocol.worker.recorded_texts import RecordedText, RecordedTexts
from target_worker.engine import TargetEngine, TargetSequence
from target_worker.kv import TargetKv

_CHUNK = 512


class RecordedFeatures:
    """For each text, by its place in the file, the outputs of some layers for all of its tokens.

    It stands in for a model's tap: `outputs` are what is read of them now.
    """

    def __init__(
        self, taps: Taps, element: ElementType, outputs: tuple[int, ...], texts: Sequence[NDArray[Any]]
    ) -> None:
        """`texts`: (tokens, outputs * width) each, of `element`; bfloat16 as its bits."""
        self.taps = taps
        self.element = element
        self.outputs: tuple[int, ...] = ()
        self._computed = outputs
        self._texts = texts

    def holds(self, outputs: Sequence[int]) -> bool:
        """Whether these outputs were computed."""
        return set(outputs) <= set(self._computed)

    def rows(self, text: int, positions: Sequence[int]) -> NDArray[Any]:
        """(positions, outputs * width) of `outputs`, which must have been computed. The text's last token stands in for
        those behind it."""
        stored = self._texts[text]
        rows = stored[np.minimum(positions, len(stored) - 1)]
        width, places = self.taps.width, map(self._computed.index, self.outputs)
        return np.concatenate([rows[:, place * width : (place + 1) * width] for place in places], axis=1)

    @classmethod
    def beside(cls, texts: Path) -> "RecordedFeatures | None":
        """Those of the texts in this file, if they were computed and are whole."""
        try:
            with np.load(_file(texts), allow_pickle=False) as stored:
                layers, width, element, *outputs = stored["form"].tolist()
                rows = [stored[str(index)] for index in range(len(stored.files) - 1)]
                return cls(Taps(layers, width), ElementType(element), tuple(outputs), rows)
        except (OSError, EOFError, ValueError, LookupError, BadZipFile):
            return None


def compute(folder: Path, texts: Path, outputs: tuple[int, ...]) -> None:
    """Compute these outputs of the model in `folder` for all texts, unless they are there already.

    Raises InputError for a model that can't record them.
    """
    known = RecordedFeatures.beside(texts)
    if known is not None and known.holds(outputs):
        return
    recorded = RecordedTexts.read(texts, ModelFolder(folder).fingerprint)
    model = LanguageModel.load(folder)
    if model.tap is None or max(outputs) >= model.tap.taps.layers:
        raise InputError(f"The states that the drafter reads can't be recorded of the target in {folder}.")
    model.record(outputs)
    taps = model.tap.taps
    form = np.array([taps.layers, taps.width, int(model.tap.element), *outputs])
    rows = {str(index): _rows(model, text.whole) for index, text in enumerate(recorded.texts)}
    with replacing(_file(texts)) as unfinished:
        np.savez(unfinished, allow_pickle=False, form=form, **rows)


def _rows(model: LanguageModel, tokens: Sequence[int]) -> NDArray[Any]:
    sequence, parts = model.sequence(), []
    for begin in range(0, len(tokens), _CHUNK):
        sequence.prefill(tokens[begin : begin + _CHUNK])
        assert sequence.recorded is not None
        parts.append(np.array(sequence.recorded.rows))
    return np.concatenate(parts)


def _file(texts: Path) -> Path:
    return texts.with_name(f"{texts.stem}.features.npz")


def main() -> int:
    folder, texts, outputs = sys.argv[1:]
    try:
        compute(Path(folder), Path(texts), tuple(int(output) for output in outputs.split(",")))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())


class RecordedEngine(TargetEngine):
    """Verifies the proposals of requests whose texts are recorded, and refuses every other request."""

    def __init__(self, model: "RecordedModel", texts: RecordedTexts, prefill_chunk: int = 512) -> None:
        """`texts`: those of the model."""
        super().__init__(model, prefill_chunk)
        self._texts = texts

    def refusal(self, start: Start) -> str | None:
        return super().refusal(start) or (None if self._text(start) else _unknown(start))

    def open(
        self, start: Start, processors: LogitsProcessors | None, found: Found[TargetKv] | None = None
    ) -> TargetSequence:
        sequence, text = super().open(start, processors, found), self._text(start)
        assert isinstance(sequence.cache, RecordedSequence)
        assert text is not None
        known = KnownText(text.whole, self.model.vocabulary)
        sequence.cache.follow(known, self._texts.texts.index(text))
        return sequence

    def _text(self, start: Start) -> RecordedText | None:
        return self._texts.beginning_with(start.tokens, start.sampling)


class RecordedModel:
    """The recorded target in place of a `LanguageModel`."""

    def __init__(self, folder: Path, texts: RecordedTexts, states: RecordedFeatures | None = None) -> None:
        """`folder` holds the tokenizer and the config of the recorded target. Its weights are not read.

        `states`: the target's states of the same texts, for drafters.
        """
        self.states = states
        self.folder = folder
        self.vocabulary = texts.target.vocabulary
        self.context = texts.target.context
        self.level: Level = "tree"
        self.prompt_logits = self.chains = False

    def record(self, outputs: Outputs) -> None:
        """As of a `LanguageModel`. Nothing is recorded if one of them was not computed for the texts."""
        if self.states is not None:
            self.states.outputs = outputs if self.states.holds(outputs) else ()

    def sequence(self) -> "RecordedSequence":
        """A new, empty sequence, which follows no text yet."""
        return RecordedSequence(self.states)

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

    def __init__(self, states: RecordedFeatures | None = None) -> None:
        super().__init__(_NoLayers())
        self._states = states
        self._text: KnownText | None = None
        self._index = 0

    def follow(self, text: KnownText, index: int) -> None:
        """Verify against this text from now on, the one with this index among the recorded ones."""
        self._text = text
        self._index = index

    def prefill(self, tokens: Sequence[int], *, remember: bool = True) -> None:
        """Without logits: those of a prompt were not recorded."""
        begin = self.committed
        super().prefill(tokens)
        self.recorded = self._features(range(begin, self.committed))

    def evaluate(self, tokens: Tokens, parents: Sequence[int], first: int | None = None) -> mx.array:
        assert first is None, "a target replaces no committed tokens"
        assert self._text is not None
        if self.committed + 1 >= len(self._text.tokens):
            raise PipelineError(f"The recorded text ends after {len(self._text.tokens)} tokens: record a longer one.")
        row = self.next_row
        self.begin(parents)
        positions = [self.position(row) for row in range(row, row + len(tokens))]
        self.recorded = self._features(positions)
        return self._text.logits(positions)

    def _features(self, positions: Sequence[int]) -> Recorded | None:
        """What drafters read of the tokens at these positions, if they are the text's."""
        if self._states is None or not self._states.outputs:
            return None
        return Recorded(self._states.outputs, mx.array(self._states.rows(self._index, positions)))


class _NoLayers:
    """A network without layers, and so without KV. A prefill discards its logits."""

    layers = ()

    def __call__(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        assert not cache
        return tokens


def _unknown(start: Start) -> str:
    if start.sampling.verification != "coupled":
        return (
            "Rejection sampling needs the target's whole distribution, and a recorded text holds its tokens only: use "
            "coupled verification, or the model."
        )
    return (
        "This target replays recorded texts, and none is recorded for this prompt, temperature and seed without "
        "filters or penalties: record it first, or use the model."
    )
