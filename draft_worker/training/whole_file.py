"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` when the block has ended; nothing is left of it if the block fails.

    Raises OSError, also where MLX reports a full disk in its own way.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    except RuntimeError as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
