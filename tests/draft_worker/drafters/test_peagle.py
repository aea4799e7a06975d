"""Laws of P-EAGLE: one forward guesses a block of tokens, from rows that EAGLE-3's reference computes too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.drafters.eagle3 import read_eagle3
from draft_worker.drafters.peagle import PeagleRunner
from draft_worker.engine_interface import Batch
from draft_worker.engines.block import BlockEngine, BlockSequence
from protocol.messages.sampling import Sampling
from tests.support.eagle3_reference import Reference, Row
from tests.support.models import eagle3_folders as folders
from tests.support.models.drafter_files import VOCABULARY, WIDTH
from tests.support.models.tokenizer_files import write_tokenizer

TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, VOCABULARY, 90)]
FEATURES = np.random.default_rng(5).normal(size=(90, 3 * WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.peagle(tmp_path_factory.mktemp("peagle"))


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BlockEngine:
    tokens = tmp_path_factory.mktemp("tokens")
    write_tokenizer(tokens)
    return BlockEngine(folder, PeagleRunner(read_eagle3(folder)), tokens)


def expected(folder: Path, known: int, rest: Sequence[int]) -> list[Any]:
    """Logits of a block: the tokens in front of index `known` have features, and `rest` follow them."""
    stored: Any = mx.load(str(folder / "model.safetensors"))
    reference = Reference.of(folder)
    masked = reference.fuse(np.array(stored["mask_hidden"], np.float64)[0, 0])
    rows: list[Row] = []
    for token in range(1, known):
        read = reference.fuse(FEATURES[token - 1].astype(np.float64))
        rows.append(reference.row(TOKENS[token], read, rows, len(rows)))
    for place, token in enumerate([*rest, *[folders.MASK_TOKEN] * (folders.DEPTHS - 1)]):
        read = reference.fuse(FEATURES[known - 1].astype(np.float64)) if place == 0 and known else masked
        rows.append(reference.row(token, read, rows, len(rows)))
    return [reference.logits(row) for row in rows[-folders.DEPTHS :]]


def opened(engine: BlockEngine, count: int, fed: int) -> BlockSequence:
    """A sequence of so many committed tokens, of which the first `fed` have features."""
    sequence = engine.open(Sampling(temperature=0.0), VOCABULARY)
    sequence.prefill(TOKENS[:count])
    if fed:
        sequence.feed(0, FEATURES[:fed])
    return sequence


def chances(sequence: BlockSequence, path: Sequence[int]) -> Any:
    """Of the head's tokens behind each token of a path, in one growth step."""
    begin = sequence.next_row
    parents = [-1, *range(begin, begin + len(path) - 1)]
    found = sequence.evaluate(Batch([], path, parents, len(folders.HEAD_TOKENS)))
    named = [dict(zip(each.tokens, each.probabilities, strict=True)) for each in found]
    return np.array([[each[token] for token in folders.HEAD_TOKENS] for each in named])


def shares(logits: Sequence[Any]) -> Any:
    weights = np.exp(np.array(logits))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("count", "fed"), [(12, 12), (12, 10), (3, 1), (4, 0)])
def test_a_block_is_guessed_from_the_rows_of_the_reference(folder: Path, engine: BlockEngine, count: int, fed: int):
    found = chances(opened(engine, count, fed), [7, 3, 9, 1, 2, 5])

    assert np.allclose(found, shares(expected(folder, fed, [*TOKENS[fed:count], 7])), atol=1e-4)


def test_the_block_needs_one_forward(engine: BlockEngine):
    sequence = opened(engine, 12, 12)
    chances(sequence, [7])
    assert sequence.forward_widths == (folders.DEPTHS,)

    row = sequence.next_row - 1
    sequence.evaluate(Batch([], [3, 4], [row, row], 4))

    assert sequence.forward_widths == ()
    assert (engine.architecture, engine.joint) == ("peagle", False)


def test_rows_survive_commits_cuts_and_copies(engine: BlockEngine):
    sequence = opened(engine, 80, 70)
    while sequence.unread:
        sequence.read(24)
    chances(sequence, [TOKENS[80], TOKENS[81]])
    sequence.keep((0, 1), ())
    sequence.feed(70, FEATURES[70:82])
    chances(sequence, [5])
    sequence.truncate(40)
    sequence.prefill(TOKENS[40:60])
    sequence.feed(40, FEATURES[40:60])
    other = sequence.reopen(50, Sampling(temperature=0.0), VOCABULARY, exclusive=False)

    for each, count in ((sequence, 60), (other, 50)):
        assert np.allclose(chances(each, [7]), chances(opened(engine, count, count), [7]), atol=1e-5)
        assert each.memory > 0
