"""The random draft: the cost and the probabilities of its model, with random tokens."""

from draft_worker.engine_interface import Batch
from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.random import RandomEngine
from protocol.messages.sampling import Sampling
from tests.support.models.tiny_models import VOCABULARY, tree_model


def _asked(engine: MlxEngine, vocabulary: int = VOCABULARY):
    sequence = engine.open(Sampling(), vocabulary)
    sequence.prefill([1, 2, 3])
    return sequence.evaluate(Batch([], [4, 5], [-1, 0], limit=8))


def test_probabilities_are_those_of_the_model_and_tokens_are_not():
    model = tree_model()
    found, truth = _asked(RandomEngine(model, "tiny")), _asked(MlxEngine(model, "tiny"))

    assert [each.probabilities for each in found] == [each.probabilities for each in truth]
    assert [each.tokens for each in found] != [each.tokens for each in truth]


def test_tokens_are_distinct_and_in_the_target_s_vocabulary():
    for seed in range(5):
        for candidates in _asked(RandomEngine(tree_model(), "tiny", seed=seed), vocabulary=9):
            assert len(set(candidates.tokens)) == 8
            assert all(0 <= token < 9 for token in candidates.tokens)
