"""Chat templates: their sources in a model's folder, and the questions to the process that renders them.

Knows no tokenizer. A template is a program of whoever made the model, who is not trusted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.bounded_process import BoundedProcesses, BoundExceeded, Bounds
from protocol.child_process import module_command
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError, PipelineError

BOUNDS = Bounds(seconds=5, memory=512 << 20)
"""A history of 8 MiB in 20,000 turns takes 0.6 s and 130 MiB."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TURNS = ("user", "assistant", "user")
END = "\N{OBJECT REPLACEMENT CHARACTER}end-of-messages\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the content of the last message, to find what the template puts before it."""
REMEDY = "choose another model, or write another template to chat_template.jinja in the model's folder"
_processes = BoundedProcesses(module_command("orchestrator.text.template_process"), BOUNDS)


class Question(msgspec.Struct):
    """A conversation to render. Without messages: only compile the template."""

    source: str
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    answering: bool = False
    """Up to where the answer begins."""
    continued: bool = False
    """Up to the end of the last message, which the answer goes on with."""
    known: Mapping[str, Any] = {}
    """What else the template knows."""


class Answer(msgspec.Struct):
    text: str = ""
    left_out: tuple[str, ...] = ()
    """Roles of the messages whose content the model does not read, one for each message."""
    repaired: tuple[str, ...] = ()
    """What was changed for the template, as sentences."""
    variables: frozenset[str] = frozenset()
    """Names that the template reads, if it was only compiled."""
    wrong: str = ""
    """What is wrong with the template or with the messages, as a sentence whose subject is the template."""


def ask(question: Question) -> Answer:
    """Raises InputError for messages that the template refuses, and for a template that is broken or exceeds its
    bounds."""
    try:
        asked = msgspec.Raw(msgspec.json.encode(question))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The messages are no JSON ({error}): give texts, numbers, lists and objects.") from error
    try:
        found = msgspec.json.decode(_processes.ask(asked), type=Answer)
    except BoundExceeded as exceeded:
        raise InputError(f"The model's chat template {exceeded}: {REMEDY}.") from exceeded
    if found.wrong:
        raise InputError(f"The model's chat template {found.wrong}")
    return found


def template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A separate file takes precedence over the tokenizer's settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} can't be read ({error}): download the model again.") from error
    found = ModelFolder(folder).settings("chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    named = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return {str(each.get("name")): str(each.get("template")) for each in named}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates know by name, from the tokenizer's settings."""
    named = {name: settings.get(name) for name in _SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def written_behind_answers(folder: Path) -> str:
    """What the template in `folder` writes between an answer and the next question; empty if that can't be found.

    Empty for Harmony too, where the same token ends the parts of an answer.
    """
    try:
        settings = ModelFolder(folder).settings("tokenizer_config.json")
        source = template_sources(folder, settings).get("default", "")
        if not source or "<|channel|>" in source:
            return ""
        contents = ("first-question", "whole-answer", "second-question")
        messages = [{"role": role, "content": text} for role, text in zip(_TURNS, contents, strict=True)]
        text = ask(Question(source, messages, known=special_tokens(settings))).text
    except PipelineError:
        return ""
    _, answer, behind = text.partition(contents[1])
    between, question, _ = behind.partition(contents[2])
    return between if answer and question else ""
