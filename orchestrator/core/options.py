"""What the user chose about speculation and memory, with bounds.

Keywords of the Python API derive from this struct, and so do the warnings about options that change nothing. A field
with a description is an option of the command line too: a new one needs no other place but the code that reads it.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from protocol.contracts.engines import NO_DRAFT
from protocol.contracts.model_folder import UNQUANTIZED, KvBits
from protocol.ineffective import SET, Ineffective
from protocol.messages.base import MAX_CONTEXT

StrategyName: TypeAlias = str
"""A name in `policy.strategies.STRATEGIES`."""
PrefillMode = Literal["auto", "always"]
Fallback = Literal["neural", "fast", "adaptive"]
LookupUse = Literal["on", "off"]
PlacementChoice = Literal["auto", "shared", "apart"]
MemoryCheck = Literal["on", "off"]
MemoryMib: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 24)] | Literal["auto"]
FIXED_ARENAS, FIXED_PREFIX_CACHE = 2048, 512
"""MiB that `auto` stands for where nobody has computed what a machine's memory allows."""
Context: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | Literal["auto"]


NO_DRAFT_AT_ALL = Ineffective(
    "without a draft the target decodes alone",
    lambda facts: facts.get("draft_engine") == NO_DRAFT and facts.get("listen") is None,
)
"""Neither here nor from another machine."""
NOT_IN_AR = Ineffective("the strategy ar uses no draft", strategy="ar")
_OF_CHAINS = (NOT_IN_AR, NO_DRAFT_AT_ALL, Ineffective("only the strategies sd and ssd use it", strategy="adaptive"))
_OF_SEVERAL_REQUESTS = Ineffective("this command sends one request at a time", requests=("one", "in turn"))
_OF_DISK = (
    Ineffective("that keeps no KV of ended requests anywhere", arena_memory=0),
    Ineffective("the KV of a target of another machine stays there", target_engine="none"),
    Ineffective("each machine of a divided target holds a part of its KV", target_hosts=SET),
)
_OF_PREFIX_CACHE = (
    Ineffective("without memory for arenas no KV of ended requests is kept", arena_memory=0),
    Ineffective("no later request can use what it keeps", requests="one"),
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to speculate. Each description is the help text of the field's command-line option."""

    strategy: Annotated[StrategyName, NO_DRAFT_AT_ALL] = "adaptive"
    draft_tokens: Annotated[int, Meta(ge=1, le=64, description="K, the chain length of sd and ssd."), _OF_CHAINS] = 4
    draft_width: Annotated[int, Meta(ge=1, le=256)] = 16
    """Most nodes that a growth step of adaptive evaluates; halved while the second half was measured to be
    expensive."""
    draft_fan: Annotated[int, Meta(ge=1, le=64)] = 8
    """Children that a tree node gets under adaptive."""
    max_verify: Annotated[int, Meta(ge=1, le=256)] = 16
    """Most draft nodes in one verification of adaptive."""
    fan_budget: Annotated[int, Meta(ge=1, le=1024)] = 15
    """B, the bonus guesses of ssd over all positions of the chain."""
    lookup: LookupUse = "on"
    """Guesses by prompt lookup beside the draft's (adaptive, and ssd on a miss)."""
    placement: Annotated[
        PlacementChoice,
        Meta(
            description="shared: the draft computes on the target's device, in turns; apart: both at once (adaptive)."
        ),
    ] = "auto"
    """auto: as the hardware suggests, until a measurement shows that the other one is faster."""
    fallback: Fallback = "adaptive"
    """What ssd does on a miss."""
    prefill: PrefillMode = "auto"
    """Whether a prefill worker prefills if it is faster, or always."""
    prefill_step_size: Annotated[
        int, Meta(ge=1, le=4096, description="Most tokens of a prompt that one forward reads.")
    ] = 512
    """Of workers on this machine; they read messages between two forwards. A divided target takes at most 128."""
    concurrent: Annotated[
        int, Meta(ge=1, le=64, description="Requests decoded at the same time; others wait."), _OF_SEVERAL_REQUESTS
    ] = 16
    turn: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    """Tokens after which a request makes room for a waiting one. Its KV stays in an arena, so that it continues later
    without a prefill."""
    arena_memory: Annotated[
        MemoryMib,
        Meta(description="MiB of shared memory for KV that outlives a worker, or auto: what memory has to spare."),
    ] = "auto"
    """0 keeps no KV of ended requests anywhere."""
    prefix_cache_memory: Annotated[
        MemoryMib,
        Meta(description="MiB of each worker's own memory for KV of ended requests, or auto: what the models leave."),
        _OF_PREFIX_CACHE,
    ] = "auto"
    disk_cache: Annotated[
        float,
        Meta(ge=0.0, le=1 << 20, description="GB of disk for the target's KV of finished turns, also after a restart."),
        _OF_DISK,
    ] = 0.0
    """0 keeps none. The files lie in this user's cache folder, and texts can be recovered from them."""
    kv_bits: Annotated[
        KvBits,
        Meta(description="Bits of each key and value of the target; 8 or 4 for long contexts: other tokens than 16."),
        Ineffective("a target of another machine has its own", target_engine="none"),
    ] = UNQUANTIZED
    context: Annotated[
        Context,
        Meta(
            description="Most tokens of a request, or auto: what this machine's memory has room for. 0: the target's."
        ),
    ] = 0
    """More than 0: the memory for so many tokens of every concurrent request is checked before anything is loaded."""
    memory_check: Annotated[
        MemoryCheck, Meta(description="off: start what this machine's memory is estimated to be too small for.")
    ] = "on"

    @property
    def context_limit(self) -> int:
        """Most tokens of a request; 0: the target's own limit."""
        return 0 if self.context == "auto" else self.context

    @property
    def arenas(self) -> int:
        """MiB."""
        return FIXED_ARENAS if self.arena_memory == "auto" else self.arena_memory

    @property
    def prefix_cache(self) -> int:
        """MiB of each worker."""
        return FIXED_PREFIX_CACHE if self.prefix_cache_memory == "auto" else self.prefix_cache_memory

    @property
    def keeps_kv(self) -> bool:
        """Whether workers keep KV of ended requests."""
        return bool(self.arenas and self.prefix_cache)

    @property
    def disk_cache_bytes(self) -> int:
        """0 if nothing is kept on disk."""
        return int(self.disk_cache * 1e9) if self.arenas else 0
