"""Rejection sampling gives the target's distribution for every draft distribution; a wrong rule fails the test."""

import math
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

import target_worker.verification as module
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Verify
from protocol.sampling.sampler import Noise
from protocol.sampling.threefry import NoiseStream, gumbel, noise_bits
from protocol.speculation.token_tree import node_id
from target_worker.verification import ProposedTree, rejection
from tests.support.processing import processed

_VOCABULARY = 5
_DRAWS = 1500
_ROOT, _POSITION = 2, 30
_TARGET = np.random.default_rng(1).normal(scale=1.2, size=(_VOCABULARY, _VOCABULARY)).astype(np.float32)
"""Logits of the next token (columns) behind each token (rows): a first-order target is enough to test pairs."""
_NOISE = Noise(_VOCABULARY)


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _uniform() -> np.ndarray:
    return np.full((_VOCABULARY, _VOCABULARY), 1 / _VOCABULARY)


def _close() -> np.ndarray:
    noise = np.random.default_rng(2).normal(scale=0.4, size=_TARGET.shape)
    return _softmax(_TARGET + noise)


def _contrary() -> np.ndarray:
    return _softmax(-2 * _TARGET)


def _top_two() -> np.ndarray:
    probabilities = _softmax(_TARGET)
    kept = np.where(probabilities >= np.sort(probabilities, axis=-1)[:, -2:-1], probabilities, 0)
    return kept / kept.sum(axis=-1, keepdims=True)


_DRAFTS = {
    "the target itself": lambda: _softmax(_TARGET),
    "close": _close,
    "uniform": _uniform,
    "contrary": _contrary,
    "the top two only": _top_two,
    "deterministic": None,
}


def _drawn(probabilities: np.ndarray, seed: int, position: int) -> int:
    noise = gumbel(noise_bits(seed, position, np.arange(_VOCABULARY), _VOCABULARY, NoiseStream.DRAFT))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probabilities) + noise))


def _proposal(root: int, position: int, seed: int, draft: np.ndarray | None, depth: int) -> ProposedTree:
    tokens, ids, distributions = [root], [NodeId(77)], []
    for index in range(depth):
        if draft is None:
            tokens.append((tokens[-1] + 1) % _VOCABULARY)
        else:
            row = draft[tokens[-1]]
            support = np.flatnonzero(row)
            distributions.append(Distribution(ids[-1], tuple(support.tolist()), tuple(row[support].tolist())))
            tokens.append(_drawn(row, seed, position + 1 + index))
        ids.append(node_id(ids[-1], tokens[-1]))
    parents = tuple(range(-1, depth))
    return ProposedTree(Verify(SequenceId(0), 0, NodeId(77), position, tuple(tokens), parents, tuple(distributions)))


def _emitted(seed: int, draft: np.ndarray | None, depth: int, sampling: Sampling) -> tuple[int, int]:
    """The first two tokens behind the root, decoded round by round."""
    tokens = [_ROOT]
    while len(tokens) < 3:
        proposal = _proposal(tokens[-1], _POSITION + len(tokens) - 1, seed, draft, depth)
        logits = processed(mx.array(_TARGET[list(proposal.tokens)]), sampling)
        walk = rejection(logits, proposal, sampling, _NOISE)()
        tokens += [*(proposal.tokens[entry] for entry in walk.accepted), walk.bonus]
    return tokens[1], tokens[2]


def _chi_square_excess(pairs: list[tuple[int, int]], target: np.ndarray) -> float:
    """Chi-square of the pairs against the target's, as a standard normal deviate (Wilson and Hilferty 1931)."""
    counts = np.zeros(_TARGET.shape)
    for first, second in pairs:
        counts[first, second] += 1
    expected = len(pairs) * target[_ROOT][:, None] * target
    if counts[expected == 0].any():
        return math.inf
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def _excess(name: str, depth: int, temperature: float = 1.0) -> float:
    make = _DRAFTS[name]
    draft = make() if make else None
    pairs = [_emitted(seed, draft, depth, Sampling(temperature=temperature, seed=seed)) for seed in range(_DRAWS)]
    return _chi_square_excess(pairs, _softmax(_TARGET / temperature))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", _DRAFTS)
def test_pairs_are_distributed_as_the_target_s(name: str):
    assert _excess(name, depth=2) < 3.5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_pairs_of_chains_of_any_length_are_distributed_as_the_target_s(depth: int):
    assert _excess("close", depth) < 3.5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["uniform", "contrary", "deterministic"])
def test_a_rule_that_accepts_always_would_fail_the_same_test(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "acceptance_uniform", lambda *_: -1.0)

    assert _excess(name, depth=2) > 6


def test_a_draft_equal_to_the_target_is_always_accepted():
    draft = _softmax(_TARGET)
    for seed in range(50):
        proposal = _proposal(_ROOT, _POSITION, seed, draft, 3)
        logits = mx.array(_TARGET[list(proposal.tokens)])
        walk = rejection(logits, proposal, Sampling(temperature=1.0, seed=seed), _NOISE)()
        assert len(walk.accepted) >= 2, "only rounding may reject"


def test_filtered_tokens_are_never_emitted():
    sampling = [Sampling(temperature=2.0, top_k=2, seed=seed) for seed in range(200)]
    allowed = {row: set(np.argsort(_TARGET[row])[-2:].tolist()) for row in range(_VOCABULARY)}

    for each in sampling:
        path = (_ROOT, *_emitted(each.seed, _uniform(), 2, each))
        assert all(token in allowed[before] for before, token in pairwise(path))


def test_greedy_emits_the_most_likely_tokens_whatever_was_drawn():
    expected = int(_TARGET[_ROOT].argmax())
    for seed in range(30):
        assert _emitted(seed, _contrary(), 2, Sampling(seed=seed)) == (expected, int(_TARGET[expected].argmax()))
