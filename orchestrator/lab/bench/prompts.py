"""The prompts of a bench: a file of the user, or the shipped ones that suit the target. Knows no tokens."""

from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from orchestrator.text.prompt_files import PromptLine, prompt_lines, read_prompt_file
from protocol.errors import InputError

_PYTHON, _CHAT = "prompts.jsonl", "chat_prompts.jsonl"


class BenchPrompt(NamedTuple):
    """Text to continue, or the messages of a user to answer."""

    text: str
    category: str = ""
    """Empty if it has none."""
    chat: bool = False
    """The text is a user's message, which gets the target's chat template."""
    later: tuple[str, ...] = ()
    """The user's further messages, each sent after an answer to the one before."""


def read_prompts(path: Path | None, limit: int | None, *, chat: bool = False) -> list[BenchPrompt]:
    """At most `limit` prompts, one category after the other in turn, so that any number of them is spread evenly.

    A line is {"prompt": ...}, or {"turns": [...]} with the messages of a user. Without a path the prompts are shipped
    ones: messages of users where `chat`, else Python. Raises InputError naming the wrong line.
    """
    shipped = resources.files("orchestrator.lab.bench") / (_CHAT if chat else _PYTHON)
    lines = prompt_lines(shipped.read_bytes(), shipped.name) if path is None else read_prompt_file(path)
    prompts = list(_in_turn(map(_prompt, lines)))[:limit]
    if not prompts:
        raise InputError(f'{path} holds no prompt: write one JSON object a line, {{"prompt": "..."}}.')
    return prompts


def shipped_prompts() -> list[str]:
    """The texts of all shipped prompts, a text a turn."""
    prompts = (prompt for chat in (False, True) for prompt in read_prompts(None, None, chat=chat))
    return [text for prompt in prompts for text in (prompt.text, *prompt.later)]


def _in_turn(prompts: Iterable[BenchPrompt]) -> Iterator[BenchPrompt]:
    """The first prompt of each category, then the second of each, and so on."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return (prompt for prompt in chain.from_iterable(zip_longest(*groups.values())) if prompt is not None)


def _prompt(line: PromptLine) -> BenchPrompt:
    if line.turns is None:
        return BenchPrompt(line.prompt or "", line.category)
    first, *later = line.turns
    return BenchPrompt(first, line.category, chat=True, later=tuple(later))
