"""The key that clients of `serve` must show, from the options of `serve`."""

from pathlib import Path

from orchestrator.http.settings import fresh_key, loopback
from protocol.bounded_files import read_bounded
from protocol.errors import InputError

_SHORTEST_KEY = 8


def server_key(given: str | None, file: Path | None, none: bool, host: str) -> tuple[str | None, bool]:
    """The key that clients must show, and whether it was made here. `none`: every program may ask.

    Raises InputError for a file that can't be read, for a server without a key that other machines can reach, for a
    key that is too short, and for more than one of the options.
    """
    key = _given_key(given, file)
    if none and key:
        raise InputError("--no-api-key and an API key (option or environment) exclude each other: leave one out.")
    if none and not loopback(host):
        raise InputError(f"--host {host} can be reached from other machines: leave --no-api-key out.")
    if key is not None and (len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable()):
        raise InputError(
            f"An API key needs at least {_SHORTEST_KEY} printable ASCII characters: leave it out, and one is made."
        )
    return (None, False) if none else (key, False) if key else (fresh_key(), True)


def _given_key(key: str | None, file: Path | None) -> str | None:
    """The user's key, without blanks around it, which no header can carry. Raises InputError for two of them, and for a
    file that can't be read."""
    if file is None:
        return key and key.strip()
    if key is not None:
        raise InputError(
            "--api-key-file and an API key (option, environment or configuration) exclude each other: leave one out."
        )
    try:
        return read_bounded(file, 1).decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise InputError(f"{file} can't be read ({reason}): put the key alone into it.") from error
