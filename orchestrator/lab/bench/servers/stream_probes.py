"""Probes of a server while it generates: the form of a stream, several streams, clients that disconnect."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.lab.bench.servers.http_requests import CHAT, CHAT_BODY, COMPLETIONS, PROMPT
from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.server_process import RunningServer

_ENDLESS: dict[str, Any] = {"temperature": 0.7, "logit_bias": {"0": -100}}
"""Excludes the only end token of the demo pair."""
_CHECK_SECONDS, _CHECKS = 3.0, 8
"""Seconds between two checks of a server's processor time, and the number of checks."""


def streams() -> dict[str, Probe]:
    return {
        "form of a stream": _form,
        "four streams at once": _four,
        "four at once, with a `seed`": lambda server: _four(server, seed=5),
        "a client that disconnects, streaming": lambda server: _abandoned(server, stream=True),
        "a client that disconnects, not streaming": lambda server: _abandoned(server, stream=False),
    }


def _form(server: RunningServer) -> str:
    body = {**CHAT_BODY, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    with server.client() as client:
        lines = client.post(CHAT, json=body).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(each) for each in events if each != "[DONE]"]
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    has = {
        "a role first": bool(chunks) and chunks[0]["choices"][0]["delta"].get("role") == "assistant",
        "one reason at the end": sum(end is not None for end in ends) == 1,
        "usage when asked for": bool(chunks) and chunks[-1]["choices"] == [] and bool(chunks[-1].get("usage")),
        "`[DONE]`": bool(events) and events[-1] == "[DONE]",
    }
    missing = [name for name, there in has.items() if not there]
    return f"without {', '.join(missing)}" if missing else "as OpenAI's"


def at_once(server: RunningServer, bodies: Sequence[dict[str, Any]]) -> str:
    """Whether endless completions run at the same time, by the order of their first texts and their ends."""
    order: list[str] = []
    threads = [threading.Thread(target=_stream, args=(server, order, body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if order.count("end") < len(threads):
        return "failed"
    first_end = order.index("end")
    if first_end == len(threads):
        return "at the same time"
    return "one after another" if order == ["begin", "end"] * len(threads) else "partly at the same time"


def _four(server: RunningServer, **fields: Any) -> str:
    return at_once(server, [{"prompt": f"{PROMPT} # {number}", **fields} for number in range(4)])


def _stream(server: RunningServer, order: list[str], fields: dict[str, Any]) -> None:
    body = {"max_tokens": 96, "stream": True, **_ENDLESS, **fields}
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        begun = False
        for line in response.iter_lines():
            if line.startswith("data: {") and not begun:
                begun = True
                order.append("begin")
            elif line == "data: [DONE]":
                order.append("end")


def _abandoned(server: RunningServer, *, stream: bool) -> str:
    """Whether a server stops working when the client disconnects. `n` makes the work long where it is honoured."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 6000, "n": 4, "stream": stream, **_ENDLESS}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    key = f"authorization: Bearer {server.server.key}\r\n" if server.server.key else ""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"{head}{key}content-length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            client.recv(1 << 16)
        time.sleep(_CHECK_SECONDS)
    return _becomes_idle(server)


def _becomes_idle(server: RunningServer) -> str:
    """Three checks without new processor time count as idle, because `ps` counts in seconds on a busy machine."""
    spent, idle = server.processor_seconds(), 0
    for _ in range(_CHECKS):
        time.sleep(_CHECK_SECONDS)
        before, spent = spent, server.processor_seconds()
        idle = idle + 1 if spent == before else 0
        if idle == 3:
            return "ends the work"
    server.occupied = True
    return f"still works after {_CHECKS * _CHECK_SECONDS:.0f} s"
