"""Workers on other machines: who was given which stamp, when each was last heard, how far away it is.

Pure: times come in; knows no sockets. A guest is a machine, by its pinned key; it may lend several workers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from protocol.messages.base import Role
from protocol.messages.remote import Attach, WorkerEntry, WorkerStatus
from protocol.messages.worker import Hello, Ping, Pong, Start, ToWorker
from protocol.worker.clock import RecentProbes

_MOST = 15
"""Workers that may be attached at once: of sixteen drafts that the state machine takes, one may be our own."""
_LOADING_SECONDS = 900.0
"""For a model to be loaded; then the stamp is void."""
_SILENCE_SECONDS: Mapping[Role, float] = {"draft": 10.0, "target": 60.0, "prefill": 60.0}
"""Without any sign of a worker. A target's or prefill worker's forward over a long chunk may take a while; that its
machine is gone shows earlier, by messages that can't be delivered."""
_PROBES = 16
"""Sent one after the other to a worker that has just said Hello; later ones come with the usual Pings."""


@dataclass(slots=True)
class RemoteWorker:
    """One worker of a guest in one life."""

    name: str
    identity: bytes
    """The guest's pinned key; messages with this stamp count only from there."""
    control: bytes
    """Where the guest's own command is heard."""
    role: Role
    life: int
    incarnation: int
    heard_at: float
    peer: bytes = b""
    """Where the worker is heard; empty until its Hello."""
    hello: Hello | None = None
    status: WorkerStatus = "loading"
    lost: bool = False
    """A message to it could not be delivered."""
    asked: tuple[float, int] | None = None
    """The Ping that is under way: what it carries, and when it left in nanoseconds."""
    probes: RecentProbes = field(default_factory=RecentProbes)

    @property
    def round_trip(self) -> float | None:
        """Seconds."""
        return None if self.probes.best is None else 2e-9 * self.probes.best.error

    def entry(self) -> WorkerEntry:
        """What the owner is shown."""
        best, hello = self.probes.best, self.hello
        return WorkerEntry(
            name=self.name,
            role=self.role,
            engine=hello.engine if hello else "",
            model=hello.model if hello else "",
            device=hello.device if hello else "",
            status=self.status,
            round_trip=self.round_trip,
            clock_offset=None if best is None else best.ahead * 1e-9,
        )


class RemoteRegistry:
    """All workers of other machines that hold a valid stamp."""

    def __init__(self, incarnations: Callable[[], int], refusals: Mapping[Role, str]) -> None:
        """`incarnations` gives numbers that no worker of this pipeline ever had; `refusals` say why a role is not
        wanted here."""
        self._incarnations = incarnations
        self._refusals = refusals
        self._workers: dict[int, RemoteWorker] = {}

    def __iter__(self) -> Iterator[RemoteWorker]:
        return iter(list(self._workers.values()))

    def attach(self, name: str, identity: bytes, control: bytes, wanted: Attach, now: float) -> RemoteWorker | str:
        """A stamp for one life, the same when it is asked for again; or why there is none."""
        for worker in self._workers.values():
            if (worker.identity, worker.role, worker.life) == (identity, wanted.role, wanted.life):
                worker.control = control
                return worker
        if wanted.role in self._refusals:
            return self._refusals[wanted.role]
        if wanted.role != "draft" and any(worker.role == wanted.role for worker in self._workers.values()):
            what = "target" if wanted.role == "target" else "prefill worker"
            return f"This pipeline has a {what} from another machine already; this one is taken when that one is gone."
        if len(self._workers) >= _MOST:
            return f"This pipeline has {_MOST} workers of other machines already: end one of them first."
        worker = RemoteWorker(name, identity, control, wanted.role, wanted.life, self._incarnations(), now)
        self._workers[worker.incarnation] = worker
        return worker

    def find(self, incarnation: int, identity: bytes) -> RemoteWorker | None:
        """The worker with that stamp, if it was given to this guest."""
        worker = self._workers.get(incarnation)
        return worker if worker is not None and worker.identity == identity else None

    def get(self, incarnation: int) -> RemoteWorker | None:
        return self._workers.get(incarnation)

    def of(self, identity: bytes) -> list[RemoteWorker]:
        """All workers of one guest."""
        return [worker for worker in self._workers.values() if worker.identity == identity]

    def introduce(self, worker: RemoteWorker, peer: bytes, hello: Hello) -> bool:
        """A worker said Hello; False for one that plays another part than it was admitted for."""
        if hello.role != worker.role:
            return False
        worker.peer, worker.hello = peer, hello
        worker.status = "standby" if hello.role == "draft" else "ready"
        return True

    def drop(self, worker: RemoteWorker) -> None:
        """Its stamp is void from here on."""
        self._workers.pop(worker.incarnation, None)

    def ping(self, worker: RemoteWorker, now: int) -> Ping:
        """A sign of life is wanted; `now` in nanoseconds, on the clock that the offset is measured against."""
        worker.asked = now * 1e-9, now
        return Ping(worker.asked[0])

    def pong(self, worker: RemoteWorker, pong: Pong, now: int) -> bool:
        """Take in an answer; whether another probe would tell more. Answers to no question of ours are ignored."""
        if worker.asked is None or pong.sent != worker.asked[0] or not pong.clock:
            return False
        worker.probes.add(worker.asked[1], pong.clock, now)
        worker.asked = None
        return len(worker.probes) < _PROBES

    def gone(self, now: float) -> list[RemoteWorker]:
        """Workers to give up: out of reach, silent for too long, or never done with loading."""
        return [worker for worker in self._workers.values() if worker.lost or now >= _patience(worker)]

    def deadline(self) -> float | None:
        """When the next one has to be given up if nothing is heard of it."""
        if any(worker.lost for worker in self._workers.values()):
            return 0.0
        return min(map(_patience, self._workers.values()), default=None)


def without_shared_memory(message: ToWorker) -> ToWorker:
    """As a worker on another machine should hear it: it can't open an arena of this one."""
    return structs.replace(message, adopt=None) if isinstance(message, Start) and message.adopt else message


def _patience(worker: RemoteWorker) -> float:
    return worker.heard_at + (_LOADING_SECONDS if worker.hello is None else _SILENCE_SECONDS[worker.role])
