"""Repairs a conversation that a chat template refuses, or whose instructions it leaves out: the smallest changes after
which it is rendered. Pure.

Knows no template. What is changed depends on the order and the roles of the messages, not on their texts, so the
beginning of a conversation is repaired in the same way when it goes on.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Messages = Sequence[dict[str, Any]]
"""With texts as contents."""
Tools = Sequence[Mapping[str, Any]] | None
INSTRUCTIONS = ("system", "developer")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_LETTERS = 9


class Refusal(Exception):
    """The template refuses a conversation."""


class Conversation(NamedTuple):
    """What a template renders."""

    messages: Messages
    tools: Tools = None


class Repair(NamedTuple):
    """One way to change a conversation."""

    apply: Callable[[Conversation], Conversation]
    note: str = ""
    """What was changed, for the client; empty for a change that loses nothing."""
    case: Messages = ()
    """A conversation that a template can refuse without the repair though it takes the beginning. If so, the repair is
    made in every conversation, so that a beginning is read as it will be later."""


class Repaired(NamedTuple):
    """A conversation in the form that a template renders best."""

    conversation: Conversation
    left_out: tuple[str, ...] = ()
    """Roles of the messages whose content the template does not render, one for each message."""
    notes: tuple[str, ...] = ()


def repaired(conversation: Conversation, render: Callable[[Conversation], str]) -> Repaired:
    """`conversation` with those of `REPAIRS` without which the template refuses it or leaves out instructions, and
    those whose case it refuses.

    If no repairs have all instructions rendered, it is the form that has most. `render` raises Refusal for what the
    template refuses. If it refuses every form, `conversation` is returned as it is.
    """
    messages, tools = conversation
    marked = Conversation(
        [{**each, "content": each["content"] and _mark(place)} for place, each in enumerate(messages)], tools
    )

    def text_of(conversation: Conversation) -> str | None:
        try:
            return render(conversation)
        except Refusal:
            return None

    def left_out(repairs: Sequence[Repair]) -> tuple[str, ...] | None:
        text = text_of(_applied(repairs, marked))
        return None if text is None else _left_out(messages, text)

    settled = [repair for repair in REPAIRS if repair.apply(conversation) != conversation and _settled(repair, text_of)]
    best: tuple[Sequence[Repair], tuple[str, ...] | None] = (settled, left_out(settled))
    tried, form = settled, _applied(settled, marked)
    for repair in REPAIRS:
        if not _lost(best[1]):
            break
        more = [each for each in REPAIRS if each in tried or each is repair]
        before, form = form, _applied(more, marked)
        if form == before:
            continue
        tried = more
        found = left_out(tried)
        if _lost(found) < _lost(best[1]):
            best = (tried, found)
    for repair in reversed([each for each in best[0] if each not in settled]):
        fewer = [each for each in best[0] if each is not repair]
        found = left_out(fewer)
        if _lost(found) <= _lost(best[1]):
            best = (fewer, found)
    repairs, missing = best
    return Repaired(
        _applied(repairs, conversation), missing or (), tuple(repair.note for repair in repairs if repair.note)
    )


def _settled(repair: Repair, text_of: Callable[[Conversation], str | None]) -> bool:
    """Whether the template refuses the repair's case and takes it repaired."""
    case = Conversation(repair.case)
    return bool(repair.case) and text_of(case) is None and text_of(repair.apply(case)) is not None


def _applied(repairs: Iterable[Repair], conversation: Conversation) -> Conversation:
    for repair in repairs:
        conversation = repair.apply(conversation)
    return conversation


def _lost(left_out: Sequence[str] | None) -> float:
    """Instructions among these roles; infinitely many if the template refused."""
    return float("inf") if left_out is None else sum(role in INSTRUCTIONS for role in left_out)


def _left_out(messages: Messages, text: str) -> tuple[str, ...]:
    """`text`: of the marked messages."""
    spoken = [(place, message["role"]) for place, message in enumerate(messages) if message["content"]]
    rendered = set(_MARK.findall(text))
    return tuple(role for place, role in spoken if _mark(place) not in rendered)


_MARK = re.compile(r"content-\d+-of-messages")


def _mark(place: int) -> str:
    return f"content-{place}-of-messages"


# The changes --------------------------------------------------------------------------------------


