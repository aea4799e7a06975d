"""Laws of a head over some tokens of the vocabulary."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from draft_worker.engine import Batch
from draft_worker.engines.head_tokens import FILE, shorten_head
from draft_worker.engines.mlx import MlxEngine
from protocol.errors import InputError
from protocol.messages.sampling import Sampling
from tests.support.paths import DEMO_DRAFT
from tests.support.tiny_models import VOCABULARY, network, stock_logits

TOKENS = np.array([0, 3, 4, 31, VOCABULARY - 1], np.int32)
PROMPT = (5, 1, 60, 2)


def shortened(model: Any, folder: Path, tokens: np.ndarray = TOKENS) -> Any:
    np.save(folder / FILE, tokens)
    shorten_head(model, folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_the_heads_tokens_stay_and_the_others_are_impossible(tmp_path: Path, tied: bool):
    whole = np.array(stock_logits(network(tie_word_embeddings=tied), PROMPT))

    short = np.array(stock_logits(shortened(network(tie_word_embeddings=tied), tmp_path), PROMPT))

    np.testing.assert_allclose(short[TOKENS], whole[TOKENS], rtol=1e-5, atol=1e-5)
    assert np.isneginf(np.delete(short, TOKENS)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_head_is_shortened_too(tmp_path: Path, tied: bool):
    model = network(tie_word_embeddings=tied)
    nn.quantize(model, group_size=32, bits=8)
    whole = np.array(stock_logits(model, PROMPT))

    short = np.array(stock_logits(shortened(model, tmp_path), PROMPT))

    np.testing.assert_allclose(short[TOKENS], whole[TOKENS], rtol=1e-4, atol=1e-4)


def test_without_the_file_nothing_changes(tmp_path: Path):
    model = network()
    before = stock_logits(model, PROMPT)

    shorten_head(model, tmp_path)

    assert mx.array_equal(stock_logits(model, PROMPT), before)


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([3, 1], np.int32),
        np.array([1, VOCABULARY], np.int32),
        np.array([-1, 2], np.int32),
        np.array([], np.int32),
        np.array([1.0, 2.0]),
    ],
    ids=["not ascending", "beyond the vocabulary", "negative", "empty", "not integers"],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, tokens: np.ndarray):
    with pytest.raises(InputError, match="ascending int32 tokens"):
        shortened(network(), tmp_path, tokens)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=1, top_p=0.9)], ids=["greedy", "top-p"]
)
def test_the_engine_guesses_tokens_of_the_head_alone(tmp_path: Path, sampling: Sampling):
    folder = tmp_path / "draft"
    shutil.copytree(DEMO_DRAFT, folder)
    tokens = np.arange(5, 4096, 100, dtype=np.int32)
    np.save(folder / FILE, tokens)
    engine = MlxEngine.load(folder)
    sequence = engine.open(sampling, engine.vocabulary)
    sequence.prefill([10, 20, 30])

    (found,) = sequence.evaluate(Batch(committed=(), tokens=(40,), parents=(-1,), limit=8))

    assert len(found.tokens) >= 1
    assert set(found.tokens) <= set(tokens.tolist())
