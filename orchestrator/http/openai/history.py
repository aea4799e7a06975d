"""Messages of a request, of any API, in the form that chat templates read: what clients send is repaired here. Pure.

`readable` reads what a client sent, whatever model answers. `template_messages` gives it the form that one template
reads. What a template refuses nevertheless is repaired in `orchestrator/text/repairs.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.http.errors import unsupported, wrong
from orchestrator.text.repairs import leading_instructions

Message = dict[str, Any]


class Note(NamedTuple):
    """What of a request was changed or has no effect."""

    kind: str
    """Counted in the log and in the metrics."""
    text: str
    """For the client."""


class History(NamedTuple):
    messages: Sequence[Message]
    notes: Sequence[Note] = ()


def readable(messages: Sequence[Mapping[str, Any]]) -> History:
    """The messages with known roles, with texts as contents, and with calls that have a name and an object of
    arguments.

    Whatever an earlier message contains is read as well as it can be. Raises ApiError 400 if the last one asks for what
    can't be done: it is a user's with a part that is no text, or has no role.
    """
    found, notes = [dict(message) for message in messages], list[Note]()
    for read in _READINGS:
        found, told = read(found)
        notes += told
    return History(found, notes)


def placeholder(kind: object) -> str:
    """What the model reads in place of a part that it can't read."""
    return f"[{shown(kind)} left out]"


_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_OTHER_ROLES = {"human": "user", "model": "assistant", "ai": "assistant"}
THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
"""Parts of earlier answers that most templates leave out too."""
_BILLING = re.compile(r"^x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=\n|$)))+\s*")
"""Claude Code's first text, for its own provider."""
_UNBILLED = "The billing header in the instructions is left out, since it differs in each request."
_FACTS = (
    ("<env>\n", "</env>"),
    ('<context name="gitStatus">', "</context>"),
    ("Git snapshot at conversation start.", "\n```\n"),
)
"""How folder, date and git's status begin and end in the instructions of Cline, Continue, opencode and Qwen Code."""
_MOVED = "Folder, date and git's status in the instructions stand at the beginning of the first message instead."
_SHOWN_CHARACTERS = 64
"""Of a client's word that a note repeats."""
_BROKEN = "arguments"
"""The key under which arguments that are no JSON object are kept as text."""


def _with_known_roles(messages: Sequence[Message]) -> tuple[list[Message], list[Note]]:
    found: list[Message] = []
    unknown: list[object] = []
    for place, message in enumerate(messages):
        role = message.get("role")
        known = _OTHER_ROLES.get(role, role if role in _ROLES else None) if isinstance(role, str) else None
        if known is None and place == len(messages) - 1:
            raise wrong(
                "messages",
                f"A message's role is {shown(role)!r} and must be system, developer, user, assistant or tool.",
            )
        if known is None:
            unknown.append(role)
        found.append({**message, "role": known or "user"})
    told = {f"A message with the role {shown(role)!r} is read as the user's." for role in unknown}
    return found, [Note("role", text) for text in sorted(told)]


def _with_functions_as_tools(messages: Sequence[Message]) -> tuple[list[Message], list[Note]]:
    """Calls and results of OpenAI's older API (`function_call`, the role `function`) as those of tools."""
    found: list[Message] = []
    id = None
    for place, message in enumerate(messages):
        call = message.get("function_call")
        if message["role"] == "assistant" and isinstance(call, Mapping) and not message.get("tool_calls"):
            id = f"call{place:05}"
            others = {name: value for name, value in message.items() if name != "function_call"}
            message = {**others, "tool_calls": [{"id": id, "type": "function", "function": call}]}
        elif message["role"] == "function":
            message = {**message, "role": "tool", "tool_call_id": id}
        found.append(message)
    return found, []


def _with_texts(messages: Sequence[Message]) -> tuple[list[Message], list[Note]]:
    found: list[Message] = []
    missing: list[str] = []
    for place, message in enumerate(messages):
        content, unread = parts(message.get("content")), list[str]()
        texts = [text if (text := _part_text(part)) is not None else _left_out(part, unread) for part in content]
        asks = place == len(messages) - 1 and message["role"] == "user"
        # A picture beside the result of a call is part of that result.
        if unread and asks and (place == 0 or messages[place - 1]["role"] != "tool"):
            raise unsupported(
                "messages",
                f"A message has a part of type {unread[0]!r}, and these models read only text: leave it out.",
            )
        missing += unread
        found.append({**message, "content": "".join(texts)})
    kinds = ", ".join(dict.fromkeys(missing))
    note = f"The model reads only text: parts of these types were left out of earlier messages: {kinds}."
    return found, [Note("part", note)] if missing else []


def _with_lasting_instructions(messages: Sequence[Message]) -> tuple[list[Message], list[Note]]:
    """What differs in each request or session costs what stands behind it, and templates write tools there."""
    found, facts, notes = list[Message](), list[str](), list[Note]()
    leading, behind = leading_instructions(messages)
    rest = [*behind]
    for message in leading:
        text = _BILLING.sub("", message["content"])
        if text != message["content"]:
            notes.append(Note("billing", _UNBILLED))
        for begin, end in _FACTS if rest and rest[0]["role"] == "user" else ():
            head, mark, later = text.partition(begin)
            fact, closed, tail = later.partition(end)
            if closed:
                text = f"{head}[at the beginning of the first message]{tail}"
                facts.append(mark + fact + closed.rstrip())
        found.append({**message, "content": text})
    if facts:
        notes.append(Note("place", _MOVED))
        rest[0] = {**rest[0], "content": "\n\n".join([*facts, rest[0]["content"]])}
    return [*found, *rest], notes


