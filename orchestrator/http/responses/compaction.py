"""POST /v1/responses/compact: a summary of a conversation by the model, and how it is read when it comes back. Pure.

OpenAI's servers encrypt the summary. Here it is text behind a heading that says whose it is.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]
COMPACTION_TOKENS = 2048
"""Of a summary, if the client gives no limit."""
_HEADING = "Summary of the conversation so far:\n"
_DEMAND = (
    "Summarize this conversation for yourself, because its messages will be dropped and you go on from your summary "
    "alone. Say what the user wants, what was done and found, which files and names matter, and what comes next. Write "
    "the summary only, and call no tool."
)


def demand() -> dict[str, Any]:
    """The item that asks for the summary."""
    return {"type": "message", "role": "user", "content": _DEMAND}


def summary(item: Item) -> str | None:
    """The text of a compaction that this server made; None for others, which only their maker can read."""
    text = item.get("encrypted_content")
    return text if isinstance(text, str) and text.startswith(_HEADING) else None


def compaction(answer: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
    """The response: the user's messages among `items`, then the summary, which is the text of `answer`."""
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    made = {"type": "compaction", "id": f"cmp_{uuid.uuid4().hex}", "encrypted_content": _HEADING + "".join(texts)}
    kept = [dict(item) for item in items if (item.get("type") or "message") == "message" and item.get("role") == "user"]
    return {
        "id": answer["id"],
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*kept, made],
        "usage": answer["usage"],
        **({"warnings": answer["warnings"]} if "warnings" in answer else {}),
    }
