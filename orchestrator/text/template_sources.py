"""Chat templates as Jinja sees them: their sources in a model's folder, and texts made of them.

Knows no tokenizer. Templates are the model folder's and run in Jinja's sandbox.
"""

import ctypes
import datetime
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InputError, PipelineError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_MOST_SECONDS = 10.0
"""Of one rendering. The longest honest ones take tenths of a second."""
_TURNS = ("user", "assistant", "user")


class _Generation(Extension):
    """`{% generation %}` marks the text that a model was trained on; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses powers: no time limit could end the computation of a huge one."""

    intercepted_binops = frozenset(("**",))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        raise SecurityError("a template may compute no powers")


def environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that templates on Hugging Face expect."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(words: object) -> None:
    raise TemplateError(str(words))


def abandon_renderings() -> None:
    """End all renderings of this process now; those who wait for one get a PipelineError. For its end."""
    for limit in list(_Limited.running):
        limit.stop()


class _TooLong(BaseException):
    """Not an Exception, which Jinja would take for a fault in the template and explain at length."""


class _Limited:
    """Raises `_TooLong` in the thread that entered it after `_MOST_SECONDS`. A template is a program: its loops can
    last for years, and Python ends no thread from outside by other means."""

    running: ClassVar[set["_Limited"]] = set()

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._timer = threading.Timer(_MOST_SECONDS, self.stop)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self.running.add(self)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self.running.discard(self)
            # One that came too late must not hit what follows.
            _raise_in(self._thread, None)

    def stop(self) -> None:
        with self._lock:
            if self in self.running:
                self.running.discard(self)
                _raise_in(self._thread, _TooLong)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in a thread at its next step in Python; None: no longer."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))


def render_template(template: Template, /, **known: Any) -> str:
    """Raises InputError for messages that the template refuses, PipelineError if it does not end."""
    try:
        with _Limited():
            return template.render(known)
    except _TooLong as error:
        raise PipelineError(
            f"The model's chat template did not end within {_MOST_SECONDS:.0f} s, or the server ended: choose another "
            "model if this happens again."
        ) from error
    # A faulty template raises Python's own errors in Jinja.
    except (
        TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise InputError(f"The model's chat template refuses these messages: {words_of(error)}") from error


def template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A separate file takes precedence over the tokenizer's settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} can't be read ({error}): download the model again.") from error
    found = read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
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
        settings = read_json(folder / "tokenizer_config.json")
        source = template_sources(folder, settings).get("default", "")
        if not source or "<|channel|>" in source:
            return ""
        contents = ("first-question", "whole-answer", "second-question")
        messages = [{"role": role, "content": text} for role, text in zip(_TURNS, contents, strict=True)]
        template = environment().from_string(source)
        text = render_template(template, messages=messages, tools=None, **special_tokens(settings))
    except (PipelineError, TemplateError, RecursionError):
        return ""
    _, answer, behind = text.partition(contents[1])
    between, question, _ = behind.partition(contents[2])
    return between if answer and question else ""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file. Raises InputError if it can't be read."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} can't be read ({error}): download the model again.") from error
    return content if isinstance(content, dict) else {}


def words_of(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
