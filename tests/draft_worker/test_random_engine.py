"""The random draft: the cost and the probabilities of its inner engine, with random tokens."""

from draft_worker.engine import Batch
from draft_worker.engines.random import RandomEngine
from protocol.messages.sampling import Sampling
from tests.support.fake_draft import VOCABULARY, FakeEngine, oracle


def _asked(engine: RandomEngine, vocabulary: int = VOCABULARY):
    sequence = engine.open(Sampling(), vocabulary)
    sequence.prefill([1, 2, 3])
    return sequence.evaluate(Batch([], [4, 5], [-1, 0], limit=8))


def test_probabilities_are_those_of_the_inner_engine():
    found = _asked(RandomEngine(FakeEngine()))

    truth = [oracle([1, 2, 3, 4], 8), oracle([1, 2, 3, 4, 5], 8)]
    assert [candidates.probabilities for candidates in found] == [candidates.probabilities for candidates in truth]
    assert [candidates.tokens for candidates in found] != [candidates.tokens for candidates in truth]


def test_tokens_are_distinct_and_in_the_target_s_vocabulary():
    for seed in range(5):
        for candidates in _asked(RandomEngine(FakeEngine(), seed), vocabulary=9):
            assert len(set(candidates.tokens)) == 8
            assert all(0 <= token < 9 for token in candidates.tokens)


def test_every_forward_and_every_row_is_the_inner_engine_s():
    inner = FakeEngine()
    sequence = RandomEngine(inner).open(Sampling(), VOCABULARY)

    sequence.prefill([1, 2, 3])
    sequence.evaluate(Batch([], [4, 5], [-1, 0], limit=2))
    sequence.keep([0], [1])

    assert inner.opened[0].forwards == [-3, 2]
    assert (sequence.committed, sequence.next_row) == (4, 2)
