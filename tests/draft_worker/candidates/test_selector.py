"""Laws of the selector: the candidates of the full computation, with filters and penalties too, without its cost."""

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.candidates.columns import Columns
from draft_worker.candidates.selector import CandidateSelector
from draft_worker.candidates.shortlist import GROUP_SIZE
from draft_worker.engine import Batch
from draft_worker.head_tokens import HeadTokens
from protocol.messages.sampling import Sampling
from tests.support.logit_rows import rows
from tests.support.processing import processors

_VOCABULARY = 5_000
_PATHS = ((7,), (9, 11))
SAMPLINGS = {
    "top-p": Sampling(temperature=0.8, seed=5, top_p=0.9),
    "every filter": Sampling(temperature=1.3, seed=5, top_k=40, top_p=0.9, min_p=0.01),
    "penalised": Sampling(temperature=0.8, seed=5, top_p=0.95, repetition_penalty=1.3, frequency_penalty=1.5),
    "greedy, penalised": Sampling(repetition_penalty=1.3),
    "greedy rejection": Sampling(repetition_penalty=1.3, verification="rejection"),
    "drawn": Sampling(temperature=0.8, seed=5, top_p=0.9, verification="rejection"),
}


def batch(sampling: Sampling) -> Batch:
    followers = ([(5, 0.5), (8, 0.1), (_VOCABULARY + 1, 0.1)], [])
    wanted = processors(sampling, (3, 7))
    return Batch((), [0, 0], [-1, -1], 6, processors=wanted, paths=_PATHS, followers=followers)


def padded(logits: np.ndarray) -> np.ndarray:
    return np.pad(logits, ((0, 0), (0, -logits.shape[-1] % GROUP_SIZE)), constant_values=-np.inf)


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
        assert (got.support is None) == (want.support is None)
