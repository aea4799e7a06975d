"""Rejection sampling gives the target's distribution for every draft distribution; a wrong rule fails the test."""

import math
import random
from collections import Counter
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import target_worker.verification as module
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Verify
from protocol.sampling.gumbel_noise import Noise
from protocol.sampling.threefry import draft_stream, gumbel, noise_bits
from protocol.speculation.token_tree import node_id
from target_worker.verification import ProposedTree, acceptance_uniforms, block, rejection
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


def _drawn(probabilities: np.ndarray, seed: int, position: int, place: int) -> int:
    noise = gumbel(noise_bits(seed, position, np.arange(_VOCABULARY), _VOCABULARY, draft_stream(place)))
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
            tokens.append(_drawn(row, seed, position + 1 + index, index))
        ids.append(node_id(ids[-1], tokens[-1]))
    parents = tuple(range(-1, depth))
    return ProposedTree(Verify(RequestId(0), 0, NodeId(77), position, tuple(tokens), parents, tuple(distributions)))


def _emitted(
    seed: int, draft: np.ndarray | None, depth: int, sampling: Sampling, target: np.ndarray = _TARGET, count: int = 2
) -> tuple[int, ...]:
    """The first tokens behind the root, decoded round by round."""
    tokens = [_ROOT]
    while len(tokens) <= count:
        proposal = _proposal(tokens[-1], _POSITION + len(tokens) - 1, seed, draft, depth)
        logits = processed(mx.array(target[list(proposal.tokens)]), sampling)
        walk = rejection(logits, proposal, sampling, _NOISE)()
        tokens += [*(proposal.tokens[entry] for entry in walk.accepted), walk.bonus]
    return tuple(tokens[1 : count + 1])


def _chi_square_excess(texts: list[tuple[int, ...]], target: np.ndarray) -> float:
    """Chi-square of the texts against the target's, as a standard normal deviate (Wilson and Hilferty 1931)."""
    seen, freedom, statistic = Counter(texts), -1, 0.0
    for text in product(range(_VOCABULARY), repeat=len(texts[0])):
        expected = len(texts) * math.prod(target[before, token] for before, token in pairwise((_ROOT, *text)))
        if expected == 0 and seen[text]:
            return math.inf
        if expected > 0:
            freedom += 1
            statistic += (seen[text] - expected) ** 2 / expected
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def _excess(name: str, depth: int) -> float:
    make = _DRAFTS[name]
    draft = make() if make else None
    texts = [_emitted(seed, draft, depth, Sampling(temperature=1.0, seed=seed)) for seed in range(_DRAWS)]
    return _chi_square_excess(texts, _softmax(_TARGET))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "depth"), [*((name, 2) for name in _DRAFTS), ("close", 0), ("close", 1), ("close", 4)]
)
def test_pairs_of_chains_of_any_length_are_distributed_as_the_target_s(name: str, depth: int):
    assert _excess(name, depth) < 3.5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["uniform", "contrary", "deterministic"])
def test_a_rule_that_accepts_always_would_fail_the_same_test(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "acceptance_uniforms", lambda seed, root, count: np.full(count, -1.0))

    assert _excess(name, depth=2) > 6


def test_no_block_draws_from_the_noise_of_an_earlier_one():
    """How many tokens of a block are accepted depends on all of its noise. With the draft's noise drawn by position
    alone, three tokens of 1 would have a probability of 0.24 here instead of 0.30."""
    target, draft = (np.tile((*pair, 0, 0, 0), (_VOCABULARY, 1)) for pair in ((1 / 3, 2 / 3), (2 / 3, 1 / 3)))
    with np.errstate(divide="ignore"):
        logits = np.log(target).astype(np.float32)
    sampled = [Sampling(temperature=1.0, seed=seed) for seed in range(_DRAWS)]
    texts = [_emitted(each.seed, draft, 3, each, logits, count=3) for each in sampled]

    assert _chi_square_excess(texts, target) < 3.5


