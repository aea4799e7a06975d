"""Messages by which workers of other machines are let in, and by which a pipeline's owner looks after them.

Knows no keys but their text. Decoded against the unions at the end, as those of `messages` are.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from protocol.messages.base import Message, MessagePart, Role, Seconds, ShortText
from protocol.messages.client import Refused
from protocol.messages.worker import FromWorker, KvBlock

PublicKey: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
"""A CURVE key in Z85."""
GuestName: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
GuestLife: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""One life of a worker, by a number that the guest chose."""
WorkerStatus = Literal["loading", "ready", "active", "on trial", "standby"]
"""Of an attached worker: before its Hello; a target in use; a draft by what was decided between several."""


# Guests to the server ----------------------------------------------------------------------------


class Join(Message, frozen=True):
    """By whoever holds the one-time keys of a join line: from now on admit this key, under this name if it is free."""

    name: GuestName
    public: PublicKey


class Attach(Message, frozen=True):
    """By a guest with its own keys: a stamp is wanted for one life of a worker."""

    role: Role
    life: GuestLife


class Leave(Message, frozen=True):
    """That life has ended."""

    life: GuestLife


# The server to guests ----------------------------------------------------------------------------


class Joined(Message, frozen=True):
    """The key is pinned, under this name."""

    name: GuestName


class Welcome(Message, frozen=True):
    """The stamp for that life; its worker says Hello with it, on a connection of its own with the same keys."""

    life: GuestLife
    epoch: int
    incarnation: int


class StatusUpdate(Message, frozen=True):
    """How a guest's worker is doing, every few seconds."""

    life: GuestLife
    status: WorkerStatus
    round_trip: Seconds | None


# The owner's commands and the pipeline -----------------------------------------------------------


class ListWorkers(Message, frozen=True):
    """Who is at work?"""


class Invite(Message, frozen=True):
    """A new join line is wanted."""


class Revoke(Message, frozen=True):
    """Let this guest go, and never in again."""

    name: ShortText


class WorkerEntry(MessagePart, frozen=True, kw_only=True):
    """One worker, or a guest who may come and has none."""

    name: ShortText
    """The guest's; "local" for our own processes."""
    role: Role | None
    engine: ShortText = ""
    model: ShortText = ""
    device: ShortText = ""
    status: WorkerStatus | Literal["gone"]
    round_trip: Seconds | None = None
    """The shortest of the last few; None where nobody measured one."""
    clock_offset: Annotated[float, Meta(ge=-1e12, le=1e12)] | None = None
    """Seconds that its clock is ahead of the orchestrator's, give or take half the round trip."""


class Workers(Message, frozen=True):
    """Answer to Roll and Revoke."""

    workers: Annotated[tuple[WorkerEntry, ...], Meta(max_length=1024)]


class Invitation(Message, frozen=True):
    """Answer to Invite."""

    line: ShortText
    seconds: Seconds
    """How long it can be used."""


FromGuest: TypeAlias = FromWorker | KvBlock | Join | Attach | Leave
ToGuest: TypeAlias = Joined | Welcome | StatusUpdate | Refused
FromOwner: TypeAlias = ListWorkers | Invite | Revoke
ToOwner: TypeAlias = Workers | Invitation | Refused
