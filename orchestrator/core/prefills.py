"""Where the KV of a prompt comes from: an arena, a prefill worker, or the target's own prefill. Pure.

A shortcut only: any failure here costs a prefill, and no token. Opens no shared memory.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.estimates import Mean
from orchestrator.core.options import Options, PrefillMode
from orchestrator.core.phases import Phase
from orchestrator.core.request import Request
from orchestrator.core.tuning import TUNING
from protocol.kv.prefix_index import MIN_SHARED_TOKENS, PrefixIndex
from protocol.messages.base import RequestId, Role
from protocol.messages.kv import KvOffer, KvReference, KvRelease
from protocol.messages.worker import Prefill, Prefilled, Stop

_REMEMBERED_NAMES = 1024
"""Names of unlinked arenas that are remembered, since an offer of one of them may still be on its way."""


class _Delegated(NamedTuple):
    """A request whose prompt a prefill worker was sent, and when the worker should be done."""

    request: Request
    deadline: float


class PrefillRouter:
    """Finds KV that the target can adopt. A shortcut only: any failure here costs a prefill, and no token."""

    def __init__(self, options: Options) -> None:
        self.warnings = 0
        """Arenas that a target could not adopt, or did not survive adopting twice, and prompts that a prefill worker
        gave up."""
        self._arenas = ArenaIndex(options.arenas << 20)
        self._suspected: set[str] = set()
        """Arenas whose adoption a target did not survive."""
        self._costs = PrefillCosts(options.prefill)
        self._worker_up = False
        self._delegated: dict[RequestId, _Delegated] = {}
        self._prefilled: dict[RequestId, str] = {}
        """Name of the arena that a prefill worker last offered for a request."""

    def begin(self, request: Request, now: float) -> Command:
        """Start the request on the target, or first delegate its prompt to the prefill worker if that is faster."""
        if request.prompt_logprobs_left:
            # The target evaluates the whole prompt anyway.
            return self._start(request, now)
        reference = self._arenas.find(request.tokens)
        adoptable = 0 if reference is None else reference.tokens
        if self._worker_up and self._costs.worker_pays(request.position, adoptable):
            self._delegated[request.id] = _Delegated(request, now + self._costs.timeout(request.position))
            request.delegate_prefill(now)
            return SendMessage("prefill", Prefill(request.id, tuple(request.tokens[:-1])))
        return self._start(request, now)

    def resend(self, request: Request) -> Command:
        """Send the target again the message that it has not answered."""
        return SendMessage("target", request.outstanding or request.start_message(adopt=self._adoptable(request)))

    def add_arena(self, role: Role, request: Request | None, offer: KvOffer, now: float) -> list[Command]:
        """Add an offered arena. If a prefill worker offers the KV that the request waits for, start the request."""
        if request is None:
            # The target saves the rest of a request's KV after its end. An offer may also have been on its way.
            if role != "target" or not offer.ended:
                return [] if offer.name in self._arenas else _release([offer.name])
            released = self._arenas.offer(offer, offer.ended)
            return _release([*released, *self._arenas.request_ended(offer.request)])
        awaited = role == "prefill" and self._awaits(request.id)
        if awaited:
            del self._delegated[request.id]
            self._prefilled[request.id] = offer.name
            self._costs.observe_worker(offer.tokens, now - request.sent_at)
        commands = _release(self._arenas.offer(offer, request.tokens))
        return [*commands, self._start(request, now)] if awaited else commands

    def prefilled(self, request: Request, message: Prefilled) -> list[Command]:
        """The target is ready: note its time, and the arena that it could not adopt, if there is one."""
        self._costs.observe_target(message.tokens, message.adopted, message.seconds)
        adopted = self._arenas.pinned.get(request.id)
        commands = _release(self._arenas.unpin(request.id))
        if adopted is not None:
            self._suspected.discard(adopted)
        if not message.warning:
            return commands
        self.warnings += 1
        if adopted is None:
            return commands
        if adopted == self._prefilled.get(request.id):
            self._costs.worker_usable = False
        return [*commands, *_release(self._arenas.drop(adopted))]

    def adopting(self, id: RequestId) -> bool:
        """Whether the target was told to adopt an arena for this request and has not answered."""
        return id in self._arenas.pinned

    def target_down(self) -> list[Command]:
        """The target is gone. An arena that two targets did not survive adopting is released and adopted by no third
        one."""
        adopting = set(self._arenas.pinned.values())
        names = sorted(adopting & self._suspected)
        self._suspected = (self._suspected | adopting) - set(names)
        self.warnings += len(names)
        return [Release(released) for name in names for released in self._arenas.drop(name)]

    def worker_up(self) -> None:
        self._worker_up = self._costs.worker_usable = True

    def worker_down(self, now: float) -> list[Command]:
        """The prefill worker is gone: the target prefills the delegated prompts."""
        self._worker_up = self._costs.worker_usable = False
        return [command for id in list(self._delegated) for command in self.worker_failed(id, now)]

    def worker_refused(self, id: RequestId, now: float) -> list[Command]:
        """The prefill worker gives this request up, for instance because its memory does not suffice."""
        self.warnings += id in self._delegated
        return self.worker_failed(id, now)

    def worker_failed(self, id: RequestId, now: float) -> list[Command]:
        """The prefill worker can't serve this request: the target prefills the prompt."""
        awaited = self._awaits(id)
        delegated = self._delegated.pop(id, None)
        stop: list[Command] = [SendMessage("prefill", Stop(id))] if self._worker_up else []
        return [*stop, self._start(delegated.request, now)] if delegated is not None and awaited else []

    def deadline(self) -> float | None:
        """When the first answer of the prefill worker is overdue."""
        awaited = [self._delegated[id] for id in self._delegated if self._awaits(id)]
        return min((delegated.deadline for delegated in awaited), default=None)

    def tick(self, now: float) -> list[Command]:
        """Let the target prefill overdue prompts; an overdue prefill worker gets no further prompt."""
        overdue = [id for id, sent in self._delegated.items() if self._awaits(id) and now >= sent.deadline]
        self._costs.worker_usable = self._costs.worker_usable and not overdue
        return [command for id in overdue for command in self.worker_failed(id, now)]

    def request_ended(self, request: Request) -> list[Command]:
        self._delegated.pop(request.id, None)
        self._prefilled.pop(request.id, None)
        return _release(self._arenas.request_ended(request.id))

    def _awaits(self, id: RequestId) -> bool:
        """Whether a request still waits for the prefill worker. It does not after the loss of the target."""
        return id in self._delegated and self._delegated[id].request.phase is Phase.DELEGATED

    def _start(self, request: Request, now: float) -> Command:
        reference = self._adoptable(request)
        request.start_on_target(now)
        return SendMessage("target", request.start_message(adopt=reference))

    def _adoptable(self, request: Request) -> KvReference | None:
        """The arena that the target is to adopt, pinned until the target has answered."""
        reference = None if request.prompt_logprobs_left else self._arenas.find(request.tokens)
        self._arenas.pinned.pop(request.id, None)
        if reference is not None:
            self._arenas.pinned[request.id] = reference.name
        return reference


