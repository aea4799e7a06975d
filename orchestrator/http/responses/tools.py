"""Tools of the Responses API as functions of a chat, and calls of these functions as items. Pure.

The API has kinds of tools that a chat does not have: namespaces, which group functions, and custom tools, whose input
is any text. A function of a namespace gets a joined name, a custom tool becomes a function of one string.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.http.errors import ApiError
from orchestrator.http.responses.output_items import CustomToolCallItem, ToolCallItem

Tool = Mapping[str, Any]
_INPUT = "input"
"""The only parameter of a custom tool's function."""
_KIND_CHARACTERS = 64
"""Of a tool's type that a warning repeats."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class Origin(NamedTuple):
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    custom: bool = False


class OfferedTools:
    """The tools of one request. Raises ApiError for a malformed tool."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.functions: list[dict[str, Any]] = []
        """In the form of chat requests."""
        self._origins: dict[str, Origin] = {}
        self._left_out: list[str] = []
        for tool in tools:
            self._add(tool)

    @property
    def warnings(self) -> list[str]:
        """About tools that the model is not told of."""
        return [
            f"Tools of the type {kind!r} are not run here: the model does not know of them."
            for kind in dict.fromkeys(self._left_out)
        ]

    def call_item(self, place: int, call: Mapping[str, Any]) -> ToolCallItem | CustomToolCallItem:
        """The item at index `place` for a call in the form of chat responses."""
        function = call["function"]
        origin = self._origins.get(function["name"], Origin(function["name"]))
        if origin.custom:
            text = custom_input(function["arguments"])
            return CustomToolCallItem(place, call["id"], origin.name, text, origin.namespace)
        return ToolCallItem(place, {**call, "function": {**function, "name": origin.name}}, origin.namespace)

    def _add(self, tool: Tool) -> None:
        if tool.get("type") != "namespace":
            self._add_function(tool, None)
            return
        for member in _members(tool):
            self._add_function(member, _name(tool))

    def _add_function(self, tool: Tool, namespace: str | None) -> None:
        kind = tool.get("type") or "function"
        if kind not in ("function", "custom"):
            self._left_out.append(str(kind)[:_KIND_CHARACTERS])
            return
        origin = Origin(_name(tool), namespace, kind == "custom")
        name = joined_name(origin.name, namespace)
        if self._origins.setdefault(name, origin) != origin:
            raise _wrong(f"Two of tools would both be called {name!r}: rename one.")
        function = _custom_function(tool) if origin.custom else _function(tool)
        self.functions.append({"type": "function", "function": {**function, "name": name}})


def joined_name(name: str, namespace: object = None) -> str:
    """What the model calls a tool of a namespace, in the form that Codex gives such names too."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def custom_arguments(text: str) -> str:
    """The arguments of a custom tool's function."""
    return msgspec.json.encode({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input of a custom tool; the arguments themselves if the model gave the function others."""
    found = msgspec.json.decode(arguments)
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _members(namespace: Tool) -> Iterator[Tool]:
    """The tools of a namespace. The first one's description begins with the namespace's."""
    members = namespace.get("tools")
    if not isinstance(members, list) or not all(isinstance(member, Mapping) for member in members):
        raise _wrong(f"The namespace {_name(namespace)!r} has no list of tools.")
    about = namespace.get("description")
    for place, member in enumerate(members):
        yield {**member, "description": _paragraphs(about, member.get("description"))} if place == 0 else member


def _function(tool: Tool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in names if tool.get(name) is not None}


def _custom_function(tool: Tool) -> dict[str, Any]:
    form = tool.get("format")
    about = None
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        about = f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return {"description": _paragraphs(tool.get("description"), about), "parameters": _CUSTOM_PARAMETERS}


def _paragraphs(*texts: object) -> str:
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


def _name(tool: Tool) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"One of tools, of the type {tool.get('type')!r}, has no name.")
    return name


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="tools")
