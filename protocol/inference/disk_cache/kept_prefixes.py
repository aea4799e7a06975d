"""The files of one model's snapshots, by the tokens that they hold. Knows no threads and no sequences."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from protocol.errors import InputError
from protocol.inference.disk_cache.part_files import PartDamaged, checked, prefix_names
from protocol.inference.disk_cache.reading import Contents, Reading
from protocol.inference.disk_cache.snapshot import CHUNK, Shape
from protocol.kv.cache_files import CacheFiles, touched
from protocol.security.private_files import read_private

log = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""Fewest tokens that are kept, or for which the disk is read."""
_TRIES = 4
"""Damaged files after which a prompt is prefilled."""


class Prefix(NamedTuple):
    """Files that hold the first `tokens` tokens."""

    tokens: int
    chunks: list[Path]
    rest: list[Path]
    """What is behind the whole chunks: one file at most."""


class KeptPrefixes:
    """What is kept of one model."""

    def __init__(self, files: CacheFiles, name: str, shape: Shape) -> None:
        self.files = files
        self._name = name
        self._shape = shape

    def chunks(self, tokens: Sequence[int]) -> dict[int, Path]:
        """Files of the whole chunks of `tokens`, by the tokens up to the chunk's end."""
        if not self._shape.rows:
            return {}
        names = prefix_names(self._name, tokens, range(CHUNK, len(tokens) + 1, CHUNK))
        return {place: self.files.folder / f"{name}.rows" for place, name in names.items()}

    def rests(self, tokens: Sequence[int], places: Iterable[int]) -> dict[int, Path]:
        """Files of what is behind the whole chunks, by ascending `places`."""
        names = prefix_names(self._name, tokens, places)
        return {place: self.files.folder / f"{place}-{name}.state" for place, name in names.items()}

    def longest(self, tokens: Sequence[int]) -> Prefix:
        """Of the prefixes that are kept."""
        chunks: list[Path] = []
        for file in self.chunks(tokens).values():
            if not file.is_file():
                break
            chunks.append(file)
        whole = len(chunks) * CHUNK
        if not self._shape.states:
            return Prefix(whole, chunks, [])
        most = min(len(tokens), whole + CHUNK - 1) if self._shape.rows else len(tokens)
        kept = {file.name: int(file.name.split("-")[0]) for file in self.files.folder.glob("[1-9]*-*.state")}
        places = sorted({place for place in kept.values() if place <= most})
        for place, file in reversed(self.rests(tokens, places).items()):
            if file.name in kept:
                return Prefix(place, chunks[: place // CHUNK], [file])
        return Prefix(0, [], [])

    def read(self, reading: Reading) -> None:
        """The longest prefix that is whole, if it has LEAST_TOKENS more than the sequence has without it.

        Raises OSError if the disk fails.
        """
        for _ in range(_TRIES):
            try:
                prefix = self.longest(reading.tokens)
                if prefix.tokens >= reading.beyond + LEAST_TOKENS:
                    chunks, rest = ([_read(file, reading) for file in files] for files in (prefix.chunks, prefix.rest))
                    reading.contents = Contents(prefix.tokens, chunks, rest[0] if rest else None)
            except PartDamaged as error:
                log.warning("%s", error)
                reading.warning = str(error)
            except FileNotFoundError:
                # The user has cleared the cache.
                return
            except _GivenUp:
                return
            else:
                return


class _GivenUp(Exception):
    """Nobody waits for the reading any more."""


def _read(file: Path, reading: Reading) -> bytes:
    """Raises PartDamaged for a file that can't be used, which is removed, OSError, or _GivenUp."""
    if reading.given_up:
        raise _GivenUp
    try:
        sealed = read_private(file)
        if sealed is None:
            raise PartDamaged("it has been removed.")
        content = checked(file.name, sealed)
    except (InputError, PartDamaged) as error:
        with suppress(OSError):
            file.unlink()
        raise PartDamaged(f"The file {file} of the disk cache is not used: {error}") from error
    touched(file)
    return content