def _described_tools(tools: Tools) -> Tools:
    return None if tools is None else [_described(tool) for tool in tools]


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    known = {name: value for name, value in function.items() if value is not None}
    whole = {"description": "", "parameters": {"type": "object", "properties": {}}, **known}
    if not isinstance(whole["parameters"], Mapping):
        return tool
    return {**tool, "function": {**whole, "parameters": {"type": "object", "properties": {}, **whole["parameters"]}}}


def _short_ids(messages: Messages) -> Messages:
    """Ids of nine letters and digits; a result without an id answers the first call that has none."""
    found: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for place, message in enumerate(messages):
        if calls := _calls(message):
            named = [{**call, "id": _short(call.get("id"), f"{place} {number}")} for number, call in enumerate(calls)]
            open_ids = [call["id"] for call in named]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            id = message.get("tool_call_id")
            short = _short(id, str(place)) if id or not open_ids else open_ids[0]
            open_ids = [each for each in open_ids if each != short]
            message = {**message, "tool_call_id": short}
        found.append(message)
    return found


def _short(id: object, otherwise: str) -> str:
    text = id if isinstance(id, str) and id else otherwise
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_ID_LETTERS]


def _one_call_a_turn(messages: Messages) -> Messages:
    """Several calls of a turn as several turns, each with its results behind it."""
    found: list[dict[str, Any]] = []
    rest = list(reversed(messages))
    while rest:
        message = rest.pop()
        calls = _calls(message)
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[list[dict[str, Any]]] = [[] for _ in calls]
        ids = [call.get("id") for call in calls]
        number = 0
        while rest and rest[-1]["role"] == "tool":
            result = rest.pop()
            id = result.get("tool_call_id")
            results[ids.index(id) if id is not None and id in ids else min(number, len(calls) - 1)].append(result)
            number += 1
        for place, call in enumerate(calls):
            turn = message if place == 0 else {"role": "assistant", "content": ""}
            found += [{**turn, "tool_calls": [call]}, *results[place]]
    return found


def _developer_as_system(messages: Messages) -> Messages:
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _leading_joined(messages: Messages) -> Messages:
    leading, others = leading_instructions(messages)
    text = _paragraphs(*(message["content"] for message in leading))
    return [{"role": "system", "content": text}, *others] if text else others


def _later_in_users_turns(messages: Messages) -> Messages:
    """Instructions behind the leading ones become text of the user's turn that precedes or follows. Without one beside
    them they are a user's turn."""
    leading, others = leading_instructions(messages)
    found: list[dict[str, Any]] = list(leading)
    waiting = False
    """The last turn is an instruction, to which a user's text may be joined."""
    for message in others:
        behind = len(found) > len(leading) and found[-1]["role"] == "user"
        instructs = message["role"] in INSTRUCTIONS
        if behind and (instructs or (waiting and message["role"] == "user")):
            found[-1] = _joined(found[-1], message)
            waiting = waiting and instructs
        else:
            found.append({**message, "role": "user"} if instructs else message)
            waiting = instructs
    return found


def _users_turn_first(messages: Messages) -> Messages:
    leading, others = leading_instructions(messages)
    if others and others[0]["role"] == "user":
        return messages
    return [*leading, {"role": "user", "content": ""}, *others]


def _leading_in_first_users_turn(messages: Messages) -> Messages:
    leading, others = leading_instructions(messages)
    text = _paragraphs(*(message["content"] for message in leading))
    if not text:
        return others
    first = {"role": "user", "content": text}
    if others and others[0]["role"] == "user":
        return [{**others[0], **_joined(first, others[0])}, *others[1:]]
    return [first, *others]


def _users_text_in_results(messages: Messages) -> Messages:
    """A user's turn directly behind the result of a call becomes part of it, unless the assistant spoke since the turn
    before: templates that want alternation do not count calls and results."""
    found: list[dict[str, Any]] = []
    spoke = ""
    """The role of the last turn but calls and results."""
    for message in messages:
        if message["role"] == spoke == "user" and found[-1]["role"] == "tool":
            found[-1] = _joined(found[-1], message)
            continue
        found.append(message)
        if message["role"] in ("user", "assistant") and not _calls(message):
            spoke = message["role"]
    return found


