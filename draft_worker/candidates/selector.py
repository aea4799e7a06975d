"""Candidates from the logits of a call: by the shortlist, or by the full computation if the first one is drawn."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.columns import Columns
from draft_worker.candidates.lookup_mixture import mix
from draft_worker.candidates.noise_prefetch import NoisePrefetch
from draft_worker.candidates.ranking import MIN_CANDIDATES
from draft_worker.candidates.shortlist import GROUP_SIZE, shortlist
from draft_worker.engine import Batch
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates, Support


class CandidateSelector:
    """Selects candidates among these columns, beside their target."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._width = -(-columns.count // GROUP_SIZE) * GROUP_SIZE

    def begin(self, sampling: Sampling, positions: Iterable[int]) -> None:
        """Start to draw the noise that `select` needs for tokens at these absolute positions."""
        if not sampling.greedy and not _draws(sampling):
            self._prefetch.begin(sampling.seed, positions)

    def select(
        self, logits: npt.NDArray[np.float32], positions: Sequence[int], sampling: Sampling, batch: Batch
    ) -> list[Candidates]:
        """Like `Columns.propose`, for (L, ...) logits padded with -inf to whole groups. May overwrite the logits."""
        count = self._columns.count
        if _draws(sampling):
            return self._columns.propose(mx.array(logits[:, :count]), positions, sampling, batch)
        logits = logits[:, : self._width]
        if batch.followers:
            mix(logits, self._columns.followers(batch), sampling.temperature)
        if batch.processors is not None:
            logits[:, :count] = np.asarray(self._columns.processed(mx.array(logits[:, :count]), batch))
        logits[:, count:] = -np.inf
        rows = zip(logits, positions, strict=True)
        found = [self._shortlist(row, position, sampling, batch.limit) for row, position in rows]
        if sampling.verification == "rejection":
            return [each._replace(support=Support(each.tokens[:1], (1.0,))) for each in found]
        return found

    def _shortlist(self, row: npt.NDArray[np.float32], position: int, sampling: Sampling, limit: int) -> Candidates:
        noise = self._prefetch.position(sampling.seed, position) if not sampling.greedy else None
        return self._columns.named(shortlist(row, max(limit, MIN_CANDIDATES), sampling.temperature, noise))

    @cached_property
    def _prefetch(self) -> NoisePrefetch:
        return NoisePrefetch(self._columns.vocabulary, self._columns.shared, self._columns.tokens)


def _draws(sampling: Sampling) -> bool:
    """Whether the first candidate is drawn from the draft's own distribution."""
    return sampling.verification == "rejection" and not sampling.greedy
