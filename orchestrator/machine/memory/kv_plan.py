"""How the memory that models leave is divided among keys and values. Pure.

One budget for the KV of live and of ended requests, in the target's process and in the draft's, and for copies in
shared memory. A copy is worth a prefill after a crash of the target, no more: it gets memory only beyond one live
conversation and one that can be continued.
"""

from typing import Literal, TypeAlias

import msgspec

from orchestrator.machine.memory.budget import DRAFT, TARGET, MemorySettings, PipelineNeeds

CONVERSATION = 32_768
"""Tokens of an agent's conversation: first prompts have 8,000 to 31,000."""
_STATES = 2
"""Recurrent states of an ended conversation: behind its last token, and where the next turn may branch off."""
_LEAST_COPY = 4
"""A copy of less than one part in so many of a conversation saves too little."""
_MOST = 2
"""Conversations as long as the target's context that are kept at most, for each request that is decoded at once."""

_UNKNOWN = 512 << 20
"""Bytes of a draft of whose KV nothing is known."""

NoCopy: TypeAlias = Literal["", "memory", "shared memory", "states"]
"""Why shared memory has no copy of a conversation: what there is too little of, or its states; empty: it has one."""


class KvPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of each part."""

    target: int
    """Of live and ended requests, in the target's process."""
    draft: int
    """The same in the draft's."""
    arenas: int
    tokens: int
    """Of conversations that the target's part holds, about; 0 if nothing is known of its KV."""
    no_copy: NoCopy = ""
    whole: bool = False
    """No more memory would be used."""


def kv_plan(
    needs: PipelineNeeds,
    settings: MemorySettings,
    available: int,
    *,
    concurrent: int,
    arenas: int | None = None,
    shared: int | None = None,
) -> KvPlan:
    """The division of what the models leave of `available` bytes.

    `settings` state the context and the requests whose KV has to fit; of their arenas and prefix caches nothing is
    read. `concurrent`: requests at once at most. `arenas`: bytes that the user asked for; None: none was asked for.
    `shared`: bytes of shared memory that the system has; None: it has no limit of its own.
    """
    bare = msgspec.structs.replace(settings, arenas=0, prefix_cache=0)
    budget = needs.budget(bare)
    live = sum(budget.parts.get(part, 0) for part in _pooled())
    left = max(0, available - budget.required_bytes) + live
    tokens = min(needs.context, CONVERSATION)
    target, draft = (needs.conversation(name, tokens, bare, _STATES) for name in (TARGET, DRAFT))
    # Rows behind windows stay until they are copied.
    waiting = needs.conversation(TARGET, tokens, msgspec.structs.replace(bare, arenas=1), _STATES) - target
    copy, no_copy = 0, ""
    if needs.folds(TARGET):
        no_copy = "states"
    elif arenas is not None:
        copy = arenas
    else:
        copy, no_copy = _copy((left - 2 * (target + draft) - waiting) // (2 if settings.disk else 1), shared)
        if copy * _LEAST_COPY < target + waiting:
            copy, no_copy = 0, no_copy or "memory"
    left -= copy * (2 if settings.disk else 1) + (waiting if copy else 0)
    unknown = _UNKNOWN if needs.unknown(DRAFT) else 0
    left -= unknown
    most = _MOST * concurrent * needs.context / tokens if tokens else 0.0
    shares = _shares(max(0, left), target, draft)
    target_pool, draft_pool = (int(min(part, most * of)) for part, of in zip(shares, (target, draft), strict=True))
    return KvPlan(
        target=target_pool,
        draft=draft_pool or unknown,
        arenas=min(copy, max(1, int(most * (target + waiting)))) if copy and target else copy,
        tokens=_tokens(needs, bare, target_pool, tokens) if target else 0,
        no_copy=no_copy,
        whole=(target_pool, draft_pool) != shares,
    )


def planned_bytes(needs: PipelineNeeds, settings: MemorySettings, plan: KvPlan) -> int:
    """All that a pipeline with this plan takes."""
    parts = needs.budget(msgspec.structs.replace(settings, arenas=0, prefix_cache=0)).parts
    others = sum(size for part, size in parts.items() if part not in _pooled())
    return others + plan.target + plan.draft + plan.arenas * (2 if settings.disk else 1)


def _pooled() -> tuple[str, ...]:
    """Parts of a budget that the plan has in the workers' pools."""
    return f"the {TARGET}'s KV", f"the {DRAFT}'s KV", f"the KV of the {DRAFT} in Core ML"


def _tokens(needs: PipelineNeeds, settings: MemorySettings, pool: int, conversation: int) -> int:
    """What the pool holds: of one conversation, or of several of this length."""
    whole = needs.conversation(TARGET, conversation, settings, _STATES)
    if pool >= whole:
        return conversation * pool // whole
    low, high = 0, conversation
    while low < high:
        middle = (low + high + 1) // 2
        fits = needs.conversation(TARGET, middle, settings, _STATES) <= pool
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _copy(spare: int, shared: int | None) -> tuple[int, NoCopy]:
    """Half of what is to spare, and no more than the system can share."""
    wanted = max(0, spare // 2)
    if shared is not None and shared < wanted:
        return shared, "shared memory"
    return wanted, ""


def _shares(left: int, target: int, draft: int) -> tuple[int, int]:
    """Of target and draft, for as many tokens each; the target's first where one conversation does not fit."""
    both = target + draft
    if not both:
        return 0, 0
    if left < both:
        mine = min(left, target)
        return mine, left - mine
    mine = left * target // both
    return mine, left - mine


def kept_sentence(plan: KvPlan) -> str:
    """What users are told of the plan; empty if nothing is known of the target's KV."""
    if not plan.tokens:
        return ""
    why = {
        "": "",
        "memory": " There is no memory for a copy of it, so a restarted target reads prompts again.",
        "shared memory": " Shared memory (/dev/shm) is too small for a copy of it, so a restarted target reads "
        "prompts again (in Docker: --shm-size=8g).",
        "states": " A restarted target reads prompts again: recurrent states are not in shared memory "
        "(--disk-cache keeps them).",
    }
    return f"Keeps {about(plan.tokens)} tokens of conversations.{why[plan.no_copy]}"


def about(tokens: int) -> str:
    """A number of tokens in two digits."""
    unit = 10 ** max(0, len(str(tokens)) - 2)
    return f"about {tokens // unit * unit:,}"