class PrefillCosts:
    """Whether a prefill worker pays: running means of seconds per token, over prompts long enough to measure."""

    def __init__(self, mode: PrefillMode) -> None:
        self._mode = mode
        self._target = Mean()
        self._worker = Mean()
        self._adoption = Mean()
        self.worker_usable = True
        """The prefill worker is up and has not failed."""

    def observe_target(self, evaluated: int, adopted: int, seconds: float) -> None:
        """The target was ready after evaluating and adopting so many tokens."""
        if evaluated >= MIN_SHARED_TOKENS and not adopted:
            self._target.observe(seconds / evaluated)
        elif adopted >= MIN_SHARED_TOKENS and not evaluated:
            self._adoption.observe(seconds / adopted)

    def observe_worker(self, tokens: int, seconds: float) -> None:
        """The prefill worker's offer arrived so many seconds after the prompt was sent."""
        if tokens >= MIN_SHARED_TOKENS:
            self._worker.observe(seconds / tokens)

    def worker_pays(self, tokens: int, adoptable: int) -> bool:
        """Whether to send the prefill worker `tokens` tokens, of which an arena holds the first `adoptable`.

        The worker begins at the first token, and the target has to adopt the offered arena. The target alone adopts
        `adoptable` tokens and evaluates the others. Until the target was measured it prefills prompts itself.
        """
        rest = tokens - adoptable
        if not self.worker_usable or rest < MIN_SHARED_TOKENS or (self._mode == "auto" and not self._target.count):
            return False
        if self._mode == "always" or self._worker.count < TUNING.prefill_trials:
            return True
        by_worker = (self._worker.get(0.0) + self._adoption.get(0.0)) * tokens
        return by_worker < self._target.get(0.0) * rest + self._adoption.get(0.0) * adoptable

    def timeout(self, tokens: int) -> float:
        """Seconds after which the target prefills the prompt: twice the slower one's time, at least one second."""
        measured = [mean.get(0.0) for mean in (self._target, self._worker) if mean.count]
        return max(TUNING.least_prefill_wait, 2 * max(measured) * tokens) if measured else TUNING.unknown_prefill_wait


def _release(names: list[str]) -> list[Command]:
    """Unlink arenas. The target closes them first; otherwise their memory would stay in use until the target ends."""
    return [command for name in names for command in (SendMessage("target", KvRelease(name)), Release(name))]