def test_no_two_decisions_share_a_number_and_a_repeated_round_decides_alike():
    blocks = [acceptance_uniforms(seed=3, root=root, count=8).tolist() for root in range(40)]

    assert len({number for each in blocks for number in each}) == 40 * 8
    assert acceptance_uniforms(seed=3, root=7, count=5).tolist() == blocks[7][:5]


Row = tuple[float, ...]
"""Probabilities of a small vocabulary."""


def _rows(seed: int, *kinds: Row) -> dict[tuple[int, ...], Row]:
    """For every path of up to four tokens, the distribution behind it: one of `kinds`."""
    source = random.Random(seed)
    tokens = range(len(kinds[0]))
    return {path: source.choice(kinds) for length in range(5) for path in product(tokens, repeat=length)}


_PEAKED, _FLAT, _FALLING = (0.8, 0.15, 0.05), (0.3, 0.4, 0.3), (0.15, 0.25, 0.6)
_NO_FIRST, _NO_LAST, _ONE = (0.0, 0.5, 0.5), (0.7, 0.3, 0.0), (0.0, 1.0, 0.0)
_BLOCKS = {
    "other weights": (_rows(1, _PEAKED, _FLAT, _FALLING), _rows(2, _PEAKED, _FLAT, _FALLING)),
    "equal": (_rows(1, _PEAKED, _FLAT, _ONE), _rows(1, _PEAKED, _FLAT, _ONE)),
    "tokens that the target never has": (_rows(3, _NO_FIRST, _NO_LAST, _ONE), _rows(4, _PEAKED, _FLAT, _FALLING)),
    "tokens that the draft never has": (_rows(5, _PEAKED, _FLAT, _FALLING), _rows(6, _NO_FIRST, _NO_LAST, _ONE)),
    "both, and no token in common": (_rows(7, _NO_FIRST, _NO_LAST, _ONE), _rows(8, (1.0, 0.0, 0.0), _NO_LAST, _ONE)),
}


def _outcomes(target: dict[tuple[int, ...], Row], draft: dict[tuple[int, ...], Row], length: int) -> Counter[Any]:
    """The probability of each text that one round emits: a prefix of a drawn chain, and one token."""
    found: Counter[tuple[int, ...]] = Counter()
    for chain in product(range(3), repeat=length):
        paths = [chain[:place] for place in range(length + 1)]
        drawn = math.prod(draft[path][token] for path, token in zip(paths, chain, strict=False))
        if drawn == 0.0:
            continue
        ours, theirs = (mx.array([each[path] for path in paths]) for each in (target, draft))
        verified = block(ours, theirs, chain)
        chances = [1.0, *np.array(verified.chances).astype(float).tolist()]
        behind = np.array(verified.residual).astype(float)
        for kept in range(length + 1):
            share = drawn * chances[kept] * math.prod(1.0 - chance for chance in chances[kept + 1 :])
            for token, weight in enumerate(behind[kept] / behind[kept].sum()):
                found[(*chain[:kept], token)] += share * weight
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("name", _BLOCKS)
def test_all_noise_of_a_block_together_gives_the_target_s_probability_of_every_text(name: str, length: int):
    target, draft = _BLOCKS[name]

    def likely(text: tuple[int, ...], begin: int = 0) -> float:
        return math.prod(target[text[:place]][text[place]] for place in range(begin, len(text)))

    outcomes = _outcomes(target, draft, length)
    for text in product(range(3), repeat=length + 1):
        prefixes = [text[:end] for end in range(1, length + 2)]
        emitted = sum(outcomes[prefix] * likely(text, len(prefix)) for prefix in prefixes)
        assert emitted == pytest.approx(likely(text), abs=2e-6)


def test_the_published_example_accepts_eleven_ninths_of_a_token_instead_of_ten():
    """Sun et al., section 1: both models draw independent tokens of two, blocks of two."""
    target, draft = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    accepted = 0.0
    for chain in product(range(2), repeat=2):
        first, second = np.array(block(mx.array([target] * 3), mx.array([draft] * 3), chain).chances).tolist()
        accepted += draft[chain[0]] * draft[chain[1]] * (2 * second + first * (1 - second))

    assert accepted == pytest.approx(11 / 9, abs=1e-6)


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
