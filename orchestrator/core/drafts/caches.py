"""Where the draft left the KV of live sequences, so that its next life goes on from there. Pure."""

from orchestrator.core.commands import Command, Release
from protocol.messages.base import SequenceId
from protocol.messages.worker import KvOffer, KvReference, Prefilled


class DraftCaches:
    """A draft's arenas are its own while it lives; they serve another sequence when one ends. What it leaves
    behind belongs to the sequences that were live; the rest is given up."""

    def __init__(self) -> None:
        self.warnings = 0
        """Arenas that a draft refused to rely on."""
        self._offered: dict[SequenceId, KvReference] = {}
        """By the present life."""
        self._left: dict[SequenceId, KvReference] = {}
        """By earlier lives."""
        self._names: set[str] = set()
        """All that were offered and not given up."""

    def offered(self, offer: KvOffer, live: bool) -> None:
        """Take in an offer; `live`: its sequence is not over yet."""
        self._names.add(offer.name)
        if live:
            self._offered[offer.sequence] = KvReference(offer.name, offer.tokens)

    def left(self) -> list[Command]:
        """The draft is gone: keep what live sequences can go on from."""
        self._left |= self._offered
        self._offered = {}
        kept = {reference.name for reference in self._left.values()}
        unused = sorted(self._names - kept)
        self._names &= kept
        return [Release(name) for name in unused]

    def find(self, sequence: SequenceId) -> KvReference | None:
        """What an earlier life left of a sequence, for the present one to take over. Its own arenas are in use."""
        reference = self._left.pop(sequence, None)
        if reference is not None:
            self._offered[sequence] = reference
        return reference

    def adopted(self, message: Prefilled) -> None:
        """The draft says what came of it. An arena that it could not use goes when the draft does."""
        if message.warning:
            self.warnings += 1
            self._offered.pop(message.sequence, None)

    def forgotten(self) -> list[Command]:
        """No life will come that could go on from here."""
        self._offered, self._left = {}, {}
        return self.left()

    def ended(self, sequence: SequenceId) -> None:
        self._offered.pop(sequence, None)
        self._left.pop(sequence, None)
