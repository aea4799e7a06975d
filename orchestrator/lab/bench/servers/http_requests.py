"""Requests to a server over HTTP, and a word for each answer. Knows no particular request."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from orchestrator.lab.bench.servers.server_process import RunningServer

PROMPT = "def quicksort(items):"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "import"}]}


class NoAnswer(Exception):
    """The server did not answer in time."""


Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: httpx.Headers

    @property
    def message(self) -> Body:
        """The only message of a chat."""
        return self.body["choices"][0]["message"]

    @property
    def texts(self) -> list[str]:
        """The texts of a completion; none if the request was refused."""
        choices = self.body.get("choices", []) if isinstance(self.body, dict) else []
        return [choice.get("text") or (choice.get("message") or {}).get("content") or "" for choice in choices]

    @property
    def error(self) -> str:
        """The status, and a note if the body is not an error object of OpenAI's API."""
        known = isinstance(self.body, dict) and isinstance(self.body.get("error"), dict)
        return f"{self.status}{'' if known and self.body['error'].get('message') else ', another form'}"


def ask(server: RunningServer, path: str, body: Any = None, *, key: bool = True, **headers: str) -> Answer | None:
    """None if the server closed the connection. A body of bytes is sent unchanged. Raises NoAnswer."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    with server.client(key) as client:
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


def complete(server: RunningServer, **fields: Any) -> Answer | None:
    """A short greedy completion; `fields` override the parameters."""
    return ask(server, COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, **fields})


def chat(server: RunningServer, **fields: Any) -> Answer | None:
    return ask(server, CHAT, {**CHAT_BODY, "temperature": 0, "max_tokens": 16, **fields})


def streamed_chat(server: RunningServer, **fields: Any) -> Body:
    """The message that the deltas of a stream make; each whole call is in one delta."""
    message: Body = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    body = {**CHAT_BODY, "temperature": 0, "max_tokens": 16, "stream": True, **fields}
    with server.client() as client:
        lines = client.post(CHAT, json=body).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for name in message:
                    message[name] += choice["delta"].get(name) or message[name][:0]
    return message


def effect(answer: Answer | None, honoured: Callable[[Answer], bool], otherwise: str = "ignored") -> str:
    """Whether the server honoured a parameter."""
    if answer is None:
        return "closes the connection"
    if answer.status >= 400:
        return f"refused ({answer.error})"
    return "done" if honoured(answer) else otherwise


def at_route(answer: Answer | None, honoured: Callable[[Answer], bool]) -> str:
    """The effect of a request at a route that not every server has."""
    return f"no ({answer.status})" if answer is not None and answer.status == 404 else effect(answer, honoured)


def refused(answer: Answer | None) -> str:
    """Whether the server refused an invalid request."""
    if answer is None:
        return "closes the connection"
    return f"refused ({answer.error})" if answer.status >= 400 else "answered"
