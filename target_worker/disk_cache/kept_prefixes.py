"""The files of one model by the tokens that they hold, with checksums. Knows no sequences; starts no threads."""

import hashlib
import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash

from protocol.errors import InputError, PipelineError
from protocol.kv.cache_files import CacheFiles, touched
from protocol.security.private_files import read_private
from target_worker.disk_cache.snapshot import CHUNK, CacheShape, WindowChunk

log = logging.getLogger(__name__)

_MAGIC = b"LPKVPART"
_FORMAT = 2
_DIGEST_BYTES = 16
_SEAL_BYTES = len(_MAGIC) + _DIGEST_BYTES
Piece: TypeAlias = bytes | memoryview

LEAST_TOKENS = 256
"""Fewest tokens that are kept, or for which the disk is read."""
_TRIES = 4
"""Damaged files after which a prompt is prefilled."""


class Contents(NamedTuple):
    """What the files of a prefix hold, checked."""

    tokens: int
    """Of the prefix."""
    chunks: list[bytes]
    windows: list[tuple[WindowChunk, bytes]]
    rest: bytes | None
    """What is behind the whole chunks."""


class DiskReading:
    """Asks for the longest prefix of `tokens` that is kept. Given up by the caller, or ended by the thread that
    reads."""

    def __init__(self, tokens: Sequence[int], beyond: int) -> None:
        """`beyond`: tokens that the sequence has without it."""
        self.tokens = tokens
        self.beyond = beyond
        self.contents: Contents | None = None
        """None if nothing is kept that helps, and until it has ended."""
        self.warning = ""
        """Why a file was not used."""
        self._given_up = threading.Event()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def given_up(self) -> bool:
        return self._given_up.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most. Whether it has ended."""
        return self._ended.wait(seconds)

    def give_up(self) -> None:
        """The thread stops at the next file."""
        self._given_up.set()

    def end(self) -> None:
        self._ended.set()


class Prefix(NamedTuple):
    """Files that hold the first `tokens` tokens."""

    tokens: int
    chunks: list[Path]
    windows: dict[WindowChunk, Path]
    rest: list[Path]
    """What is behind the whole chunks: one file at most."""


class KeptPrefixes:
    """What is kept of one model."""

    def __init__(self, files: CacheFiles, name: str, shape: CacheShape) -> None:
        self.files = files
        self._name = name
        self._shape = shape

    def chunks(self, tokens: Sequence[int]) -> dict[int, Path]:
        """Files of the whole chunks of `tokens`, by the tokens up to the chunk's end."""
        if not self._shape.rows:
            return {}
        names = prefix_names(self._name, tokens, range(CHUNK, len(tokens) + 1, CHUNK))
        return {place: self.files.folder / f"{name}.rows" for place, name in names.items()}

    def window_chunks(self, tokens: Sequence[int], places: Iterable[int]) -> dict[WindowChunk, Path]:
        """Files of the rows of windows in front of the last whole chunk's end of each place."""
        wanted = sorted({chunk for place in places for chunk in self._shape.window_chunks(place)}, key=lambda it: it[1])
        names = prefix_names(self._name, tokens, sorted({begin + CHUNK for _, begin in wanted}))
        return {
            (window, begin): self.files.folder / f"{names[begin + CHUNK]}.window{window}" for window, begin in wanted
        }

    def needs_rest(self, place: int) -> bool:
        """Whether whole chunks do not hold all of so many first tokens."""
        return self._shape.states or place % CHUNK > 0

    def rests(self, tokens: Sequence[int], places: Iterable[int]) -> dict[int, Path]:
        """Files of what is behind the whole chunks, by ascending `places`."""
        names = prefix_names(self._name, tokens, places)
        return {place: self.files.folder / f"{place}-{name}.state" for place, name in names.items()}

    def remove_outgrown(self, tokens: Sequence[int]) -> None:
        """Remove what was kept behind whole chunks at earlier ends of a conversation, where whole chunks hold it now.
        States are needed where they are."""
        if self._shape.states:
            return
        chunks, earlier = self.chunks(tokens), self._kept_rests(tokens, 0, len(tokens) - len(tokens) % CHUNK)
        for place, file in earlier.items():
            if chunks[place - place % CHUNK + CHUNK].is_file():
                with suppress(OSError):
                    file.unlink()

    def longest(self, tokens: Sequence[int]) -> Prefix:
        """Of the prefixes that are kept."""
        chunks: list[Path] = []
        for file in self.chunks(tokens).values():
            if not file.is_file():
                break
            chunks.append(file)
        whole = len(chunks) * CHUNK
        most = min(len(tokens), whole + CHUNK - 1) if self._shape.rows else len(tokens)
        for place, file in reversed(self._kept_rests(tokens, 0 if self._shape.states else whole, most).items()):
            windows = self.window_chunks(tokens, [place])
            if all(each.is_file() for each in windows.values()):
                return Prefix(place, chunks[: place // CHUNK], windows, [file])
        return Prefix(0, [], {}, []) if self._shape.states else Prefix(whole, chunks, {}, [])

    def _kept_rests(self, tokens: Sequence[int], above: int, most: int) -> dict[int, Path]:
        """The files of `rests` that are there, for more than `above` and at most so many first tokens."""
        kept = {file.name: int(file.name.split("-")[0]) for file in self.files.folder.glob("[1-9]*-*.state")}
        places = sorted({place for place in kept.values() if above < place <= most})
        return {place: file for place, file in self.rests(tokens, places).items() if file.name in kept}

    def read(self, reading: DiskReading) -> None:
        """The longest prefix that is whole, if it has LEAST_TOKENS more than the sequence has without it.

        Raises OSError if the disk fails.
        """
        for _ in range(_TRIES):
            try:
                prefix = self.longest(reading.tokens)
                if prefix.tokens >= reading.beyond + LEAST_TOKENS:
                    chunks, rest = ([_read(file, reading) for file in files] for files in (prefix.chunks, prefix.rest))
                    windows = [(chunk, _read(file, reading)) for chunk, file in prefix.windows.items()]
                    reading.contents = Contents(prefix.tokens, chunks, windows, rest[0] if rest else None)
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


class PartDamaged(PipelineError):
    """A file is not used; the tokens have to be prefilled."""


def parts_name(fingerprint: str, device: str) -> str:
    """Of all that decides which bytes the KV of given tokens has: 32 hexadecimal digits.

    `fingerprint`: of the weights and the form of KV. Another device, or version of MLX, rounds otherwise.
    """
    return hashlib.sha256(f"parts {_FORMAT} {fingerprint} {version('mlx')} {device}".encode()).hexdigest()[:32]


def prefix_names(name: str, tokens: Sequence[int], places: Iterable[int]) -> dict[int, str]:
    """For ascending `places`: names of the first so many tokens. Each names all of them, and the model, by `name`."""
    hashed, begin, found = hashlib.sha256(name.encode()), 0, {}
    for place in places:
        hashed.update(np.array(tokens[begin:place], "<u4").tobytes())
        begin, found[place] = place, hashed.hexdigest()[:40]
    return found


def sealed(name: str, pieces: Sequence[Piece]) -> list[Piece]:
    """With a checksum over the file's name and all pieces in front of them."""
    return [_MAGIC + _digest(name, pieces), *pieces]


def _checked(name: str, sealed: bytes) -> bytes:
    """What is behind the seal. Raises PartDamaged."""
    content = sealed[_SEAL_BYTES:]
    if sealed[:_SEAL_BYTES] != _MAGIC + _digest(name, [content]):
        raise PartDamaged("it is torn, or of another model (its checksum is wrong).")
    return content


def _digest(name: str, pieces: Iterable[Piece]) -> bytes:
    digest = xxhash.xxh3_128(seed=xxhash.xxh3_64_intdigest(name.encode()))
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


class _GivenUp(Exception):
    """Nobody waits for the reading any more."""


def _read(file: Path, reading: DiskReading) -> bytes:
    """Raises PartDamaged for a file that can't be used, which is removed, OSError, or _GivenUp."""
    if reading.given_up:
        raise _GivenUp
    try:
        found = read_private(file)
        if found is None:
            raise PartDamaged("it has been removed.")
        content = _checked(file.name, found)
    except (InputError, PartDamaged) as error:
        with suppress(OSError):
            file.unlink()
        raise PartDamaged(f"The file {file} of the disk cache is not used: {error}") from error
    touched(file)
    return content