def parts(content: Any) -> Sequence[Any]:
    """Those of a content, which may be one by itself."""
    if content is None:
        return ()
    return content if isinstance(content, list | tuple) else (content,)


def _part_text(part: Any) -> str | None:
    """None if it has no text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None if part is None else msgspec.json.encode(part).decode()
    kind = part.get("type")
    if isinstance(kind, str) and kind in THOUGHTS:
        return ""
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        return text
    if "type" not in part:
        return msgspec.json.encode(part).decode()
    # Anthropic's documents and search results may hold text.
    source = part.get("source")
    inner = source if isinstance(source, Mapping) and source.get("type") in ("text", "content") else part
    held = inner.get("data") if inner.get("type") == "text" else inner.get("content")
    texts = [*map(_plain_text, parts(held))]
    known = [text for text in texts if text is not None]
    return "\n".join(known) if known and len(known) == len(texts) else None


def _plain_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _left_out(part: Any, unread: list[str]) -> str:
    kind = shown(part.get("type") if isinstance(part, Mapping) else type(part).__name__)
    unread.append(kind)
    return placeholder(kind)


def _with_whole_calls(messages: Sequence[Message]) -> tuple[list[Message], list[Note]]:
    found: list[Message] = []
    broken: list[bool] = []
    for message in messages:
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        listed = message.get("tool_calls")
        calls = [whole for call in parts(listed) if (whole := _whole_call(call, broken))]
        # The stream of a chat has the white space before a call, which the template writes too.
        found.append({**rest, "content": rest["content"].rstrip(), "tool_calls": calls} if calls else rest)
    note = "Arguments of earlier calls that are no JSON object are read as text, and calls without a name are left out."
    return found, [Note("call", note)] if broken else []


def _whole_call(call: Any, broken: list[bool]) -> Message | None:
    """None for a call that has no name. `broken` grows by what could not be read as it was meant."""
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function") if isinstance(call.get("function"), Mapping) else call
    if not isinstance(function.get("name"), str):
        broken.append(True)
        return None
    arguments = function.get("arguments")
    if not _is_object(arguments):
        broken.append(True)
        arguments = {_BROKEN: arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()}
    elif not arguments or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    kept = {name: value for name, value in call.items() if name not in ("name", "arguments")}
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _is_object(arguments: Any) -> bool:
    """Whether these are the arguments of a call, as an object or as its JSON; nothing stands for an empty one."""
    if isinstance(arguments, str) and arguments.strip():
        return _object(arguments) is not None
    return arguments is None or isinstance(arguments, str | Mapping)


def shown(word: object) -> str:
    """A client's word as a note repeats it."""
    return str(word)[:_SHOWN_CHARACTERS]


_READINGS: Sequence[Callable[[Sequence[Message]], tuple[list[Message], list[Note]]]] = (
    _with_known_roles,
    _with_functions_as_tools,
    _with_texts,
    _with_lasting_instructions,
    _with_whole_calls,
)

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""What clients and templates call the reasoning of an assistant's message."""
_RESPONSES = "tool_responses"


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, both: bool = True, joined: bool = False, written: bool = False
) -> list[Message]:
    """The messages that `readable` gave, with the arguments of earlier calls as objects, as templates need them.
    Reasoning of earlier turns gets every name that templates know; templates that do not use it leave it out. The
    result of a call gets the name of its function.

    `both`: whether a message with calls may have a text and reasoning. gpt-oss' template refuses such a message; then
    its reasoning is left out. `joined`: results are `tool_responses` of the message with their calls, as the first
    templates of Gemma 4 have it. `written`: arguments stay JSON text, as DeepSeek's templates need them.
    """
    found = _with_names([_with_reasoning(_with_arguments(message, written), both) for message in messages])
    return _with_joined_results(found) if joined else found


def _with_names(messages: Sequence[Message]) -> list[Message]:
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        id = message.get("tool_call_id")
        known = names.get(id) if message["role"] == "tool" and isinstance(id, str) else None
        found.append(message if known is None else {"name": known, **message})
    return found


def _with_joined_results(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool" and found and found[-1].get("tool_calls"):
            content = message["content"]
            response = {"name": message.get("name", "unknown"), "response": _object(content) or content}
            found[-1].setdefault(_RESPONSES, []).append(response)
        else:
            found.append({name: value for name, value in message.items() if name != _RESPONSES})
    return found


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`; None if there is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _with_reasoning(message: Message, both: bool) -> Message:
    found = next((text for name in _REASONING if isinstance(text := message.get(name), str) and text), None)
    rest = {name: value for name, value in message.items() if name not in _REASONING}
    if found is None or message["role"] != "assistant":
        return rest
    if not both and message.get("tool_calls") and message.get("content"):
        return rest
    return {**rest, **dict.fromkeys(_REASONING, found)}


def _with_arguments(message: Mapping[str, Any], written: bool) -> Message:
    def converted(call: Message) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and not written:
            arguments = msgspec.json.decode(arguments)
        elif written and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        return {**call, "function": {**function, "arguments": arguments}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(converted, calls)]} if calls else {**message}
