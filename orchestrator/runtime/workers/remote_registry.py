"""Remote workers: the stamp of each, when its last message arrived, its round trip.

Pure: times are arguments; knows no sockets. A machine is identified by its pinned key; it may lend several workers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from protocol.messages.base import Role
from protocol.messages.remote import Attach, WorkerEntry, WorkerStatus
from protocol.messages.worker import Hello, Ping, Pong

_MAX_WORKERS = 15
"""Remote workers at once: the state machine accepts sixteen drafts, and one may be local."""
_MOST_OF_ONE = 4
"""Workers of one machine at once, so that one machine does not keep the others out."""
_LOADING_SECONDS = 900.0
"""Time to load a model, after which the stamp is void."""
_ATTACHED_SECONDS = 30.0
"""Without a sign that a worker still loads: its machine answers each status of a worker that loads with its Attach."""
_SILENCE_SECONDS: Mapping[Role, float] = {"draft": 10.0, "target": 60.0, "prefill": 60.0}
"""Time without a message after which a worker is given up. A target's or prefill worker's forward over a long chunk
takes long; if its machine is gone, undeliverable messages show it earlier."""
_PROBES = 16
"""Round trips measured one after the other behind the Hello; later ones come with the regular Pings."""


@dataclass(slots=True)
class RemoteWorker:
    """One life of a remote worker."""

    name: str
    identity: bytes
    """The machine's pinned key; messages with this stamp are accepted only from this key."""
    control: bytes
    """Peer of the command that attached the worker."""
    role: Role
    life: int
    incarnation: int
    attached_at: float
    heard_at: float
    peer: bytes = b""
    """Peer of the worker; empty until its Hello."""
    hello: Hello | None = None
    status: WorkerStatus = "loading"
    lost: bool = False
    """A message to it could not be delivered."""
    pending_ping: float | None = None
    """When the unanswered Ping was sent."""
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=_PROBES))
    """Seconds, the last ones: of them the shortest counts, since one to a busy worker takes long."""

    @property
    def round_trip(self) -> float | None:
        """Seconds."""
        return min(self.round_trips, default=None)

    def entry(self) -> WorkerEntry:
        """The worker in the owner's list."""
        hello = self.hello
        return WorkerEntry(
            name=self.name,
            role=self.role,
            engine=hello.engine if hello else "",
            model=hello.model if hello else "",
            device=hello.device if hello else "",
            status=self.status,
            round_trip=self.round_trip,
        )


class RemoteRegistry:
    """All remote workers with a valid stamp."""

    def __init__(self, incarnations: Callable[[], int], refusals: Mapping[Role, str]) -> None:
        """`incarnations` returns a number that no worker of this pipeline had before; `refusals` gives the reason for
        each role that is not accepted."""
        self._incarnations = incarnations
        self._refusals = refusals
        self._workers: dict[int, RemoteWorker] = {}

    def __iter__(self) -> Iterator[RemoteWorker]:
        return iter(list(self._workers.values()))

    def attach(self, name: str, identity: bytes, control: bytes, wanted: Attach, now: float) -> RemoteWorker | str:
        """A worker with a stamp for one life, the same if it is requested again; or the reason for a refusal."""
        for worker in self._workers.values():
            if (worker.identity, worker.role, worker.life) == (identity, wanted.role, wanted.life):
                worker.control = control
                if worker.hello is None:
                    worker.heard_at = now
                return worker
        if wanted.role in self._refusals:
            return self._refusals[wanted.role]
        if wanted.role != "draft" and any(worker.role == wanted.role for worker in self._workers.values()):
            what = "target" if wanted.role == "target" else "prefill worker"
            return f"This pipeline has a {what} on another machine already; this one is accepted when that one is gone."
        if len(self._workers) >= _MAX_WORKERS:
            return f"This pipeline has {_MAX_WORKERS} workers on other machines already: end one of them first."
        if len(self.of(identity)) >= _MOST_OF_ONE:
            return f"This machine lends {_MOST_OF_ONE} workers to this pipeline already: end one of them first."
        worker = RemoteWorker(name, identity, control, wanted.role, wanted.life, self._incarnations(), now, now)
        self._workers[worker.incarnation] = worker
        return worker

    def find(self, incarnation: int, identity: bytes) -> RemoteWorker | None:
        """The worker with that incarnation, if its stamp was given to this key."""
        worker = self._workers.get(incarnation)
        return worker if worker is not None and worker.identity == identity else None

    def get(self, incarnation: int) -> RemoteWorker | None:
        return self._workers.get(incarnation)

    def of(self, identity: bytes) -> list[RemoteWorker]:
        """All workers of one machine."""
        return [worker for worker in self._workers.values() if worker.identity == identity]

    def introduce(self, worker: RemoteWorker, peer: bytes, hello: Hello) -> bool:
        """Take in a worker's Hello; False if its role is not the admitted one."""
        if hello.role != worker.role:
            return False
        worker.peer, worker.hello = peer, hello
        worker.status = "standby" if hello.role == "draft" else "ready"
        return True

    def drop(self, worker: RemoteWorker) -> None:
        """Void a worker's stamp."""
        self._workers.pop(worker.incarnation, None)

    def ping(self, worker: RemoteWorker, now: float) -> Ping:
        """The Ping to send now."""
        worker.pending_ping = now
        return Ping(now)

    def pong(self, worker: RemoteWorker, pong: Pong, now: float) -> bool:
        """Take in a Pong; True if another probe is needed. A Pong that answers no Ping is ignored."""
        if pong.sent != worker.pending_ping:
            return False
        worker.round_trips.append(now - pong.sent)
        worker.pending_ping = None
        return len(worker.round_trips) < _PROBES

    def overdue(self, now: float) -> list[RemoteWorker]:
        """Workers to give up: unreachable, silent for too long, or not loaded in time."""
        return [worker for worker in self._workers.values() if worker.lost or now >= _overdue_at(worker)]

    def deadline(self) -> float | None:
        """When the next worker is overdue if no message of it arrives."""
        if any(worker.lost for worker in self._workers.values()):
            return 0.0
        return min(map(_overdue_at, self._workers.values()), default=None)


def _overdue_at(worker: RemoteWorker) -> float:
    if worker.hello is None:
        return min(worker.attached_at + _LOADING_SECONDS, worker.heard_at + _ATTACHED_SECONDS)
    return worker.heard_at + _SILENCE_SECONDS[worker.role]


_LINE_SECONDS = 60.0


class LineLimit:
    """How many lines of a log others may cause: so many a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._began = float("-inf")
        self._seen = 0

    def take(self, now: float) -> int | None:
        """None if this line is to be left out; otherwise how many were since the last one, which it should say."""
        left_out = 0
        if now - self._began >= _LINE_SECONDS:
            left_out = max(0, self._seen - self._most)
            self._began, self._seen = now, 0
        self._seen += 1
        return left_out if self._seen <= self._most else None
