"""Arguments and reports of a process that trains a drafter. Plain types; knows no MLX."""

from typing import TypeAlias

import msgspec

from protocol.child_process import Failed

DEPTHS = 5
"""Guesses behind one another that a report counts."""

LONGEST_PROMPT = 220
"""Tokens of all turns: the target's own tokens are what counts, and prompts take as long."""


class TrainingChoices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user may choose about a training."""

    minutes: float = 60.0
    """Time of the training itself, over all its runs. 0: only `steps` ends it."""
    steps: int | None = None
    """Ends a training earlier than its time."""
    tokens: int = 500_000
    """That the target writes at least."""
    rows: int = 64
    """Of a shard of answers."""
    slots: int = 512
    """Tokens of a row."""
    batch: int = 2
    """Rows of a step."""
    head: int = 8192
    """Tokens that the drafter can guess."""
    layers: int = 3
    """Its decoder layers."""
    seed: int = 0
    report_rows: int = 12
    """Held-out rows of the reports on the way."""
    report_minutes: float = 5.0


class TrainingOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one JSON argument of `python -m draft_worker.training`."""

    target: str
    out: str
    work: str
    """Folder of the target's answers and states, which several trainings can share."""
    prompts: str
    """File of prompts as tokens, a JSON list of turns a line; empty: the answers exist."""
    ends: tuple[int, ...] = ()
    """Tokens that end the target's answers to them."""
    choices: TrainingChoices


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", forbid_unknown_fields=True):
    """Something is done; `done` of `total` say how much of the stage."""

    stage: str
    done: float
    total: float
    tokens: int = 0
    """That the training has read so far, or that the target has written."""
    loss: float | None = None
    acceptance: float | None = None
    """Share of held-out places whose first guess is right, over all temperatures."""
    seconds_left: float | None = None


class HeldOutAcceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often guesses are right in held-out text of one temperature, with the noise that made the text."""

    temperature: float
    places: int
    rates: tuple[float | None, ...]
    """By depth: share of right guesses where all guesses in front were right. None: no place."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter on held-out text."""

    acceptance: tuple[HeldOutAcceptance, ...]
    parameters_per_guess: int
    """Parameters that a chain of guesses reads, by guess."""


class TrainingFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", forbid_unknown_fields=True):
    """The end of a training whose time is over."""

    folder: str
    trained_parameters: int
    steps: int
    tokens: int
    """Read by the training, counted again in each epoch."""
    seconds: float
    held_out: HeldOut


class TrainingPaused(msgspec.Struct, frozen=True, tag="paused", forbid_unknown_fields=True):
    """The process was told to end; its state is saved."""


TrainingReport: TypeAlias = TrainingProgress | TrainingFinished | TrainingPaused | Failed
"""One JSON object a line of the process's standard output."""
