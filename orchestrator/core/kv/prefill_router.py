"""Where the KV of a prompt comes from: an arena that holds it, a prefill worker, or the target's own prefill. Pure."""

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.kv.arena_index import ArenaIndex
from orchestrator.core.options import Options, PrefillMode
from orchestrator.core.phases import Phase
from orchestrator.core.policy.estimates import Mean
from orchestrator.core.sequence import Sequence
from protocol.kv.prefix_index import MIN_SHARED_TOKENS
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import KvOffer, KvReference, KvRelease, Prefill, Prefilled, Stop

_TRIALS = 2
"""Prompts that a prefill worker gets before its speed is judged."""
_UNKNOWN_TIMEOUT = 30.0
_MIN_TIMEOUT = 1.0


class PrefillRouter:
    """All KV that a target can adopt. A shortcut only: whatever is wrong with it costs a prefill, and no token."""

    def __init__(self, options: Options) -> None:
        self.warnings = 0
        """Arenas that a target refused to rely on."""
        self._arenas = ArenaIndex(options.arena_memory << 20)
        self._costs = PrefillCosts(options.prefill)
        self._worker_up = False
        self._delegated: dict[SequenceId, Sequence] = {}
        """Sequences whose prompt a prefill worker was sent."""

    def begin(self, sequence: Sequence, now: float) -> Command:
        """Start the target, or send the prompt to the prefill worker first, if there is one and it pays."""
        reference = self._arenas.find(sequence.tokens)
        held = 0 if reference is None else reference.tokens
        if self._worker_up and self._costs.worker_pays(sequence.position, held):
            self._delegated[sequence.id] = sequence
            sequence.delegate_prefill(now, now + self._costs.timeout(sequence.position))
            return SendMessage("prefill", Prefill(sequence.id, tuple(sequence.tokens[:-1])))
        return self._start(sequence, now)

    def resend(self, sequence: Sequence) -> Command:
        """Send a target that owes an answer the same message again."""
        return SendMessage("target", sequence.outstanding or sequence.start_message(adopt=self._lent(sequence)))

    def offered(self, role: Role, sequence: Sequence | None, offer: KvOffer, now: float) -> list[Command]:
        """Take in an arena; a prefill worker's may be the one that its sequence waits for."""
        if sequence is None:
            # Its sequence ended while the offer was on its way, so the tokens are not known any more.
            return [] if offer.name in self._arenas else _give_up([offer.name])
        awaited = role == "prefill" and self._awaits(sequence.id)
        if awaited:
            del self._delegated[sequence.id]
            sequence.prefilled_arena = offer.name
            self._costs.observe_worker(offer.tokens, now - sequence.sent_at)
        commands = _give_up(self._arenas.offer(offer, sequence.tokens))
        return [*commands, self._start(sequence, now)] if awaited else commands

    def prefilled(self, sequence: Sequence, message: Prefilled) -> list[Command]:
        """The target is ready: learn from its time, and from an arena that it could not use."""
        self._costs.observe_target(message.tokens, message.adopted, message.seconds)
        sequence.stats.adopted += message.adopted
        commands = _give_up(self._arenas.returned(sequence.id))
        if not message.warning:
            return commands
        self.warnings += 1
        if sequence.adopting is None:
            return commands
        if sequence.adopting.name == sequence.prefilled_arena:
            self._costs.trusted = False
        return [*commands, *_give_up(self._arenas.drop(sequence.adopting.name))]

    def worker_up(self) -> None:
        self._worker_up = self._costs.trusted = True

    def worker_down(self, now: float) -> list[Command]:
        """The prefill worker is gone: the target prefills what it was sent."""
        self._worker_up = self._costs.trusted = False
        return [command for id in list(self._delegated) for command in self.worker_failed(id, now)]

    def worker_failed(self, id: SequenceId, now: float) -> list[Command]:
        """The prefill worker can't serve this sequence: the target prefills it."""
        awaited = self._awaits(id)
        sequence = self._delegated.pop(id, None)
        stop: list[Command] = [SendMessage("prefill", Stop(id))] if self._worker_up else []
        return [*stop, self._start(sequence, now)] if sequence is not None and awaited else []

    def deadline(self) -> float | None:
        """When the prefill worker should have answered."""
        return min((self._delegated[id].prefill_deadline for id in self._delegated if self._awaits(id)), default=None)

    def tick(self, now: float) -> list[Command]:
        """A prefill worker that is late gets no further prompt."""
        late = [id for id, sequence in self._delegated.items() if self._awaits(id) and now >= sequence.prefill_deadline]
        self._costs.trusted = self._costs.trusted and not late
        return [command for id in late for command in self.worker_failed(id, now)]

    def sequence_ended(self, sequence: Sequence) -> list[Command]:
        self._delegated.pop(sequence.id, None)
        return _give_up(self._arenas.sequence_ended(sequence.id))

    def _awaits(self, id: SequenceId) -> bool:
        """Whether a sequence still waits for the prefill worker; the loss of the target ends that too."""
        return id in self._delegated and self._delegated[id].phase is Phase.DELEGATED

    def _start(self, sequence: Sequence, now: float) -> Command:
        reference = self._lent(sequence)
        sequence.start_on_target(now, reference)
        return SendMessage("target", sequence.start_message(adopt=reference))

    def _lent(self, sequence: Sequence) -> KvReference | None:
        """The arena that the target is to adopt; it stays until the target has answered."""
        reference = self._arenas.find(sequence.tokens)
        self._arenas.lend(sequence.id, reference)
        return reference


