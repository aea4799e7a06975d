"""The file beside a draft that names the tokens of its head, for drafts that guess only some tokens.

Ascending int32 tokens in numpy's format. A program that does not know the file reads the folder as an ordinary model.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_TOKENS = "head_tokens.npy"


def stored_head_tokens(folder: Path) -> "NDArray[Any] | None":
    """What the file of a draft holds, unchecked and not read yet; None without it. Raises ValueError if it is no
    array."""
    file = folder / HEAD_TOKENS
    if not file.exists():
        return None
    # Commands read models without this file.
    from numpy.lib.format import open_memmap

    try:
        # Mapped: of an array larger than the file, memory would be taken before its end is noticed.
        return open_memmap(file, "r")
    except Exception as error:  # numpy parses the header with Python's own parser, which raises nearly anything
        raise ValueError(f"{file} can't be read ({str(error) or type(error).__name__})") from error
