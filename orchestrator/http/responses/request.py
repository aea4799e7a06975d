"""POST /v1/responses: what may be asked, as the chat that it stands for. Pure.

A call is an item here, in a chat it is part of the assistant's message: adjacent ones are joined. The API has kinds of
tools that a chat does not have: namespaces, which group functions, and custom tools, whose input is any text. A
function of a namespace gets a joined name, a custom tool becomes a function of one string.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, structs

from orchestrator.http.errors import refuse_given, unsupported, wrong
from orchestrator.http.openai.answer_content import call_id
from orchestrator.http.openai.history import Note, shown
from orchestrator.http.openai.request import SHARED_NAMES, ChatRequest, question
from orchestrator.http.openai.translation import TranslatedRequest, left_out_tools, unknown, unused
from orchestrator.http.responses.answer import INPUT, CallItem
from orchestrator.http.responses.compaction import COMPACTION_TOKENS, demand, summary
from orchestrator.text.answer.parts import Call
from protocol.messages.base import MAX_FUNCTIONS

Tool = Mapping[str, Any]
ADDED_TOOLS = "additional_tools"
"""The type of an item that offers tools, as `tools` does."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class Origin(NamedTuple):
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    custom: bool = False


class OfferedTools:
    """The tools of one request. Raises ApiError for a malformed tool."""

    def __init__(self, *lists: Sequence[Tool]) -> None:
        """`lists`: a tool of a later one replaces that of the same name."""
        self.functions: dict[str, dict[str, Any]] = {}
        """In the form of chat requests, by the names that the model knows."""
        self._origins: dict[str, Origin] = {}
        self._left_out: list[str] = []
        for tools in lists:
            self._listed: set[str] = set()
            for tool in tools:
                self._add(tool)

    @property
    def notes(self) -> list[Note]:
        """About tools that the model is not told of."""
        return left_out_tools(self._left_out)

    def call_item(self, place: int, call: Call) -> CallItem:
        """The item at index `place`."""
        origin = self._origins.get(call.name, Origin(call.name))
        return CallItem(place, call_id(call), origin.name, origin.namespace, custom=origin.custom)

    def _add(self, tool: Tool) -> None:
        if tool.get("type") != "namespace":
            self._add_function(tool, None)
            return
        for member in _members(tool):
            self._add_function(member, _name(tool))

    def _add_function(self, tool: Tool, namespace: str | None) -> None:
        kind = tool.get("type") or "function"
        if kind not in ("function", "custom"):
            self._left_out.append(shown(kind))
            return
        origin = Origin(_name(tool), namespace, kind == "custom")
        name = joined_name(origin.name, namespace)
        known = self._origins.get(name, origin)
        if known != origin and (name in self._listed or known[:2] != origin[:2]):
            raise wrong("tools", f"Two of tools would both be called {name!r}: rename one.")
        function = _custom_function(tool) if origin.custom else _function(tool)
        self._listed.add(name)
        self._origins[name] = origin
        self.functions[name] = {"type": "function", "function": {**function, "name": name}}


def joined_name(name: str, namespace: object = None) -> str:
    """What the model calls a tool of a namespace, in the form that Codex gives such names too. `functions` is OpenAI's
    namespace of what has none."""
    if not isinstance(namespace, str) or namespace in ("", "functions"):
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def custom_arguments(text: str) -> str:
    """The arguments of a custom tool's function."""
    return msgspec.json.encode({INPUT: text}).decode()


def _members(namespace: Tool) -> Iterator[Tool]:
    """The tools of a namespace. The first one's description begins with the namespace's."""
    members = namespace.get("tools")
    if not isinstance(members, list) or not all(isinstance(member, Mapping) for member in members):
        raise wrong("tools", f"The namespace {_name(namespace)!r} has no list of tools.")
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
        raise wrong("tools", f"One of tools, of the type {tool.get('type')!r}, has no name.")
    return name


Item = Mapping[str, Any]
Message = dict[str, Any]
_THOUGHTS = ("reasoning_text", "summary_text", "text")


def messages(items: Iterable[Item]) -> list[Message]:
    """The messages of a chat, with the parts of this API as contents. Items that a chat does not have become parts of
    the assistant's."""
    found: list[Message] = []
    thoughts: list[str] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == ADDED_TOOLS:
            continue
        if kind == "reasoning":
            thoughts.append(_reasoning(item))
            continue
        if kind == "message":
            found.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "custom_tool_call" and isinstance(item.get("input"), str):
            _add_call(found, item, item.get("name"), custom_arguments(item["input"]), any(thoughts))
        elif kind in ("function_call", "custom_tool_call", "mcp_call"):
            _add_call(found, item, item.get("name"), item.get("arguments"), any(thoughts))
            if kind == "mcp_call":
                found.append(_output(item))
        elif (known := summary(item)) is not None:
            found.append({"role": "user", "content": known})
        elif isinstance(kind, str) and kind.endswith("_output"):
            found.append(_output(item))
        elif isinstance(kind, str) and kind.endswith("_call") and isinstance(item.get("call_id"), str):
            given = next((item[name] for name in _ARGUMENTS if item.get(name) is not None), None)
            _add_call(found, item, kind.removesuffix("_call"), given, any(thoughts))
        else:
            found.append({"role": "assistant", "content": [{"type": kind}]})
        if any(thoughts) and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = "\n".join(filter(None, thoughts))
        thoughts = []
    return found


_ARGUMENTS = ("arguments", "action", "operation", "input")
"""What calls of OpenAI's own tools call their arguments."""


