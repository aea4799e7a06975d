"""One sequence at a draft that reads the target's features. Pure.

The engine is given all committed tokens at once, and computes their KV as their features arrive.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from draft_worker.engine import EngineSequence
from draft_worker.feature_feed import FeatureFeed
from draft_worker.sequence import DraftSequence
from protocol.messages.features import Features, FeatureShipment
from protocol.messages.worker import Grow, Reroot, Start
from protocol.speculation.calibration import Calibration
from protocol.speculation.rolling_context import RollingContext

if TYPE_CHECKING:
    from protocol.sampling.processors.logits_processors import LogitsProcessors


class ConditionedSequence(DraftSequence):
    """Its first growth step below a root waits for features, as long as `FeatureFeed` says."""

    def __init__(
        self,
        start: Start,
        engine: EngineSequence,
        rolling: RollingContext,
        calibration: Calibration,
        held: int,
        processors: "LogitsProcessors | None",
        feed: FeatureFeed,
    ) -> None:
        self._feed = feed
        super().__init__(start, engine, rolling, calibration, held, processors)

    def restart(self, start: Start, processors: "LogitsProcessors | None" = None) -> None:
        self._feed.started(prompt=start.round == 0)
        super().restart(start, processors)

    @property
    def has_work(self) -> bool:
        evaluated = self._growth.tree.root.id in self._growth.candidates
        return self.engine.unread or (super().has_work and (evaluated or not self._feed.waiting))

    def reroot(self, message: Reroot) -> Iterator[Grow]:
        self._feed.rerooted()
        yield from super().reroot(message)

    def hear_features(self, message: Features | FeatureShipment) -> None:
        """A ring holds features of this sequence, or they came from another machine."""
        if isinstance(message, Features):
            self._feed.announce(message)
        else:
            self._feed.receive(message)
        self._tokens_changed()

    @property
    def prefilling(self) -> bool:
        """Whether so many features were fed that they are read in forwards of their own before the tree can grow."""
        return self.engine.unread

    def prefill(self, chunk: int) -> None:
        """One forward over at most `chunk` tokens whose features were fed."""
        if self.engine.unread:
            self.engine.read(chunk)
            self._tokens_changed()

    @property
    def prefilled(self) -> int:
        """Number of the first tokens of `prefix` that have KV, or features to compute it from."""
        return super().prefilled - self.engine.staleness

    @property
    def can_take_over(self) -> bool:
        """No node was evaluated: another sequence's KV may replace this one's."""
        return not self._rows

    def close(self) -> None:
        self._feed.close()

    def _tokens_changed(self) -> None:
        """Give the engine all committed tokens, and the features that are there."""
        if self._backlog:
            self.engine.prefill(self._backlog)
            self._held += self._backlog
            self._backlog = []
        self._feed.feed(self.engine, len(self._tokens))
