"""Where the KV of a start comes from: an arena that holds it, a prefill worker, or the target's own forward. Pure."""

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.kv.arena_index import ArenaIndex
from orchestrator.core.kv.prefill_choice import PrefillChoice
from orchestrator.core.options import Options
from orchestrator.core.sequence import Phase, Sequence
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import KvOffer, KvReference, KvRelease, Prefill, Prefilled, Stop


class PrefillRouter:
    """All KV that can be adopted. It is a shortcut only: whatever is wrong with it costs a prefill, and no token."""

    def __init__(self, options: Options) -> None:
        self.warnings = 0
        """Arenas that a target refused to rely on."""
        self._library = ArenaIndex(options.kv_memory << 20)
        self._choice = PrefillChoice(options.prefill)
        self._present = False
        """A prefill worker is up."""
        self._asked: dict[SequenceId, Sequence] = {}
        """What it was asked to read."""

    def begin(self, sequence: Sequence, now: float) -> Command:
        """Let the target start, or first a prefill worker, if there is one and it pays."""
        reference = self._library.find(sequence.tokens)
        held = 0 if reference is None else reference.tokens
        if self._present and self._choice.pays(sequence.position, held):
            self._asked[sequence.id] = sequence
            sequence.read_elsewhere(now, now + self._choice.patience(sequence.position))
            return SendMessage("prefill", Prefill(sequence.id, tuple(sequence.tokens[:-1])))
        return self._read_here(sequence, now)

    def again(self, sequence: Sequence) -> Command:
        """Ask a target that owes an answer once more."""
        return SendMessage("target", sequence.outstanding or sequence.start(adopt=self._lent(sequence)))

    def offered(self, role: Role, sequence: Sequence | None, offer: KvOffer, now: float) -> list[Command]:
        """Take in an arena; a prefill worker's may be what its sequence waits for."""
        if sequence is None:
            # Its sequence ended while it was on its way. Nobody knows the tokens any more.
            return [] if self._library.holds(offer.name) else _given_up([offer.name])
        awaited = role == "prefill" and self._awaits(sequence.id)
        if awaited:
            del self._asked[sequence.id]
            sequence.prefilled_arena = offer.name
            self._choice.observe_worker(offer.tokens, now - sequence.asked_at)
        commands = _given_up(self._library.offer(offer, sequence.tokens))
        return [*commands, self._read_here(sequence, now)] if awaited else commands

    def prefilled(self, sequence: Sequence, message: Prefilled) -> list[Command]:
        """The target is ready; learn from what it took, and from an arena that it could not use."""
        self._choice.observe_target(message.tokens, message.adopted, message.seconds)
        sequence.tally.adopted += message.adopted
        commands = _given_up(self._library.returned(sequence.id))
        if not message.warning:
            return commands
        self.warnings += 1
        if sequence.adopting is None:
            return commands
        if sequence.adopting.name == sequence.prefilled_arena:
            self._choice.trusted = False
        return [*commands, *_given_up(self._library.drop(sequence.adopting.name))]

    def joined(self) -> None:
        """A prefill worker is up."""
        self._present = self._choice.trusted = True

    def left(self, now: float) -> list[Command]:
        """The prefill worker is gone: the target reads what it was reading."""
        self._present = self._choice.trusted = False
        return [command for id in list(self._asked) for command in self.failed(id, now)]

    def failed(self, id: SequenceId, now: float) -> list[Command]:
        """The prefill worker can't read this one: the target does."""
        awaited = self._awaits(id)
        sequence = self._asked.pop(id, None)
        stop: list[Command] = [SendMessage("prefill", Stop(id))] if self._present else []
        return [*stop, self._read_here(sequence, now)] if sequence is not None and awaited else []

    def deadline(self) -> float | None:
        """When the prefill worker should have answered."""
        return min((self._asked[id].patient_until for id in self._asked if self._awaits(id)), default=None)

    def tick(self, now: float) -> list[Command]:
        """A prefill worker that is late is not asked again."""
        late = [id for id, sequence in self._asked.items() if self._awaits(id) and now >= sequence.patient_until]
        self._choice.trusted = self._choice.trusted and not late
        return [command for id in late for command in self.failed(id, now)]

    def ended(self, sequence: Sequence) -> list[Command]:
        """A sequence is over."""
        self._asked.pop(sequence.id, None)
        return _given_up(self._library.end(sequence.id))

    def _awaits(self, id: SequenceId) -> bool:
        """Whether a sequence still waits for the prefill worker; a target that died ends that too."""
        return id in self._asked and self._asked[id].phase is Phase.ELSEWHERE

    def _read_here(self, sequence: Sequence, now: float) -> Command:
        reference = self._lent(sequence)
        sequence.read_here(now, reference)
        return SendMessage("target", sequence.start(adopt=reference))

    def _lent(self, sequence: Sequence) -> KvReference | None:
        """What the target is to adopt, which nobody gives up before it has."""
        reference = self._library.find(sequence.tokens)
        self._library.lend(sequence.id, reference)
        return reference


def _given_up(names: list[str]) -> list[Command]:
    """The writer lets go first, or the memory would stay until it does."""
    return [command for name in names for command in (SendMessage("target", KvRelease(name)), Release(name))]
