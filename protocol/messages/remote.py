"""Messages of remote workers, and of the commands by which a pipeline's owner manages them.

Knows keys as text only. The unions at the end list the messages of each direction.
"""

from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from protocol.messages.base import Count, Message, MessagePart, Role, Round, Seconds, ShortText, WireRequest
from protocol.messages.client import Refused
from protocol.messages.features import FeatureBlock
from protocol.messages.worker import FromWorker

MAX_PAYLOAD = 1 << 19
"""Bytes of a block's raw frame. CURVE adds to them, and the sum has to stay below a worker's largest frame."""

PublicKey: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
"""A CURVE key in Z85."""
RemoteName: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
WorkerLife: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Number of one process of a remote worker; its machine chose it."""
WorkerStatus = Literal["loading", "ready", "active", "on trial", "standby"]
"""Of an attached worker. "loading": no Hello yet; "ready": a target or prefill worker in use; else a draft's status."""


# Remote machines to the server -------------------------------------------------------------------


class Join(Message, frozen=True):
    """Sent with the one-time keys of a join line: admit this key from now on, under this name if it is free."""

    name: RemoteName
    public: PublicKey


class Attach(Message, frozen=True):
    """Sent with the machine's own keys: request a stamp for one worker process. Repeated in answer to
    each StatusUpdate of a worker that loads, since that says nothing itself."""

    role: Role
    life: WorkerLife


class Leave(Message, frozen=True):
    """That worker process has ended."""

    life: WorkerLife


class KvBlock(Message, frozen=True):
    """From a remote prefill worker: rows of one layer's keys or values, for an arena of the orchestrator.

    Blocks arrive in order: some rows of every layer's keys, then of every layer's values, then the next rows.
    """

    request: WireRequest
    attempt: Round
    """That of the Prefill."""
    begin: Count
    """Index of the first row's token."""
    rows: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD)]
    layer: Annotated[int, Meta(ge=0, lt=2048)]
    """The keys of all layers come before the values of all layers."""


class Shipment(NamedTuple):
    """A block and its bytes: (kv heads, rows, head size) of the arena's element type."""

    block: KvBlock
    payload: bytes


# The server to remote machines -------------------------------------------------------------------


class Joined(Message, frozen=True):
    """The key is pinned, under this name."""

    name: RemoteName


class Welcome(Message, frozen=True):
    """The stamp for that worker process, which sends Hello with it, on a connection of its own with the same keys."""

    life: WorkerLife
    epoch: int
    incarnation: int
    keeps_kv: bool
    """Whether the pipeline's owner lets workers keep KV of ended requests."""


class StatusUpdate(Message, frozen=True):
    """Status of a remote worker, sent every few seconds."""

    life: WorkerLife
    status: WorkerStatus
    round_trip: Seconds | None


# The owner's commands ----------------------------------------------------------------------------


class ListWorkers(Message, frozen=True):
    """Request the list of workers."""


class Invite(Message, frozen=True):
    """Request a new join line."""


class Revoke(Message, frozen=True):
    """Detach this machine's workers and admit it never again."""

    name: ShortText


class WorkerEntry(MessagePart, frozen=True, kw_only=True):
    """One worker, or a machine that is admitted and has no worker attached."""

    name: ShortText
    """The machine's name; "local" for the pipeline's own processes."""
    role: Role | None
    engine: ShortText = ""
    model: ShortText = ""
    device: ShortText = ""
    status: WorkerStatus | Literal["gone"]
    round_trip: Seconds | None = None
    """The shortest of the last few; None if none was measured."""


class Workers(Message, frozen=True):
    """Answer to ListWorkers and Revoke."""

    workers: Annotated[tuple[WorkerEntry, ...], Meta(max_length=1024)]


class Invitation(Message, frozen=True):
    """Answer to Invite."""

    line: ShortText
    seconds: Seconds
    """How long the join line is valid."""


FromRemote: TypeAlias = FromWorker | KvBlock | FeatureBlock | Join | Attach | Leave
ToRemote: TypeAlias = Joined | Welcome | StatusUpdate | Refused
FromOwner: TypeAlias = ListWorkers | Invite | Revoke
ToOwner: TypeAlias = Workers | Invitation | Refused
