"""What the processes tell each other about KV in shared memory: which arena holds which tokens, and in which form."""

from typing import Annotated

from msgspec import Meta

from protocol.messages.base import MAX_CONTEXT, ArenaName, Message, MessagePart, Seconds, Token, WireRequest


class KvReference(MessagePart, frozen=True):
    """The KV of a sequence's first `tokens` tokens lies in this arena."""

    name: ArenaName
    tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]


class KvForm(MessagePart, frozen=True):
    """Shape and element type of a model's keys, and equally of its values; see ArenaLayout."""

    layers: Annotated[int, Meta(ge=1, le=1024)]
    kv_heads: Annotated[int, Meta(ge=1, le=1024)]
    head_size: Annotated[int, Meta(ge=1, le=4096)]
    element: Annotated[int, Meta(ge=1, le=3)]
    """An ElementType."""


class KvOffer(Message, frozen=True):
    """An arena holds the KV of a sequence's first `tokens` tokens, for adoption by other sequences.

    A target offers its present checkpoint. A prefill worker offers the KV of all tokens of a Prefill.
    """

    request: WireRequest
    name: ArenaName
    tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    size: Annotated[int, Meta(ge=1, le=1 << 44)]
    """Bytes of shared memory that the arena takes."""
    seconds: Seconds
    """Time spent on the arena since the last offer of this sequence."""
    ended: Annotated[tuple[Token, ...], Meta(max_length=MAX_CONTEXT)] = ()
    """The tokens, if the target knows that the sequence has ended."""


class KvRelease(Message, frozen=True):
    """This arena is unlinked: close it, and write no other arena for its sequence."""

    name: ArenaName
