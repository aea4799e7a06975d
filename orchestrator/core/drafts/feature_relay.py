"""The target's features on their way to the drafts that read them: what the target records, and who gets it. Pure.

Features never delay a round and never change one: a draft without them only guesses worse.
"""

from collections.abc import Iterable, Mapping

from orchestrator.core.commands import Command, SendMessage
from orchestrator.core.sequence import Sequence
from orchestrator.core.workers import WorkerRegistry
from protocol.messages.base import SequenceId
from protocol.messages.features import Features, Output, Tap


class FeatureRelay:
    """The target records the outputs that at least one of the drafts reads."""

    def __init__(self, sequences: Mapping[SequenceId, Sequence], workers: WorkerRegistry) -> None:
        self._sequences = sequences
        self._workers = workers
        self._recorded: tuple[Output, ...] = ()
        """What the target that is up was told to record."""

    def target_changed(self) -> None:
        """A target that has just come up records nothing."""
        self._recorded = ()

    def tap(self) -> list[Command]:
        """Tell the target what to record, if that has changed. A target that verifies no guesses records nothing.

        A change ends all rings. So outputs that no draft reads any more are recorded while requests run: the next life
        of a draft that died goes on with what its ring holds.
        """
        target = self._workers.target
        if target is None:
            return []
        wanted = () if target.level == "plain" else self._workers.outputs_read()
        if wanted == self._recorded or (self._sequences and set(wanted) < set(self._recorded)):
            return []
        self._recorded = wanted
        return [SendMessage("target", Tap(wanted))]

    def relay(self, features: Features, readers: Iterable[int]) -> list[Command] | None:
        """Send features on to the drafts `readers`, unchanged; None if they belong to no tokens that are committed."""
        sequence = self._sequences.get(features.sequence)
        if sequence is None or features.round > sequence.round:
            return None
        if features.first + features.rows > sequence.position:
            return None
        return [SendMessage("draft", features, incarnation) for incarnation in readers]