@dataclass(slots=True)
class _Arena:
    """An offered arena, which holds the KV of the first `count` tokens of its request."""

    name: str
    count: int
    size: int
    writer: RequestId | None
    """The live request whose KV it holds; None once that request has ended."""
    last_use: int = 0
    """The index's count of uses when this arena was last offered or found."""


class ArenaIndex:
    """Which arena holds the KV of which tokens: names in, and the names to unlink out.

    At most `limit` bytes of arenas; those that are being adopted are never evicted.

    An arena is evicted as soon as another one holds all of its tokens, unless a live request writes it: of a
    conversation, the last turn's arena stays. Beyond the limit the least recently used arenas are evicted. A name that
    was returned for unlinking is never referred to again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arenas: dict[str, _Arena] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._uses = 0
        self._removed_names: OrderedDict[str, None] = OrderedDict()
        self.pinned: dict[RequestId, str] = {}
        """By starting request: the arena that its Start names; kept until the target has answered."""

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self._arenas.values())

    @property
    def indexed(self) -> int:
        """Tokens that the index stores."""
        return self._index.stored

    def offer(self, offer: KvOffer, tokens: Items[int]) -> list[str]:
        """Add an arena of a live request, whose committed tokens are `tokens`. Returns names to unlink.

        A request has one arena, the one that holds more tokens. A request that begins with all tokens of an ended
        request's arena takes that arena over: the target continues an earlier turn of the conversation.
        """
        if offer.name in self._removed_names:
            return [offer.name]
        earlier = self._arenas.get(offer.name)
        if earlier is not None and not self._continues(earlier, tokens, offer.request):
            return []
        count = min(offer.tokens, len(tokens))
        others = [arena for arena in self._of(offer.request) if arena.name != offer.name]
        if any(other.count >= count for other in others):
            return self._remove(offer.name)
        self._store(offer, tokens, max(count, earlier.count if earlier else 0))
        return [*(name for other in others for name in self._remove(other.name)), *self._evict()]

    def find(self, tokens: Items[int]) -> KvReference | None:
        """The arena that shares the longest prefix with `tokens`, if it is worth adopting.

        Of several, the most recently used one, so that the others can be evicted. The last token is never part of the
        prefix: a Start evaluates its root itself.
        """
        shared = self._index.longest(tokens[:-1])
        if shared.tokens < MIN_SHARED_TOKENS:
            return None
        best = max(shared.names, key=lambda name: self._arenas[name].last_use)
        self._touch(best)
        return KvReference(best, shared.tokens)

    def unpin(self, request: RequestId) -> list[str]:
        """The target has answered the Start of this request. Returns names to unlink."""
        self.pinned.pop(request, None)
        return self._evict()

    def request_ended(self, request: RequestId) -> list[str]:
        """Other requests may take over the request's arena. Returns names to unlink."""
        for arena in self._of(request):
            arena.writer = None
        return self.unpin(request)

    def __contains__(self, name: str) -> bool:
        return name in self._arenas

    def drop(self, name: str) -> list[str]:
        """Remove an arena that the target could not adopt. Returns names to unlink."""
        return self._remove(name) if name in self._arenas else []

    def _continues(self, arena: _Arena, tokens: Items[int], writer: RequestId) -> bool:
        """Whether a request may continue an arena; never one that another live request writes."""
        if arena.writer is not None:
            return arena.writer == writer
        return self._index.begins(arena.name, tokens)

    def _store(self, offer: KvOffer, tokens: Items[int], count: int) -> None:
        earlier = self._arenas.get(offer.name)
        self._index.extend(offer.name, tokens[earlier.count if earlier else 0 : count])
        self._arenas[offer.name] = _Arena(offer.name, count, offer.size, offer.request)
        self._touch(offer.name)

    def _of(self, request: RequestId) -> list[_Arena]:
        return [arena for arena in self._arenas.values() if arena.writer == request]

    def _touch(self, name: str) -> None:
        self._uses += 1
        self._arenas[name].last_use = self._uses

    def _evict(self) -> list[str]:
        """Evict arenas whose tokens another arena holds, and beyond the limit the least recently used ones."""
        removed: list[str] = []
        pinned = set(self.pinned.values())
        by_age = sorted(
            (arena for arena in self._arenas.values() if arena.name not in pinned), key=lambda arena: arena.last_use
        )
        for arena in by_age:
            if arena.writer is None and self._index.covered(arena.name):
                removed += self._remove(arena.name)
        excess = self.size - self._limit
        for arena in by_age:
            if excess > 0 and arena.name in self._arenas:
                excess -= arena.size
                removed += self._remove(arena.name)
        return removed

    def _remove(self, name: str) -> list[str]:
        if self._arenas.pop(name, None) is not None:
            self._index.remove(name)
        self._removed_names[name] = None
        if len(self._removed_names) > _REMEMBERED_NAMES:
            self._removed_names.popitem(last=False)
        return [name]
