"""Files that appear whole or not at all, for this user alone: a training keeps prompts and answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import PipelineError
from protocol.security.private_files import replacing


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write, which becomes `path` at the end. Nothing stays of a file that could not be written.

    Raises PipelineError naming `path`. MLX raises RuntimeError where others raise OSError, so the contents must be
    computed before.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, path.with_suffix(f".unfinished{path.suffix}")) as unfinished:
            yield unfinished
    except (OSError, RuntimeError) as error:
        raise PipelineError(
            f"{path} could not be written ({error}): free space on its disk, and start the same command again."
        ) from error
