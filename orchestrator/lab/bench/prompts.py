"""The prompts of a bench: a file of the user, or the shipped ones that suit the target. Knows no tokens."""

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from protocol.bounded_files import read_bounded
from protocol.errors import InputError

_PYTHON, _CHAT = "prompts.jsonl", "chat_prompts.jsonl"
_Text = Annotated[str, Meta(min_length=1)]


class BenchPrompt(NamedTuple):
    """Text to continue, or the messages of a user to answer."""

    text: str
    category: str = ""
    """Empty if it has none."""
    chat: bool = False
    """The text is a user's message, which gets the target's chat template."""
    later: tuple[str, ...] = ()
    """The user's further messages, each sent after an answer to the one before."""


class _Line(msgspec.Struct):
    """Either `prompt`, or `turns` of a user."""

    prompt: _Text | None = None
    turns: Annotated[tuple[_Text, ...], Meta(min_length=1)] | None = None
    category: str = ""


def read_prompts(path: Path | None, limit: int | None, *, chat: bool = False) -> list[BenchPrompt]:
    """At most `limit` prompts, one category after the other in turn, so that any number of them is spread evenly.

    A line is {"prompt": ...}, or {"turns": [...]} with the messages of a user. Without a path the prompts are shipped
    ones: messages of users where `chat`, else Python. Raises InputError naming the wrong line.
    """
    shipped = resources.files("orchestrator.lab.bench") / (_CHAT if chat else _PYTHON)
    content = shipped.read_bytes() if path is None else _bytes(path)
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    prompts = list(_in_turn([_prompt(path, number, line) for number, line in lines]))[:limit]
    if not prompts:
        raise InputError(f'{path} holds no prompt: write one JSON object a line, {{"prompt": "..."}}.')
    return prompts


def shipped_prompts() -> list[str]:
    """The texts of all shipped prompts, a text a turn."""
    prompts = (prompt for chat in (False, True) for prompt in read_prompts(None, None, chat=chat))
    return [text for prompt in prompts for text in (prompt.text, *prompt.later)]


def _in_turn(prompts: Sequence[BenchPrompt]) -> Iterator[BenchPrompt]:
    """The first prompt of each category, then the second of each, and so on."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return (prompt for prompt in chain.from_iterable(zip_longest(*groups.values())) if prompt is not None)


def _bytes(path: Path) -> bytes:
    try:
        return read_bounded(path, 256).removeprefix(BOM_UTF8)
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}): check the path of the prompts.") from error


def _prompt(path: Path | None, number: int, content: bytes) -> BenchPrompt:
    wanted = 'Write {"prompt": "..."} or {"turns": ["..."]} there.'
    try:
        line = msgspec.json.decode(content, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}, line {number}: {error}. {wanted}") from error
    if (line.prompt is None) == (line.turns is None):
        raise InputError(f"{path}, line {number} needs either a prompt or turns. {wanted}")
    if line.turns is not None:
        first, *later = line.turns
        return BenchPrompt(first, line.category, chat=True, later=tuple(later))
    assert line.prompt is not None
    return BenchPrompt(line.prompt, line.category)
