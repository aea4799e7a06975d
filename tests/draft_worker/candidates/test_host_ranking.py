"""Candidates on the host against the full computation."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.candidates.head_columns import Columns
from draft_worker.candidates.host_ranking import GROUP_SIZE, PEAK, CandidateSelector, NoisePrefetch, shortlist
from draft_worker.candidates.ranking import propose
from draft_worker.engine_interface import Batch
from draft_worker.short_head import HeadTokens
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise
from protocol.sampling.threefry import gumbel, noise_bits
from protocol.speculation.token_tree import Candidates
from tests.support.logit_rows import rows
from tests.support.processing import processors

SEED = 11
NOISES = {size: (NoisePrefetch(size, size), Noise(size)) for size in (67, 4096, 151_936)}


def padded(logits: np.ndarray) -> np.ndarray:
    """With whole groups in the last axis."""
    width = [(0, 0)] * (logits.ndim - 1) + [(0, -logits.shape[-1] % GROUP_SIZE)]
    return np.pad(logits, width, constant_values=-np.inf)


def peaked(size: int, spread: float, seed: int) -> np.ndarray:
    """Logits like a language model's: a broad bulk and a few tokens far above it."""
    source = np.random.default_rng(seed)
    logits = source.standard_normal(size) * spread
    logits[source.integers(0, size, 12)] += 5 * spread
    return logits.astype(np.float32)


def both(logits: np.ndarray, temperature: float, position: int, limit: int = 8):
    """The shortlist's candidates and those of the full computation."""
    ahead, noise = NOISES[len(logits)]
    batch = Batch((), [0], [-1], limit)
    (full,) = propose(mx.array(logits)[None], [position], Sampling(temperature=temperature, seed=SEED), batch, noise)
    ours = shortlist(padded(logits), limit, temperature, ahead.position(SEED, position) if temperature else None)
    return ours, full


def relative(found: Candidates) -> list[float]:
    """Probabilities relative to the first one. The estimate of the tail's mass does not change them."""
    return [probability / found.probabilities[0] for probability in found.probabilities]


@settings(max_examples=60)
@given(
    size=st.sampled_from([67, 4096]),
    spread=st.floats(0.1, 6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    seed=st.integers(0, 1 << 30),
    limit=st.integers(4, 64),
)
def test_candidates_are_those_of_the_full_computation(
    size: int, spread: float, temperature: float, seed: int, limit: int
):
    ours, full = both(peaked(size, spread, seed), temperature, seed % 1000, limit)
    count = len(full.tokens)

    assert list(ours.tokens)[:count] == list(full.tokens)
    assert relative(ours)[:count] == pytest.approx(relative(full), rel=1e-3, abs=1e-6)
    if temperature == 0:
        assert ours.probabilities[:count] == pytest.approx(full.probabilities, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_the_mass_of_the_other_tokens_is_estimated_without_bias(spread: float, temperature: float):
    """With noise, the estimate uses the expected noise of each token below the floor. Single estimates have
    errors, larger ones if few tokens share the mass, but the errors cancel."""
    errors = []
    for seed in range(60):
        ours, full = both(peaked(4096, spread, seed), temperature, seed)
        errors.append(ours.probabilities[0] - full.probabilities[0])

    assert abs(np.mean(errors)) < 0.005
    assert np.std(errors) < 0.02


def test_an_improbable_token_wins_by_a_peak_of_noise():
    ahead, _ = NOISES[4096]
    noise = ahead.position(SEED, 7)
    highest = int(noise.peaks[noise.peak_values.argmax()])
    logits = np.zeros(4096, np.float32)

    assert shortlist(logits, 4, 1.0, noise).tokens[0] == highest


def test_equal_logits_rank_by_token():
    logits = np.zeros(4096, np.float32)
    logits[[9, 500, 3000]] = 2.0

    assert list(shortlist(logits, 4, 0.0, None).tokens) == [9, 500, 3000, 0]


def test_tokens_without_a_chance_are_no_candidates():
    logits = np.full(4096, -np.inf, np.float32)
    logits[[4, 8]] = 1.0

    assert list(shortlist(logits, 8, 0.0, None).tokens) == [4, 8]
    assert set(shortlist(logits, 8, 1.0, NOISES[4096][0].position(SEED, 3)).tokens) == {4, 8}
    assert shortlist(np.full(128, -np.inf, np.float32), 4, 0.0, None).tokens == []


def test_prefetched_noise_is_the_shared_noise_and_lists_its_peaks():
    for size, (ahead, _) in NOISES.items():
        noise = ahead.position(SEED, 12)
        want = gumbel(noise_bits(SEED, 12, np.arange(size), size))

        assert np.array_equal(noise.at(np.arange(size)), want)
        assert np.array_equal(noise.peaks, np.flatnonzero(want > PEAK))


def test_prefetched_noise_of_evicted_positions_is_drawn_alike_again():
    ahead = NoisePrefetch(67, 67)
    ahead._limit = 4
    before = ahead.position(SEED, 0).at(np.arange(67))
    for position in range(1, 9):
        ahead.position(SEED, position)

    assert len(ahead._drawn) == 4
    assert np.array_equal(ahead.position(SEED, 0).at(np.arange(67)), before)


_VOCABULARY = 5_000
_PATHS = ((7,), (9, 11))
SAMPLINGS = {
    "top-p": Sampling(temperature=0.8, seed=5, top_p=0.9),
    "top-k": Sampling(temperature=0.8, seed=5, top_k=300),
    "min-p": Sampling(temperature=0.8, seed=5, min_p=0.2),
    "few": Sampling(temperature=0.8, seed=5, top_k=3, top_p=0.5),
    "every filter": Sampling(temperature=1.3, seed=5, top_k=40, top_p=0.9, min_p=0.01),
    "penalised": Sampling(temperature=0.8, seed=5, top_p=0.95, repetition_penalty=1.3, frequency_penalty=1.5),
    "greedy, penalised": Sampling(repetition_penalty=1.3),
}


def batch(sampling: Sampling) -> Batch:
    followers = ([(5, 0.5), (8, 0.1), (_VOCABULARY + 1, 0.1)], [])
    wanted = processors(sampling, (3, 7))
    return Batch((), [0, 0], [-1, -1], 6, processors=wanted, paths=_PATHS, followers=followers)


@pytest.mark.parametrize("head", [None, np.arange(2, _VOCABULARY, 3, dtype=np.int32)], ids=["whole", "short"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_candidates_of_a_processed_request_are_those_of_the_full_computation(name: str, head: HeadTokens | None):
    sampling, positions = SAMPLINGS[name], (20, 21)
    logits = rows("normal", 2, _VOCABULARY if head is None else len(head), seed=4)
    selector = CandidateSelector(Columns(_VOCABULARY, _VOCABULARY, head))
    selector.begin(sampling, positions)

    found = selector.select(padded(logits), positions, sampling, batch(sampling))

    expected = Columns(_VOCABULARY, _VOCABULARY, head).propose(mx.array(logits), positions, sampling, batch(sampling))
    assert [list(each.tokens) for each in found] == [list(each.tokens) for each in expected]
    for got, want in zip(found, expected, strict=True):
        assert got.probabilities == pytest.approx(want.probabilities, rel=0.3, abs=0.02)
