"""The target's hidden states of recorded texts, which a replaying target gives to drafters. Computes them once.

python -m target_worker.recorded_features MODEL TEXTS OUTPUTS
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from protocol.contracts.model_fingerprint import model_fingerprint
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.kv.arena_header import ElementType
from protocol.messages.features import Taps
from protocol.worker.recorded_texts import RecordedTexts

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
    recorded = RecordedTexts.read(texts, model_fingerprint(folder))
    model = LanguageModel.load(folder)
    if model.tap is None or max(outputs) >= model.tap.taps.layers:
        raise InputError(f"The states that the drafter reads can't be recorded of the target in {folder}.")
    model.record(outputs)
    taps = model.tap.taps
    form = np.array([taps.layers, taps.width, int(model.tap.element), *outputs])
    rows = {str(index): _rows(model, text.whole) for index, text in enumerate(recorded.texts)}
    unfinished = _file(texts).with_suffix(f".{os.getpid()}.unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, form=form, **rows)
    unfinished.replace(_file(texts))


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
