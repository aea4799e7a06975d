"""A draft without a model: guesses what followed the same few tokens before. Imports no MLX."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from draft_worker.engine import ANY_TOKEN, Batch, Engine, EngineSequence
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from protocol.speculation.prompt_lookup import PromptLookup
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="prompt lookup, which needs no model", model="none")
_LONGEST_RUN = 3


def load(setup: WorkerSetup) -> "NgramEngine":
    """Raises InputError if there is a folder and it holds no model."""
    return NgramEngine(Path(setup.model) if setup.model else None)


class NgramEngine(Engine):
    """Prompt lookup (Saxena 2023) in the committed tokens of each sequence."""

    name = "ngram"
    architecture = "prompt lookup"

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: a model whose tokens are drafted; without one, any tokens are.

        Raises InputError if the folder's config.json or tokenizer.json is missing or broken.
        """
        if folder is not None:
            self.model = str(folder)
            self.vocabulary = _vocabulary(folder)
            self.tokenizer = tokenizer_fingerprint(folder)

    def open(self, sampling: Sampling, vocabulary: int) -> "NgramSequence":
        return NgramSequence()


class NgramSequence(EngineSequence):
    """The committed tokens in an index; rows are mere tokens.

    It states no distributions: a guess without one is certain, which is what rejection sampling needs.
    """

    path_tokens = _LONGEST_RUN

    def __init__(self) -> None:
        self._lookup = PromptLookup(_LONGEST_RUN)
        self._rows: dict[int, int] = {}
        self._next_row = 0

    @property
    def committed(self) -> int:
        return len(self._lookup)

    @property
    def next_row(self) -> int:
        return self._next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._lookup.extend(tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        self._lookup.extend(batch.committed)
        self._next_row += len(batch.committed)
        self._rows.update(enumerate(batch.tokens, start=self._next_row))
        self._next_row += len(batch.tokens)
        return [self._candidates(context, batch.limit) for context in batch.contexts]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._lookup.extend([self._rows[row] for row in path])
        self._rows = {row: self._rows[row] for row in surviving}

    def truncate(self, length: int) -> None:
        self._lookup.truncate(length)
        self._rows = {}

    def _candidates(self, context: Sequence[int], limit: int) -> Candidates:
        found = self._lookup.continuations(context, limit)
        return Candidates([token for token, _ in found], [probability for _, probability in found])


class _Text(msgspec.Struct):
    vocab_size: int | None = None


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    text_config: _Text | None = None


def _vocabulary(folder: Path) -> int:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder}/config.json can't be read ({error}): pass the folder of a complete model."
        ) from error
    size = config.vocab_size or (config.text_config.vocab_size if config.text_config else None)
    if not size or not 0 < size <= ANY_TOKEN:
        raise InputError(f"{folder}/config.json states no vocab_size: pass the folder of a complete model.")
    return size