def _reasoning(item: Item) -> str:
    """The text of a reasoning item, or its summary; empty if it is encrypted."""
    parts = item.get("content") or item.get("summary") or ()
    if not isinstance(parts, list | tuple):
        return ""
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in _THOUGHTS]
    return "".join(text for text in texts if isinstance(text, str))


def _add_call(found: list[Message], item: Item, name: object, arguments: object, new: bool) -> None:
    """`new`: reasoning came before, which begins a message."""
    name = joined_name(name, item.get("namespace")) if isinstance(name, str) else name
    call = {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments or {}}}
    if found and found[-1]["role"] == "assistant" and not new:
        found[-1].setdefault("tool_calls", []).append(call)
    else:
        found.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _output(item: Item) -> Message:
    """The result of a call, which has it as its output or its error."""
    output = item.get("output") if item.get("output") is not None else item.get("error")
    known = "output" in item or output is not None
    content = output if known else [{"type": item.get("type")}]
    return {"role": "tool", "tool_call_id": _call_id(item), "content": content}


def _call_id(item: Item) -> object:
    return item.get("call_id", item.get("id"))


Items = list[dict[str, Any]]
_CALLED = {
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
"""What fields of the chat are called here."""
_PROBE_TOKENS = 16
_LOGPROBS = "message.output_text.logprobs"


class Response(TranslatedRequest, kw_only=True):
    SAME = ("model", "stream", *SHARED_NAMES, "seed", "parallel_tool_calls", "reasoning_eos", "user")

    input: str | list[Any] = msgspec.field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Any = None
    tools: Annotated[Items, Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    top_logprobs: Any = None
    include: list[str] | None = None
    truncation: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def items(self) -> Items:
        """The input, always as items. A probe for the server asks for next to nothing, and says nothing."""
        given = [self.input] if isinstance(self.input, str) else self.input or ([""] if self._probes else [])
        return [
            item if isinstance(item, dict) else {"type": "message", "role": "user", "content": item} for item in given
        ]

    @property
    def _probes(self) -> bool:
        limit = self.max_output_tokens
        return isinstance(limit, int) and 0 < limit <= _PROBE_TOKENS

    @property
    def _begun(self) -> bool:
        """Whether the last item is the beginning of the answer: the assistant's message that is not finished."""
        last = self.items[-1] if self.items else {}
        return last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete")

    def offered(self, before: Sequence[Item]) -> OfferedTools:
        """Those of the request, of items before it and of its own. Raises ApiError for a malformed tool."""
        added = [item.get("tools") for item in (*before, *self.items) if item.get("type") == ADDED_TOOLS]
        if not all(isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools) for tools in added):
            raise wrong("input", f"An item of the type {ADDED_TOOLS} has a list of tools.")
        return OfferedTools(self.tools or (), *(tools or () for tools in added))

    @property
    def kept(self) -> bool:
        """Whether the answer may be referred to later."""
        return self.store is not False

    def demanding_summary(self, items: Items) -> "Response":
        """The request for a summary of `items`, in words: neither a call nor the form of an answer may be demanded."""
        limit = self.max_output_tokens or COMPACTION_TOKENS
        return structs.replace(
            self, input=[*items, demand()], max_output_tokens=limit, tool_choice=None, text=None, top_logprobs=None
        )

    def chat(self, before: Sequence[Item], notes: Sequence[Note] = ()) -> ChatRequest:
        """`before`: items of the conversation so far. Raises ApiError, in the words of this API."""
        offered = self.offered(before)
        self._refuse_unsupported(offered)
        heading = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields = {
            **self.same,
            "messages": [*heading, *messages([*before, *self.items])],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [*offered.functions.values()] or None,
            "tool_choice": _choice(self.tool_choice),
            "logprobs": self._token_logprobs or None,
            "top_logprobs": self.top_logprobs or None,
            "response_format": (self.text or {}).get("format"),
            "reasoning": self.reasoning,
            "continue_final_message": self._begun or None,
        }
        return question(fields, ChatRequest, [*notes, *self._unused, *offered.notes], called=_CALLED)

    @property
    def _unused(self) -> list[Note]:
        notes = unused(f"text.{name}" for name in unknown(self.text or {}, ("format",)))
        if self.truncation not in (None, "disabled"):
            notes.append(Note("field", "truncation has no effect: nothing is left out of a conversation."))
        return notes

    @property
    def _token_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def _refuse_unsupported(self, offered: OfferedTools) -> None:
        if not self.input and self.previous_response_id is None and not (self.instructions or self._probes):
            raise wrong("input", "There is no input: give a text, or a list of items.")
        if self._token_logprobs and offered.functions:
            raise unsupported(
                "top_logprobs", "Log-probabilities are told of texts alone: leave them out, or the tools."
            )
        refuse_given(self, _NOT_DONE)


_NOT_DONE = {
    "background": "wait for the answer, or stream it",
    "conversation": "continue by previous_response_id",
    "prompt": "send its text as instructions and input",
}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        # Tools that are not run here are not offered either.
        tools = [_choice(tool) for tool in choice["tools"] if isinstance(tool, Mapping) and "name" in tool]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    if not isinstance(choice, Mapping) or "name" not in choice:
        return choice
    kind, name = choice.get("type"), choice["name"]
    if isinstance(name, str):
        name = joined_name(name, choice.get("namespace"))
    return {"type": "function" if kind == "custom" else kind, "function": {"name": name}}
