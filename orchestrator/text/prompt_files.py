"""Prompts in a user's files, conversations by lines of JSON; and such prompts as tokens, for a training.

Knows no model but its tokenizer and chat template.
"""

from codecs import BOM_UTF8
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


class PromptLine(msgspec.Struct):
    """Either a `prompt`, which is continued as it is, or the `turns` of a user. Other fields are left alone."""

    prompt: str | None = None
    turns: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    category: str = ""


def read_prompt_file(file: Path) -> Iterator[PromptLine]:
    """Raises InputError for a file that can't be read."""
    try:
        content = read_bounded(file, 256).removeprefix(BOM_UTF8)
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): check the path of the prompts.") from error
    return prompt_lines(content, str(file))


def prompt_lines(content: bytes, file: str) -> Iterator[PromptLine]:
    """Raises InputError naming the file and the line."""
    wanted = 'Write {"prompt": "..."} or {"turns": ["..."]} there, one object a line.'
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=PromptLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{file}, line {number}: {error}. {wanted}") from error
        if (line.prompt is None) == (line.turns is None):
            raise InputError(f"{file}, line {number} needs either a prompt or turns. {wanted}")
        yield line


def write_prompts(files: Iterable[Path], target: Path, out: Path) -> WrittenPrompts:
    """Write the prompts of all files as tokens, a JSON list a line.

    Raises InputError naming the file and the line.
    """
    codec = TextCodec(target)
    template = ChatTemplate(target, codec)
    encoder = msgspec.json.Encoder()
    found = [_conversation(line, codec, template) for file in files for line in read_prompt_file(file)]
    lines = [encoder.encode(prompt) for prompt in found if sum(map(len, prompt)) <= LONGEST_PROMPT]
    try:
        out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_private(out) as file:
            file.write(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise InputError(f"{out} can't be written ({error.strerror}): pass another folder.") from error
    return WrittenPrompts(len(lines), len(found) - len(lines), tuple(sorted(codec.eos)))


def _conversation(line: PromptLine, codec: TextCodec, template: ChatTemplate) -> Prompt:
    if line.turns is None:
        return [codec.encode(line.prompt or "")]
    messages = [{"role": "user", "content": line.turns[0]}]
    tokens = [template.tokens(messages)]
    for turn in line.turns[1:]:
        messages += [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": turn}]
        _, _, behind = template.text(template.plain_messages(messages)).rpartition(_ANSWER)
        tokens.append(codec.encode_rendered(behind, begins=False))
    return tokens
