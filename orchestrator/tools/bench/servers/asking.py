"""Asking a server over HTTP, and what came of it in a word. Knows no particular question."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from orchestrator.tools.bench.servers.running import Running

PROMPT = "def quicksort(items):"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "import"}]}


class NoAnswer(Exception):
    """None came in time."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: httpx.Headers

    @property
    def texts(self) -> list[str]:
        """Of a completion; none if it was refused."""
        choices = self.body.get("choices", []) if isinstance(self.body, dict) else []
        return [choice.get("text") or (choice.get("message") or {}).get("content") or "" for choice in choices]

    @property
    def error(self) -> str:
        """Its status, and whether it has the shape of OpenAI's errors."""
        known = isinstance(self.body, dict) and isinstance(self.body.get("error"), dict)
        return f"{self.status}{'' if known and self.body['error'].get('message') else ', another shape'}"


def ask(found: Running, path: str, body: Any = None, *, key: bool = True, **headers: str) -> Answer | None:
    """None if the server hung up. A body that is bytes is sent as it is. Raises NoAnswer."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    with found.client(key) as client:
        try:
            response = client.request("GET" if body is None else "POST", path, content=content, headers=sent)
        except httpx.TimeoutException as error:
            raise NoAnswer from error
        except httpx.TransportError:
            return None
    try:
        return Answer(response.status_code, response.json(), response.headers)
    except ValueError:
        return Answer(response.status_code, response.text, response.headers)


def complete(found: Running, **fields: Any) -> Answer | None:
    """Greedy and short, unless `fields` say otherwise."""
    return ask(found, COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, **fields})


def chat(found: Running, **fields: Any) -> Answer | None:
    return ask(found, CHAT, {**HELLO, "temperature": 0, "max_tokens": 16, **fields})


def effect(answer: Answer | None, honoured: Callable[[Answer], bool], otherwise: str = "ignored") -> str:
    """What became of a parameter."""
    if answer is None:
        return "hangs up"
    if answer.status >= 400:
        return f"refused ({answer.error})"
    return "done" if honoured(answer) else otherwise


def refused(answer: Answer | None) -> str:
    """What became of a request that is wrong."""
    if answer is None:
        return "hangs up"
    return f"refused ({answer.error})" if answer.status >= 400 else "answered"