def _calls_with_text(messages: Messages) -> Messages:
    """The assistant's texts and its calls in the turn behind them as one turn, unless the user speaks directly behind
    their results: then the text is the turn between two of the user's."""
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if _calls(message) and _behind_results(messages, place) != "user":
            while found and found[-1]["role"] == "assistant" and not _calls(found[-1]):
                message = {**message, **_joined(found.pop(), message)}
        found.append(message)
    return found


def _behind_results(messages: Messages, place: int) -> str:
    """The role of the turn behind the results of the calls at `place`; empty if there is none."""
    place += 1
    while place < len(messages) and messages[place]["role"] == "tool":
        place += 1
    return messages[place]["role"] if place < len(messages) else ""


def _turns_joined(messages: Messages) -> Messages:
    """Turns of the user in succession as one, and those of the assistant that have no calls."""
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else {"role": ""}
        spoken = not _calls(before) and not _calls(message)
        if spoken and message["role"] in ("user", "assistant") and message["role"] == before["role"]:
            found[-1] = {**message, **_joined(before, message)}
        else:
            found.append(message)
    return found


def calls_as_text(messages: Messages) -> list[dict[str, Any]]:
    """Calls at the end of the assistant's text, in the form of `families/generic.py`, and results as a user's turn, one
    for those in succession."""
    spoken: list[dict[str, Any]] = []
    result = False
    for message in messages:
        before, result = result, message["role"] == "tool"
        if calls := _calls(message):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**rest, "content": "\n".join(filter(None, (message["content"], *map(_written_call, calls))))}
        elif result:
            # Small models repeat the tags that others know around results.
            text = f"Result of {message.get('name') or 'a call'}:\n{message['content']}"
            message = {"role": "user", "content": f"{spoken.pop()['content']}\n\n{text}" if before else text}
        spoken.append(message)
    return spoken


def _written_call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else ("", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}\n</tool_call>'


def leading_instructions(messages: Messages) -> tuple[Messages, Messages]:
    """The instructions before all other messages, and the messages from the first other one on."""
    end = next((place for place, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages))
    return messages[:end], messages[end:]


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {**first, "content": _paragraphs(first["content"], second["content"])}


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _of_messages(change: Callable[[Messages], Messages]) -> Callable[[Conversation], Conversation]:
    return lambda conversation: Conversation(change(conversation.messages), conversation.tools)


_TEXT_THEN_CALLS: Messages = (
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c" * _ID_LETTERS, "type": "function", "function": {"name": "c", "arguments": {}}}],
    },
    {"role": "tool", "name": "c", "tool_call_id": "c" * _ID_LETTERS, "content": "D"},
    {"role": "assistant", "content": "E"},
)

REPAIRS = (
    Repair(
        lambda conversation: Conversation(conversation.messages, _described_tools(conversation.tools)),
        "The chat template needs a description and parameters of every tool: empty ones were added.",
    ),
    Repair(
        _of_messages(_short_ids),
        "The chat template needs ids of calls with nine letters and digits: other ids were replaced.",
    ),
    Repair(
        _of_messages(_one_call_a_turn),
        "The chat template takes one call in a turn: further calls became turns of their own.",
    ),
    Repair(_of_messages(_developer_as_system)),
    Repair(_of_messages(_leading_joined)),
    Repair(
        _of_messages(_later_in_users_turns),
        "The chat template takes system messages at the beginning alone: later ones became text of the user's turn "
        "beside them.",
    ),
    Repair(
        _of_messages(_users_turn_first),
        "The chat template needs a user's turn at the beginning: an empty one was added.",
    ),
    Repair(
        _of_messages(_leading_in_first_users_turn),
        "The chat template takes no system message: its text became the beginning of the first user's turn.",
    ),
    Repair(
        _of_messages(_turns_joined),
        "The chat template needs turns of user and assistant in alternation: turns of one role in succession were "
        "joined.",
    ),
    Repair(
        _of_messages(_calls_with_text),
        "The chat template takes no calls in a turn of their own behind a text: the two turns were joined.",
        case=_TEXT_THEN_CALLS,
    ),
    Repair(
        _of_messages(_users_text_in_results),
        "The chat template takes no user's turn behind the result of a call: its text became part of the result.",
    ),
    Repair(
        _of_messages(lambda messages: _turns_joined(calls_as_text(messages))),
        "The chat template takes no calls and results in this conversation: they became text.",
    ),
)
"""From the smallest change to the largest, each behind those that can make it necessary."""
