"""What outlives a draft's process: what was measured of the draft, and the arenas that it left. Pure."""

from orchestrator.core.commands import Command, Release
from orchestrator.core.events import Request
from orchestrator.core.policy.estimates import Estimates
from protocol.messages.base import SequenceId
from protocol.messages.worker import Hello, KvOffer, KvReference, Prefilled

_MAX_ABSENT = 16


class DraftHistory:
    """The measurements and arenas of one draft. Greedy and sampled requests are measured apart."""

    def __init__(self, base: "DraftHistory | None" = None) -> None:
        """`base`: the history whose measurements of the target are shared."""
        self.arenas = DraftArenas()
        kinds = {"greedy": Estimates(), "sampled": Estimates()} if base is None else base._kinds
        self._kinds = {kind: known.with_another_draft() for kind, known in kinds.items()}

    def estimates(self, request: Request) -> Estimates:
        return self._kinds["greedy" if request.sampling.temperature == 0 else "sampled"]


class DraftHistories:
    """A draft that comes back goes on with its history: same engine, same model, device of the same name.

    Two such drafts that are up at the same time share nothing.
    """

    def __init__(self) -> None:
        self.without_draft = DraftHistory()
        self._absent: dict[tuple[str, str, str], DraftHistory] = {}
        """Least recently seen first."""
        self._present: list[DraftHistory] = []

    @property
    def warnings(self) -> int:
        """Arenas that drafts, present or absent, refused to rely on."""
        return sum(history.arenas.warnings for history in (*self._present, *self._absent.values()))

    def take(self, hello: Hello) -> DraftHistory:
        """The history of a draft that came up."""
        history = self._absent.pop(_identity(hello), None) or DraftHistory(self.without_draft)
        self._present.append(history)
        return history

    def give_back(self, hello: Hello, history: DraftHistory) -> list[Command]:
        """The draft is gone."""
        self._present.remove(history)
        commands = history.arenas.draft_gone()
        evicted = self._absent.pop(_identity(hello), None)
        self._absent[_identity(hello)] = history
        if evicted is None and len(self._absent) > _MAX_ABSENT:
            evicted = self._absent.pop(next(iter(self._absent)))
        return commands if evicted is None else [*commands, *evicted.arenas.clear()]

    def sequence_ended(self, sequence: SequenceId) -> None:
        for history in (*self._present, *self._absent.values()):
            history.arenas.sequence_ended(sequence)


class DraftArenas:
    """Where a draft left the KV of live sequences, so that its next life goes on from there.

    A draft's arenas are its own while it lives; they serve another sequence when one ends. Those of live sequences
    outlive it; the others are unlinked with it.
    """

    def __init__(self) -> None:
        self.warnings = 0
        """Arenas that the draft refused to rely on."""
        self._offered: dict[SequenceId, KvReference] = {}
        """Offered by the present life."""
        self._left: dict[SequenceId, KvReference] = {}
        """Left by earlier lives."""
        self._names: set[str] = set()
        """All that were offered and not unlinked."""

    def offered(self, offer: KvOffer, live: bool) -> None:
        """Take in an offer; `live`: its sequence has not ended yet."""
        self._names.add(offer.name)
        if live:
            self._offered[offer.sequence] = KvReference(offer.name, offer.tokens)

    def draft_gone(self) -> list[Command]:
        """Keep what live sequences can go on from."""
        self._left |= self._offered
        self._offered = {}
        kept = {reference.name for reference in self._left.values()}
        unused = sorted(self._names - kept)
        self._names &= kept
        return [Release(name) for name in unused]

    def take(self, sequence: SequenceId) -> KvReference | None:
        """What an earlier life left of a sequence, for the present one to adopt."""
        reference = self._left.pop(sequence, None)
        if reference is not None:
            self._offered[sequence] = reference
        return reference

    def adopted(self, message: Prefilled) -> None:
        """The draft tells what came of an adoption. An arena that it could not use is unlinked when the draft goes."""
        if message.warning:
            self.warnings += 1
            self._offered.pop(message.sequence, None)

    def clear(self) -> list[Command]:
        """No further life can go on from here."""
        self._offered, self._left = {}, {}
        return self.draft_gone()

    def sequence_ended(self, sequence: SequenceId) -> None:
        self._offered.pop(sequence, None)
        self._left.pop(sequence, None)


def _identity(hello: Hello) -> tuple[str, str, str]:
    return hello.engine, hello.model, hello.device
