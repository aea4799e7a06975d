"""The key in a hosts file, by which the ranks of a divided target know one another."""

import json
from pathlib import Path

from protocol.errors import InputError
from protocol.security.private_files import read_private

_LEAST_CHARACTERS = 32


def ranks_key(hosts_file: str) -> bytes:
    """Raises InputError if the file has no key or a short one, or if other users can read it."""
    try:
        content = read_private(Path(hosts_file))
    except InputError as error:
        raise InputError(
            f"The hosts file {hosts_file} holds a key, so it must be yours, and no other user may read it: run "
            f"`chmod 600 {hosts_file}`, and write another key if somebody could read this one."
        ) from error
    try:
        key = json.loads(content or b"")["key"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"The hosts file {hosts_file} has no key any more: give every host the same file.") from error
    if not isinstance(key, str) or len(key) < _LEAST_CHARACTERS:
        raise InputError(
            f"The key in the hosts file {hosts_file} is no text of {_LEAST_CHARACTERS} random characters or more: "
            "write a longer one."
        )
    return key.encode()
