"""Logits of a call to candidates: without a sort where the sampling allows it, else by the full computation."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.noise_prefetch import NoisePrefetch
from draft_worker.candidates.ranking import FEWEST, propose
from draft_worker.candidates.shortlist import ROWS, shortlist
from draft_worker.engine import Batch
from draft_worker.logits_processors import restrains
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise
from protocol.speculation.candidates import Candidates, Support


class CandidateSelector:
    """For one pair of vocabularies: the target's, and the first `shared` of its tokens, which the draft knows."""

    def __init__(self, vocabulary: int, shared: int) -> None:
        self._vocabulary = vocabulary
        self._shared = shared
        self._width = -(-shared // ROWS) * ROWS

    def begin(self, sampling: Sampling, positions: Iterable[int]) -> None:
        """Candidates for tokens at these absolute positions will be wanted: their noise can be drawn meanwhile."""
        if sampling.temperature > 0 and _is_plain(sampling):
            self._ahead.begin(sampling.seed, positions)

    def choose(
        self, logits: npt.NDArray[np.float32], positions: Sequence[int], sampling: Sampling, batch: Batch
    ) -> list[Candidates]:
        """As `propose` does, for (L, ...) logits padded with -inf to a whole number of ROWS; they may be changed."""
        if not _is_plain(sampling):
            return propose(mx.array(logits[:, : self._shared]), positions, sampling, batch, self._noise)
        logits = logits[:, : self._width]
        logits[:, self._shared :] = -np.inf
        rows = zip(logits, positions, strict=True)
        found = [self._shortlist(row, position, sampling, batch.limit) for row, position in rows]
        if sampling.verification == "rejection":
            return [each._replace(support=Support(each.tokens[:1], (1.0,))) for each in found]
        return found

    def _shortlist(self, row: npt.NDArray[np.float32], position: int, sampling: Sampling, limit: int) -> Candidates:
        noise = self._ahead.position(sampling.seed, position) if sampling.temperature > 0 else None
        return shortlist(row, max(limit, FEWEST), sampling.temperature, noise)

    @cached_property
    def _ahead(self) -> NoisePrefetch:
        return NoisePrefetch(self._vocabulary, self._shared)

    @cached_property
    def _noise(self) -> Noise:
        return Noise(self._vocabulary, self._shared)


def _is_plain(sampling: Sampling) -> bool:
    """Scores are logits over temperature plus noise, and nothing else."""
    if sampling.logit_bias or sampling.repetition_penalty != 1.0 or restrains(sampling):
        return False
    if sampling.temperature == 0:
        return True
    filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return sampling.verification == "coupled" and not filters