class PrefillCosts:
    """Whether a prefill worker pays: seconds a token, as running means over prompts that are long enough to tell."""

    def __init__(self, mode: PrefillMode) -> None:
        self._mode = mode
        self._target = Mean()
        self._worker = Mean()
        self._adoption = Mean()
        self.trusted = True
        """The present prefill worker has not failed yet."""

    def observe_target(self, evaluated: int, adopted: int, seconds: float) -> None:
        """A target was ready after evaluating or adopting so many tokens."""
        if evaluated >= MIN_SHARED_TOKENS and not adopted:
            self._target.observe(seconds / evaluated)
        elif adopted >= MIN_SHARED_TOKENS and not evaluated:
            self._adoption.observe(seconds / adopted)

    def observe_worker(self, tokens: int, seconds: float) -> None:
        """The prefill worker's offer came so many seconds after the prompt was sent."""
        if tokens >= MIN_SHARED_TOKENS:
            self._worker.observe(seconds / tokens)

    def worker_pays(self, tokens: int, held: int) -> bool:
        """Whether to send the prefill worker `tokens` tokens, of which an arena holds the first `held`.

        The worker begins at the first token, and the target has to adopt what it offers; the target alone would begin
        behind `held`. Until the target was measured it prefills prompts itself.
        """
        rest = tokens - held
        if not self.trusted or rest < MIN_SHARED_TOKENS or (self._mode == "auto" and not self._target.count):
            return False
        if self._mode == "always" or self._worker.count < _TRIALS:
            return True
        by_worker = (self._worker.get(0.0) + self._adoption.get(0.0)) * tokens
        return by_worker < self._target.get(0.0) * rest + self._adoption.get(0.0) * held

    def timeout(self, tokens: int) -> float:
        """Seconds after which the target prefills the prompt itself: twice what either was measured to need, at least
        one second."""
        known = [mean.get(0.0) for mean in (self._target, self._worker) if mean.count]
        return max(_MIN_TIMEOUT, 2 * max(known) * tokens) if known else _UNKNOWN_TIMEOUT


def _give_up(names: list[str]) -> list[Command]:
    """The target lets go of an arena before it is unlinked; otherwise the memory would stay until the target ends."""
    return [command for name in names for command in (SendMessage("target", KvRelease(name)), Release(name))]
