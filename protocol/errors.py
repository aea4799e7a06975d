"""Errors that reach the user: each says whose fault it is and what to do next."""

from typing import Literal

Blame = Literal["input", "pipeline"]
"""The cause of an error: the user's input, or the pipeline."""


class PipelineError(Exception):
    """Something the user can act on. `str(error)` is one sentence plus the next step."""


class InputError(PipelineError):
    """The user's input is wrong: a path, a parameter, a mismatched pair of models."""


class WireError(PipelineError):
    """A peer sent bytes that this protocol does not allow."""


def blame_of(error: PipelineError) -> Blame:
    return "input" if isinstance(error, InputError) else "pipeline"


def blaming(blame: Blame, text: str) -> PipelineError:
    """The inverse of `blame_of` and `str`, for the receiving side of a connection."""
    return InputError(text) if blame == "input" else PipelineError(text)
