"""Which line of the user's program called this package, so that a warning can name it."""

import inspect


def caller_level() -> int:
    """The `stacklevel` by which `warnings.warn`, in the function that calls this, names the first line outside the
    package."""
    level = 1
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    return level
