"""The items from which a response was generated, in the form in which the API returns them, page by page. Pure."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.http.errors import ApiError

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_MOST = 100
_DEFAULT = 20


def stored_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """`item` with an id, a type and a status, and with parts for a text."""
    kind = item.get("type") or "message"
    drawn = {"id": f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}", "status": "completed"}
    given = {name: value for name, value in item.items() if value is not None}
    return {**drawn, **given, "type": kind, **({"content": _parts(item)} if kind == "message" else {})}


def page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The list of items that `order`, `after` and `limit` of `query` ask for. Raises ApiError."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise _wrong("order", "order is asc or desc.")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise _wrong("after", f"after is {after!r}, and no item has this id.")
        ordered = ordered[ids.index(after) + 1 :]
    limit = _limit(query.get("limit"))
    found = ordered[:limit]
    ends = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    more = len(ordered) > limit
    return {"object": "list", "data": found, "first_id": ends[0], "last_id": ends[1], "has_more": more}


def _parts(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    if not isinstance(content, str):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MOST):
        raise _wrong("limit", f"limit is a number from 1 to {_MOST}.")
    return int(text)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
