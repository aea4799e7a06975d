"""Where two texts of one model part: at a near-tie, which rounding decides, or at a real difference.

A GPU sums in another order at another width, in the model's own type: where two tokens are nearly tied, the other one
may come out, and the text is another one from there on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.lab.bench.measurement import Deviation
from orchestrator.machine.hardware import worker_environment
from protocol.child_process import reports

TIE = 0.5
"""Standard deviations of a place's logits. Sums in another order decide between tokens that are nearly tied; a flip
across a larger gap is a defect. Assumed: the largest of millions of rounding errors in 16 bits."""
_PROGRAM, _NAME = "orchestrator.lab.bench.tie_examination", "The examination of ties"
_GRACE = 10.0


class Parting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two texts share, and how each of them goes on."""

    tokens: tuple[int, ...]
    """The prompt and the shared text."""
    following: tuple[int, ...]
    """The next token of each; one of them alone where the other text ends."""
    temperature: float
    seed: int


class PartingsOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    folder: str
    """Of the model."""
    partings: tuple[Parting, ...]


class Gap(msgspec.Struct, frozen=True, tag="gap", forbid_unknown_fields=True):
    """Of one parting, in the order of the partings."""

    gap: float
    """From the best token down to the worse of the two that follow, noise included, in standard deviations of the
    logits."""


def parting(prompt: Sequence[int], one: Sequence[int], other: Sequence[int], temperature: float, seed: int) -> Parting:
    """Of two texts that differ."""
    shared = next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    following = tuple(text[shared] for text in (one, other) if len(text) > shared)
    assert following, "the texts are equal"
    return Parting((*prompt, *one[:shared]), following, temperature, seed)


def gaps(
    folder: Path, deviations: Sequence[Deviation], prompts: Mapping[tuple[int, int], Sequence[int]]
) -> list[float]:
    """The gap of each deviation, by a forward of the model over one token. `prompts`: by prompt and turn.

    Raises PipelineError if the process fails.
    """
    partings = tuple(
        parting(
            prompts[wrong.setting.prompt, wrong.setting.turn],
            wrong.generation.tokens,
            reference.generation.tokens,
            wrong.setting.temperature,
            wrong.setting.seed,
        )
        for wrong, reference in deviations
    )
    form: Any = Gap
    order = PartingsOrder(str(folder), partings)
    found = reports(_PROGRAM, order, form, name=_NAME, grace=_GRACE, variables=worker_environment("target", ()))
    return [one.gap for one in found]
