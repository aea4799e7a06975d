"""Candidates from the logits of a call: by the shortlist for plain sampling, else by the full computation."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.noise_prefetch import NoisePrefetch
from draft_worker.candidates.ranking import MIN_CANDIDATES, propose
from draft_worker.candidates.shortlist import GROUP_SIZE, shortlist
from draft_worker.engine import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise
from protocol.speculation.candidates import Candidates, Support


class CandidateSelector:
    """Selects candidates for a target of `vocabulary` tokens, of which the draft knows the first `shared`."""

    def __init__(self, vocabulary: int, shared: int) -> None:
        self._vocabulary = vocabulary
        self._shared = shared
        self._width = -(-shared // GROUP_SIZE) * GROUP_SIZE

    def begin(self, sampling: Sampling, positions: Iterable[int], batch: Batch) -> None:
        """Start to draw the noise that `select` needs for tokens at these absolute positions."""
        if not sampling.greedy and _is_plain(sampling, batch):
            self._prefetch.begin(sampling.seed, positions)

    def select(
        self, logits: npt.NDArray[np.float32], positions: Sequence[int], sampling: Sampling, batch: Batch
    ) -> list[Candidates]:
        """Like `propose`, for (L, ...) logits padded with -inf to whole groups. May overwrite the logits."""
        if not _is_plain(sampling, batch):
            return propose(mx.array(logits[:, : self._shared]), positions, sampling, batch, self._noise)
        logits = logits[:, : self._width]
        logits[:, self._shared :] = -np.inf
        rows = zip(logits, positions, strict=True)
        found = [self._shortlist(row, position, sampling, batch.limit) for row, position in rows]
        if sampling.verification == "rejection":
            return [each._replace(support=Support(each.tokens[:1], (1.0,))) for each in found]
        return found

    def _shortlist(self, row: npt.NDArray[np.float32], position: int, sampling: Sampling, limit: int) -> Candidates:
        noise = self._prefetch.position(sampling.seed, position) if not sampling.greedy else None
        return shortlist(row, max(limit, MIN_CANDIDATES), sampling.temperature, noise)

    @cached_property
    def _prefetch(self) -> NoisePrefetch:
        return NoisePrefetch(self._vocabulary, self._shared)

    @cached_property
    def _noise(self) -> Noise:
        return Noise(self._vocabulary, self._shared)


def _is_plain(sampling: Sampling, batch: Batch) -> bool:
    """Whether scores are logits over temperature plus noise, and nothing else."""
    return batch.processors is None and (sampling.greedy or sampling.verification == "coupled")
