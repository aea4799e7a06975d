"""Messages between the bench and a rival's program: one JSON object a line. The program has no msgspec."""

from collections.abc import Mapping

import msgspec


class RivalSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the program, as JSON."""

    target: str
    """Folder of the model."""
    drafters: Mapping[str, str]
    """Folders of drafters for the loops that need one, by the loop's name."""
    cores: tuple[int, ...]
    """Processor cores to run on, where the OS allows it; empty for all."""


class RivalReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program's first line: the model is loaded."""

    precision: str
    """How the weights are computed with."""


class RivalJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continue these tokens until `max_tokens` or one of the end tokens `ends`."""

    loop: str
    options: Mapping[str, int]
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]


class RivalRound(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One verification of draft tokens."""

    drafted: int
    accepted: int


class RivalResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a job."""

    tokens: tuple[int, ...]
    """May have more than `max_tokens`: a loop may end with the last token of a round."""
    seconds: float
    """By the rival's own clock, from the end of the prefill of all but the prompt's last token."""
    forwards: int
    """Of the target, in that time."""
    rounds: tuple[RivalRound, ...] = ()
    """Those with draft tokens."""
    arrivals: tuple[float, ...]
    """Seconds from the job's begin, prefill included, to each token."""
