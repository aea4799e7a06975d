"""The phases of a request with its target, and with one draft, as two transition tables. Pure.

docs/inside/architecture.md shows both as pictures. A Start may be sent again in every phase with a place: a target that
lost the request gets another Start.
"""

from enum import Enum, auto


class Phase(Enum):
    """What the target does for a request."""

    WAITING = auto()
    """The request has no place among the running requests."""
    ADMITTED = auto()
    """The request has a place, and the target that is up, if one is, was sent no Start."""
    DELEGATED = auto()
    """A prefill worker evaluates the prompt; the target was sent no Start."""
    PREFILLING = auto()
    """The target was sent a Start and has not answered."""
    READY = auto()
    """The target holds the KV before the root and verifies nothing for this request."""
    VERIFYING = auto()
    """The target was sent a tree and has not answered."""


class Trigger(Enum):
    """What moves a request from one phase to another."""

    ADMIT = auto()
    DELEGATE_PREFILL = auto()
    SEND_START = auto()
    PREFILLED = auto()
    SEND_TREE = auto()
    COMMIT = auto()
    TREE_REFUSED = auto()
    PREEMPT = auto()
    TARGET_LOST = auto()


WITH_PLACE = (Phase.ADMITTED, Phase.DELEGATED, Phase.PREFILLING, Phase.READY, Phase.VERIFYING)

TRANSITIONS: dict[tuple[Phase, Trigger], Phase] = {
    (Phase.WAITING, Trigger.ADMIT): Phase.ADMITTED,
    **{(phase, Trigger.DELEGATE_PREFILL): Phase.DELEGATED for phase in WITH_PLACE},
    **{(phase, Trigger.SEND_START): Phase.PREFILLING for phase in WITH_PLACE},
    **{(phase, Trigger.TARGET_LOST): Phase.ADMITTED for phase in WITH_PLACE},
    (Phase.PREFILLING, Trigger.PREFILLED): Phase.READY,
    (Phase.READY, Trigger.SEND_TREE): Phase.VERIFYING,
    (Phase.VERIFYING, Trigger.COMMIT): Phase.READY,
    (Phase.VERIFYING, Trigger.TREE_REFUSED): Phase.READY,
    (Phase.READY, Trigger.PREEMPT): Phase.WAITING,
}
"""All transitions; any other one is a defect of the state machine."""

AWAITING_TARGET = (Phase.PREFILLING, Phase.VERIFYING)
"""Phases in which the target has to answer."""


class DraftPhase(Enum):
    """What one draft does for a request."""

    UNWANTED = auto()
    """The strategy uses no draft, or the draft can't serve this request."""
    ABSENT = auto()
    """No draft was started on the request."""
    READING = auto()
    """The draft was sent a Start and has not grown since. In turns it takes one step then."""
    GROWING = auto()
    """The draft owes growth: it grows without pause, or was asked for steps that it has not taken."""
    RESTING = auto()
    """The draft drafts in turns and has taken all steps that it was asked for."""
    LATE = auto()
    """The strategy has waited for growth in vain. Any growth ends this."""
    REFUSED = auto()
    """The target refused a tree of this draft: only the root is verified."""


class DraftTrigger(Enum):
    """What moves a draft from one phase to another."""

    START = auto()
    GROW = auto()
    REST = auto()
    """It has taken all steps that it was asked for, or the root has moved: nothing is asked below the new one yet."""
    ASK = auto()
    WAIT_IN_VAIN = auto()
    STOP = auto()
    DECLINE = auto()
    REFUSE_TREE = auto()


DRAFTING = (DraftPhase.READING, DraftPhase.GROWING, DraftPhase.RESTING)
"""Phases in which growth may be waited for."""
SERVING = (*DRAFTING, DraftPhase.LATE)

DRAFT_TRANSITIONS: dict[tuple[DraftPhase, DraftTrigger], DraftPhase] = {
    (DraftPhase.ABSENT, DraftTrigger.START): DraftPhase.READING,
    **{(phase, DraftTrigger.GROW): DraftPhase.GROWING for phase in SERVING},
    **{(phase, DraftTrigger.REST): DraftPhase.RESTING for phase in SERVING},
    **{(phase, DraftTrigger.ASK): DraftPhase.GROWING for phase in DRAFTING},
    **{(phase, DraftTrigger.WAIT_IN_VAIN): DraftPhase.LATE for phase in DRAFTING},
    **{(phase, DraftTrigger.STOP): DraftPhase.ABSENT for phase in (*SERVING, DraftPhase.ABSENT)},
    **{(phase, DraftTrigger.STOP): phase for phase in (DraftPhase.UNWANTED, DraftPhase.REFUSED)},
    **{(phase, DraftTrigger.DECLINE): DraftPhase.UNWANTED for phase in SERVING},
    **{(phase, DraftTrigger.REFUSE_TREE): DraftPhase.REFUSED for phase in DraftPhase},
}
"""All transitions; any other one is a defect of the state machine."""


class Mode(Enum):
    """How the draft and the target of a pipeline work together."""

    PLAIN = auto()
    """No draft is in use."""
    BESIDE = auto()
    """The draft grows while the target computes."""
    IN_TURNS = auto()
    """The draft rests while the target computes."""
    COMPARING_BESIDE = auto()
    """Beside, while a draft on trial grows too."""
    COMPARING_IN_TURNS = auto()
    """In turns, while a draft on trial grows."""


IN_TURNS = (Mode.IN_TURNS, Mode.COMPARING_IN_TURNS)
COMPARING = (Mode.COMPARING_BESIDE, Mode.COMPARING_IN_TURNS)
