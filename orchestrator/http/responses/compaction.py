"""A summary of a conversation by the model: how it is asked for, the answer, and how it is read when it comes back.

Pure. Codex asks for it by an item at the end of the input of POST /v1/responses, its earlier releases by POST
/v1/responses/compact. OpenAI's servers encrypt the summary. Here it is text behind a heading that says whose it is.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.api.result import Result
from orchestrator.http.generation import ChoiceEnd, OutputEvent
from orchestrator.http.responses.answer import OutputItem, ResponseAnswer, item_event
from orchestrator.text.answer.parts import Arguments, Call, Part, Spoken

Item = Mapping[str, Any]
COMPACTION_TOKENS = 2048
"""Of a summary, if the client gives no limit."""
_HEADING = "Summary of the conversation so far:\n"
_DEMAND = (
    "Summarize this conversation for yourself, because its messages will be dropped and you go on from your summary "
    "alone. Say what the user wants, what was done and found, which files and names matter, and what comes next. Write "
    "the summary only, and call no tool."
)
_PIECES = 64
"""Of the summary's text, which is sent at the end, between two signs of life."""


def demands(items: Sequence[Item]) -> bool:
    """Whether the input ends with the item that asks for a summary of what stands before it."""
    return bool(items) and items[-1].get("type") == "compaction_trigger"


def demand() -> dict[str, Any]:
    """The user's message that asks for the summary."""
    return {"type": "message", "role": "user", "content": _DEMAND}


def summary(item: Item) -> str | None:
    """The text of a compaction that this server made; None for others, which only their maker can read."""
    text = item.get("encrypted_content")
    return text if isinstance(text, str) and text.startswith(_HEADING) else None


def by_users(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages that stay beside a summary."""
    return [dict(item) for item in items if (item.get("type") or "message") == "message" and item.get("role") == "user"]


def compaction(answer: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
    """The response to POST /v1/responses/compact: the user's messages among `items`, then the summary in `answer`."""
    return {
        "id": answer["id"],
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*by_users(items), answer["output"][-1]],
        "usage": answer["usage"],
        **({"warnings": answer["warnings"]} if "warnings" in answer else {}),
    }


class SummaryAnswer(ResponseAnswer):
    """Its last item is the summary, and there is exactly one. A summary that was cut off is one too: clients take an
    incomplete response for a failure."""

    _text = ""
    _pieces = 0

    def _events(self, event: OutputEvent) -> Iterator[OutputItem]:
        yield from super()._events(event)
        if isinstance(event, ChoiceEnd):
            made = _Compaction(self._text)
            self._items.append(made)
            yield item_event("added", len(self._items) - 1, {**made.item, "encrypted_content": ""})
            yield item_event("done", len(self._items) - 1, made.item)
            return
        self._pieces += 1
        if self._pieces % _PIECES == 0:
            yield {"type": "response.in_progress", "response": self._object("in_progress")}

    def _of_part(self, part: Part, logprobs: Sequence[dict[str, Any]]) -> Iterator[OutputItem]:
        match part:
            case Spoken(text):
                self._text += text
            case Call(name=name, arguments=arguments):
                # What the model would do next, though it was asked for words.
                self._text += f"\nNext: {name}({arguments}"
            case Arguments(text, last=last):
                self._text += text + ")" * last
            case _:
                yield from super()._of_part(part, logprobs)

    def _status(self, result: Result) -> str:
        return "completed"

    def _if_cut(self, result: Result) -> list[str]:
        cut = "The summary was cut off at its limit of tokens: give a larger one."
        return [cut] if result.finish_reason == "length" else []


class _Compaction:
    def __init__(self, text: str) -> None:
        self.item = {"type": "compaction", "id": f"cmp_{uuid.uuid4().hex}", "encrypted_content": _HEADING + text}
