"""The phases of a sequence as one transition table. Pure.

    WAITING ──admitted──▶ ADMITTED ──start sent──▶ PREFILLING ──prefilled──▶ READY ──tree sent──▶ VERIFYING
       ▲                     │ ▲                       ▲                      │ ▲ ▲                 │   │
       │                     │ └── target lost, from any phase with a place   │ │ └── committed ────┘   │
       │                     └──▶ DELEGATED ──start sent─┘                    │ └──── tree refused ─────┘
       └──────────────────────────────────── preempted ───────────────────────┘

A Start may be sent again in every phase with a place: a target that lost the sequence gets another Start.
"""

from enum import Enum, auto


class Phase(Enum):
    """What the target does for a sequence."""

    WAITING = auto()
    """The sequence has no place among the running requests."""
    ADMITTED = auto()
    """The sequence has a place, and the target that is up, if one is, was sent no Start."""
    DELEGATED = auto()
    """A prefill worker evaluates the prompt; the target was sent no Start."""
    PREFILLING = auto()
    """The target was sent a Start and has not answered."""
    READY = auto()
    """The target holds the KV before the root and verifies nothing for this sequence."""
    VERIFYING = auto()
    """The target was sent a tree and has not answered."""


class Trigger(Enum):
    """What moves a sequence from one phase to another."""

    ADMIT = auto()
    DELEGATE_PREFILL = auto()
    SEND_START = auto()
    PREFILLED = auto()
    SEND_TREE = auto()
    COMMIT = auto()
    TREE_REFUSED = auto()
    PREEMPT = auto()
    TARGET_LOST = auto()


_WITH_PLACE = (Phase.ADMITTED, Phase.DELEGATED, Phase.PREFILLING, Phase.READY, Phase.VERIFYING)

TRANSITIONS: dict[tuple[Phase, Trigger], Phase] = {
    (Phase.WAITING, Trigger.ADMIT): Phase.ADMITTED,
    **{(phase, Trigger.DELEGATE_PREFILL): Phase.DELEGATED for phase in _WITH_PLACE},
    **{(phase, Trigger.SEND_START): Phase.PREFILLING for phase in _WITH_PLACE},
    **{(phase, Trigger.TARGET_LOST): Phase.ADMITTED for phase in _WITH_PLACE},
    (Phase.PREFILLING, Trigger.PREFILLED): Phase.READY,
    (Phase.READY, Trigger.SEND_TREE): Phase.VERIFYING,
    (Phase.VERIFYING, Trigger.COMMIT): Phase.READY,
    (Phase.VERIFYING, Trigger.TREE_REFUSED): Phase.READY,
    (Phase.READY, Trigger.PREEMPT): Phase.WAITING,
}
"""All transitions; any other one is a defect of the state machine."""

AWAITING_TARGET = (Phase.PREFILLING, Phase.VERIFYING)
"""Phases in which the target has to answer."""
