"""Errors that reach a person: each says whose fault it is and what to do next."""


class PipelineError(Exception):
    """Something the user can act on. `str(error)` is one sentence plus the next step."""


class InputError(PipelineError):
    """What was asked for is wrong: a path, a parameter, a mismatched pair of models."""


class WireError(PipelineError):
    """A peer sent bytes that this protocol does not allow."""
