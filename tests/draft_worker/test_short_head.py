"""Laws of a head over some tokens of the vocabulary: its candidates are those of a whole head without the others."""

from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from draft_worker.candidates.ranking import propose
from draft_worker.engine_interface import Batch
from draft_worker.engines.mlx import MlxEngine, MlxSequence
from draft_worker.short_head import read_head_tokens, shorten_head
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise
from tests.support.models.tiny_models import VOCABULARY, alike, network, stock_logits
from tests.support.processing import processors

TOKENS = np.array([0, 3, 4, 17, 31, 40, 41, VOCABULARY - 1], np.int32)
PROMPT = (5, 1, 60, 2)
NODES = (7, 9, 11)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=5),
    "filtered": Sampling(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2),
    "penalised": Sampling(temperature=0.8, seed=5, frequency_penalty=1.5, presence_penalty=2.0),
}


def batch(sampling: Sampling) -> Batch:
    """Three nodes behind the prompt."""
    paths = [[node] for node in NODES]
    return Batch((), NODES, [-1] * len(NODES), 4, processors=processors(sampling, PROMPT), paths=paths)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantised", [True, False])
def test_logits_are_those_of_the_whole_head(tied: bool, quantised: bool):
    model = network(tie_word_embeddings=tied)
    if quantised:
        nn.quantize(model, group_size=32, bits=8)
    whole = stock_logits(model, PROMPT)

    shorten_head(model, TOKENS)

    assert alike(stock_logits(model, PROMPT), whole[mx.array(TOKENS)], 1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_can_be_widened(tied: bool):
    model, more = network(tie_word_embeddings=tied), [2, 60]
    whole = stock_logits(model, PROMPT)

    head = shorten_head(model, TOKENS)

    assert head.widens == tied
    if tied:
        head.widen(more)
        assert alike(stock_logits(model, PROMPT), whole[mx.array([*TOKENS.tolist(), *more])], 1e-5)
        head.widen([])
        assert stock_logits(model, PROMPT).shape[-1] == len(TOKENS)


@pytest.mark.parametrize("others", [(6, 1, 50, 3, 20), PROMPT[::-1]], ids=["other tokens", "the same in another order"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sequences_in_one_forward_guess_tokens_of_their_own_context_alone(name: str, others: tuple[int, ...]):
    sampling = SAMPLINGS[name]
    prompts = (PROMPT, others)

    def opened(engine: MlxEngine, prompt: tuple[int, ...]) -> MlxSequence:
        sequence = engine.open(sampling, VOCABULARY)
        sequence.prefill(prompt)
        return sequence

    engine = MlxEngine(LanguageModel(network(tie_word_embeddings=True)), "", TOKENS)
    parts = [(opened(engine, prompt), batch(sampling)) for prompt in prompts]
    together = engine.evaluate_together(parts)

    for (sequence, _), prompt, found in zip(parts, prompts, together, strict=True):
        (alone,) = engine.evaluate_together([(opened(engine, prompt), batch(sampling))])
        assert [each.tokens for each in found] == [each.tokens for each in alone]
        assert {token for each in found for token in each.tokens} <= {*TOKENS.tolist(), *prompt, *NODES}
        assert set(sequence.columns.tokens) == {*prompt, *NODES} - set(TOKENS.tolist())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_step_that_widens_the_head_waits_for_the_device_as_often_as_one_that_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    sequence = MlxEngine(LanguageModel(network(tie_word_embeddings=True)), "", TOKENS).open(SAMPLINGS[name], VOCABULARY)
    sequence.prefill(PROMPT)
    monkeypatch.setattr(mx, "eval", wait := Mock(wraps=mx.eval))
    once, twice = (wait.call_count for _ in range(2) if sequence.evaluate(batch(SAMPLINGS[name])))

    assert twice == 2 * once


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("target", [VOCABULARY - 1, VOCABULARY, VOCABULARY + 61])
def test_candidates_are_those_of_a_whole_head_without_the_other_tokens(name: str, target: int, tied: bool):
    """For targets whose vocabulary is smaller, equal and larger: the noise of a token depends on it and the token. A
    tied head has the context's tokens too."""
    sampling, shared = SAMPLINGS[name], min(target, VOCABULARY)
    model = network(tie_word_embeddings=tied)
    sequence = MlxEngine(LanguageModel(network(tie_word_embeddings=tied)), "", TOKENS).open(sampling, target)
    sequence.prefill(PROMPT)
    found = sequence.evaluate(batch(sampling))

    logits = np.full((len(NODES), shared), -np.inf, np.float32)
    guessable = {*TOKENS.tolist(), *PROMPT, *NODES} if tied else set(TOKENS.tolist())
    head = np.array(sorted(token for token in guessable if token < shared))
    for row, node in enumerate(NODES):
        logits[row, head] = np.array(stock_logits(model, [*PROMPT, node]).astype(mx.float32))[head]
    positions = [len(PROMPT) + 1] * len(NODES)
    expected = propose(mx.array(logits), positions, sampling, batch(sampling), Noise(target, shared))
    for got, want in zip(found, expected, strict=True):
        possible = [token for token, chance in zip(want.tokens, want.probabilities, strict=True) if chance > 0]
        assert list(got.tokens)[: len(possible)] == possible
        np.testing.assert_allclose(got.probabilities[: len(possible)], want.probabilities[: len(possible)], rtol=1e-3)


def test_without_the_file_the_head_is_whole(tmp_path: Path):
    assert read_head_tokens(tmp_path, VOCABULARY) is None


def test_a_file_that_lies_about_its_length_or_is_no_array_is_refused(tmp_path: Path):
    """Before memory is taken for what it announces."""
    lies = [f"{{'descr':'<i4','fortran_order':False,'shape':({1 << bits},)}}" for bits in (31, 40, 70)]
    for lie in (*lies, "[" * 3000, "-" * 9000 + "1", "{'descr':'O','fortran_order':False,'shape':(1,)}"):
        content = b"\x93NUMPY\x01\x00" + (len(lie) + 1).to_bytes(2, "little") + lie.encode() + b"\n" + bytes(64)
        (tmp_path / HEAD_TOKENS).write_bytes(content)
        with pytest.raises(InputError, match="can't be read"):
            read_head_tokens(tmp_path, VOCABULARY)


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
    np.save(tmp_path / HEAD_TOKENS, tokens)

    with pytest.raises(InputError, match="ascending int32 tokens"):
        read_head_tokens(tmp_path, VOCABULARY)
