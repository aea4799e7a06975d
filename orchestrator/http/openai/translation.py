"""Numbers and switches as clients write them, in the values of this server's fields; and fields that have no effect.
Pure.

The names are those of OpenAI's older APIs; other APIs translate theirs first.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from orchestrator.http.openai.history import Note, shown
from orchestrator.http.request_bodies import converted, decoded
from protocol.messages.base import MAX_CONTEXT

Json = Mapping[str, Any]
S = TypeVar("S", bound="TranslatedRequest")
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
_LIMITS = ("max_tokens", "max_completion_tokens")
_MOST_PROBABLE = 1e-6
"""A top-p that keeps one token."""
_SAY_NOTHING = frozenset(
    (
        "cache_control",
        "client_metadata",
        "keep_alive",
        "metadata",
        "name",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)
"""Fields that ask for nothing that an answer could have."""
_MOST_NAMED = 32
_CHOICES = {"any": "required", "auto": "auto", "none": "none", "required": "required"}
_SCHEMA_WORDS = frozenset(("type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))


class TranslatedRequest(msgspec.Struct, kw_only=True):
    """A request of another API, which becomes a chat."""

    SAME: ClassVar[tuple[str, ...]] = ()
    """Fields that chats have too: only there they are checked."""
    same: dict[str, Any] = {}
    """What the body says in these; set by the server."""


def read_fields(body: bytes, kind: type[S]) -> tuple[S, list[Note]]:
    """A request's body, and a note on its fields that have no effect. Raises ApiError as `decoded` does."""
    repaired: list[str] = []
    fields = with_whole_numbers(decoded(body, dict[str, Any], repaired))
    found = converted(fields, kind)
    found.same = {name: fields[name] for name in kind.SAME if name in fields}
    unread = unused(unknown(fields, (*kind.__struct_fields__, *kind.SAME)))
    return found, [*unread, *(Note("character", text) for text in repaired)]


def unknown(fields: Json, known: Iterable[str]) -> list[str]:
    """Fields that are not `known`, although they ask for something."""
    known = {*known, *_SAY_NOTHING}
    return [name for name, value in fields.items() if name not in known and value not in _NOTHING]


def unused(names: Iterable[str]) -> list[Note]:
    """A note that these fields have no effect; none without any."""
    named = [shown(name) for name in dict.fromkeys(names)]
    more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    text = ", ".join([*named[:_MOST_NAMED], *more])
    return [Note("field", f"These fields have no effect here: {text}.")] if named else []


def with_whole_numbers(fields: Json) -> dict[str, Any]:
    """Floats without a fraction as integers, as clients in JavaScript and Lua write them."""
    return {name: _whole(value) for name, value in fields.items()}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value


def usual(fields: Json) -> dict[str, Any]:
    """The fields with values that this server's have, in place of others that mean the same; what is unknown stays."""
    found = with_whole_numbers(fields)
    for name in _LIMITS:
        # 0 with echo asks for the prompt alone.
        if _is_number(found.get(name)) and found[name] <= 0 and not (found[name] == 0 and found.get("echo")):
            found[name] = MAX_CONTEXT
    if "repeat_penalty" in found:
        found.setdefault("repetition_penalty", found.pop("repeat_penalty"))
    for name, (value, instead) in _MEANINGS.items():
        if _is_number(found.get(name)) and found[name] == value:
            found[name] = instead
    found |= _switch(found.pop("think", None))
    found |= _thinking(found.pop("thinking", None))
    found |= _reasoning(found.pop("reasoning", None))
    for name, repair in (("tool_choice", _choice), ("response_format", _form)):
        if name in found:
            found[name] = repair(found[name])
    return found


_MEANINGS: Mapping[str, tuple[float, Any]] = {
    "n": (0, None),
    "seed": (-1, None),
    "top_k": (-1, 0),
    "top_p": (0, _MOST_PROBABLE),
    "repetition_penalty": (0, 1.0),
}
"""A value that some clients send, and what they mean by it."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _switch(think: Any) -> dict[str, Any]:
    """Ollama's `think`: a switch, or a level."""
    if isinstance(think, str):
        return {"reasoning_effort": {"max": "high", "xhigh": "high", "minimal": "low"}.get(think, think)}
    return _given(enable_thinking=think)


def _thinking(thinking: Any) -> dict[str, Any]:
    """Anthropic's field, which GLM's and DeepSeek's servers have too."""
    if not isinstance(thinking, Mapping):
        return {}
    switch = {"enabled": True, "disabled": False}.get(str(thinking.get("type")))
    budget = thinking.get("budget_tokens") if switch else None
    return _given(enable_thinking=switch, thinking_budget=budget)


def _reasoning(reasoning: Any) -> dict[str, Any]:
    """The field of OpenAI's Responses and of OpenRouter."""
    if not isinstance(reasoning, Mapping):
        return {}
    enabled = reasoning.get("enabled")
    return _given(
        reasoning_effort=reasoning.get("effort"),
        thinking_budget=reasoning.get("max_tokens"),
        enable_thinking=enabled if isinstance(enabled, bool) else None,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return _CHOICES.get(choice, choice)
    if not isinstance(choice, Mapping):
        return choice
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "tool") and isinstance(name, str) and "function" not in choice:
        return {"type": "function", "function": {"name": name}}
    return _CHOICES.get(kind, choice) if isinstance(kind, str) else choice


def _form(form: Any) -> Any:
    """A schema beside `json_object`, and a schema where OpenAI's chats have it one level deeper."""
    if not isinstance(form, Mapping) or form.get("type") not in ("json_object", "json_schema"):
        return form
    inner = form.get("json_schema")
    if not isinstance(inner, Mapping) and (isinstance(form.get("schema"), Mapping) or form["type"] == "json_schema"):
        flat = {name: value for name, value in form.items() if name not in ("type", "json_schema")}
        return {"type": "json_schema", "json_schema": flat} if flat else form
    if isinstance(inner, Mapping) and "schema" not in inner and not _SCHEMA_WORDS.isdisjoint(inner):
        return {"type": "json_schema", "json_schema": {"schema": inner}}
    return form


def function_tools(tools: Iterable[Any]) -> tuple[list[Any], list[Note]]:
    """Tools in the form of chats, those of flat form too; without those that another server would run."""
    found: list[Any] = []
    others: list[str] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or isinstance(tool.get("function"), Mapping):
            found.append(tool)
        elif kind in ("function", "custom", None):
            schema = tool.get("parameters", tool.get("input_schema"))
            named = {name: tool.get(name) for name in ("name", "description", "strict")}
            found.append({"type": "function", "function": _given(**named, parameters=schema)})
        else:
            others.append(shown(kind))
    return found, left_out_tools(others)


def left_out_tools(kinds: Iterable[str]) -> list[Note]:
    """Notes that tools of these kinds are not offered to the model."""
    return [
        Note("tool", f"Tools of the type {kind!r} are not run here: the model does not know of them.")
        for kind in dict.fromkeys(kinds)
    ]
