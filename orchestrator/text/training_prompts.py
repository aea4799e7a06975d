"""Prompts for a target that is to answer them, from a user's files: conversations by lines of JSON.

Knows no model but its tokenizer and chat template.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.bounded_files import read_bounded
from protocol.contracts.training import LONGEST_PROMPT
from protocol.errors import InputError
from protocol.security.private_files import open_private

_ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for an answer in a conversation, to find where the turn behind it begins."""

Prompt = list[list[int]]
"""Tokens of the turns; each but the first also has what the template puts behind the answer before it."""


class WrittenPrompts(NamedTuple):
    """Prompts of a training's files."""

    kept: int
    left_out: int
    """Further ones, which are longer than LONGEST_PROMPT."""
    ends: tuple[int, ...]
    """Tokens that end the target's answers."""


class _Line(msgspec.Struct):
    """Either `turns` of a user or a `prompt`, which is continued as it is. Other fields are left alone."""

    turns: Annotated[list[str], Meta(min_length=1)] | None = None
    prompt: str | None = None


def write_prompts(files: Iterable[Path], target: Path, out: Path) -> WrittenPrompts:
    """Write the prompts of all files as tokens, a JSON list a line.

    Raises InputError naming the file and the line.
    """
    codec = TextCodec(target)
    template = ChatTemplate(target, codec)
    encoder = msgspec.json.Encoder()
    found = [prompt for file in files for prompt in _prompts(file, codec, template)]
    lines = [encoder.encode(prompt) for prompt in found if sum(map(len, prompt)) <= LONGEST_PROMPT]
    try:
        out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_private(out) as file:
            file.write(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise InputError(f"{out} can't be written ({error.strerror}): pass another folder.") from error
    return WrittenPrompts(len(lines), len(found) - len(lines), tuple(sorted(codec.eos)))


def _prompts(file: Path, codec: TextCodec, template: ChatTemplate) -> Iterator[Prompt]:
    for number, line in enumerate(_content(file).splitlines(), start=1):
        if line.strip():
            yield _conversation(file, number, line, codec, template)


def _conversation(file: Path, number: int, line: bytes, codec: TextCodec, template: ChatTemplate) -> Prompt:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f'{file}, line {number}: {error}. Write {{"turns": ["..."]}} there, one object a line.'
        ) from error
    if found.prompt is not None:
        return [codec.encode(found.prompt)]
    if not found.turns:
        raise InputError(f'{file}, line {number} has neither turns nor a prompt. Write {{"turns": ["..."]}} there.')
    messages = [{"role": "user", "content": found.turns[0]}]
    tokens = [template.tokens(messages)]
    for turn in found.turns[1:]:
        messages += [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": turn}]
        _, _, behind = template.text(template.plain_messages(messages)).rpartition(_ANSWER)
        tokens.append(codec.encode_rendered(behind, begins=False))
    return tokens


def _content(file: Path) -> bytes:
    try:
        return read_bounded(file, 256)
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): check the path of the prompts.") from error
