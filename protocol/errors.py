"""Errors that reach a person: each says whose fault it is and what to do next."""

from typing import Literal

Blame = Literal["input", "pipeline"]
"""Whose fault an error is: that of what was asked for, or that of the pipeline."""


class PipelineError(Exception):
    """Something the user can act on. `str(error)` is one sentence plus the next step."""


class InputError(PipelineError):
    """What was asked for is wrong: a path, a parameter, a mismatched pair of models."""


class WireError(PipelineError):
    """A peer sent bytes that this protocol does not allow."""


def blame_of(error: PipelineError) -> Blame:
    return "input" if isinstance(error, InputError) else "pipeline"


def blaming(blame: Blame, text: str) -> PipelineError:
    """The error that `blame_of` and `str` were taken from, on the other side of a border."""
    return InputError(text) if blame == "input" else PipelineError(text)
