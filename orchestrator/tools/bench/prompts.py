"""The prompts of a bench: a file of the user, or the shipped ones."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.errors import InputError


class _Line(msgspec.Struct):
    prompt: Annotated[str, Meta(min_length=1)]


def read_prompts(path: Path | None, limit: int | None) -> list[str]:
    """The field `prompt` of each line (JSON objects), at most the first `limit`. No path: the shipped prompts.

    Raises InputError naming the wrong line.
    """
    shipped = resources.files("orchestrator.tools.bench") / "prompts.jsonl"
    content = shipped.read_bytes() if path is None else _bytes(path)
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    prompts = [_prompt(path, number, line) for number, line in lines[:limit]]
    if not prompts:
        raise InputError(f'{path} holds no prompt: write one JSON object a line, {{"prompt": "..."}}.')
    return prompts


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}): check the path of the prompts.") from error


def _prompt(path: Path | None, number: int, line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=_Line).prompt
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f'{path}, line {number}: {error}. Write {{"prompt": "..."}} there.') from error
