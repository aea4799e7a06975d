"""What a server does while it generates: the form of a stream, several at once, and clients that go away."""

import json
import socket
import threading
import time
from typing import Any

from orchestrator.tools.bench.servers.asking import CHAT, COMPLETIONS, HELLO, PROMPT
from orchestrator.tools.bench.servers.questions import Probe
from orchestrator.tools.bench.servers.running import Running

_ENDLESS: dict[str, Any] = {"temperature": 0.7, "logit_bias": {"0": -100}}
"""Without the only end token of the demo pair."""
_MOMENT, _LOOKS = 3.0, 8
"""Seconds between two looks at a server's work, and how many looks are taken."""


def streams() -> dict[str, Probe]:
    return {
        "form of a stream": _form,
        "four streams at once": lambda found: _crowd(found),
        "four at once, with a `seed`": lambda found: _crowd(found, seed=5),
        "a client that goes away, streaming": lambda found: _gone(found, stream=True),
        "a client that goes away, not streaming": lambda found: _gone(found, stream=False),
    }


def _form(found: Running) -> str:
    body = {**HELLO, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    with found.client() as client:
        lines = client.post(CHAT, json=body).text.splitlines()
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(each) for each in told if each != "[DONE]"]
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    has = {
        "a role first": bool(chunks) and chunks[0]["choices"][0]["delta"].get("role") == "assistant",
        "one reason at the end": sum(end is not None for end in ends) == 1,
        "usage when asked for": bool(chunks) and chunks[-1]["choices"] == [] and bool(chunks[-1].get("usage")),
        "`[DONE]`": bool(told) and told[-1] == "[DONE]",
    }
    missing = [name for name, there in has.items() if not there]
    return f"without {', '.join(missing)}" if missing else "as OpenAI's"


def _crowd(found: Running, **fields: Any) -> str:
    """Whether four streams run beside one another, told from the order of their first texts and their ends."""
    order: list[str] = []
    threads = [threading.Thread(target=_stream, args=(found, number, order, fields)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if order.count("end") < len(threads):
        return "failed"
    first_end = order.index("end")
    if first_end == len(threads):
        return "beside one another"
    return "one after another" if order == ["begin", "end"] * len(threads) else "partly beside one another"


def _stream(found: Running, number: int, order: list[str], fields: dict[str, Any]) -> None:
    body = {"prompt": f"{PROMPT} # {number}", "max_tokens": 96, "stream": True, **_ENDLESS, **fields}
    with found.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        begun = False
        for line in response.iter_lines():
            if line.startswith("data: {") and not begun:
                begun = True
                order.append("begin")
            elif line == "data: [DONE]":
                order.append("end")


def _gone(found: Running, *, stream: bool) -> str:
    """Whether a server goes on working for nobody; `n` makes it long for those that heed it."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 6000, "n": 4, "stream": stream, **_ENDLESS}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    key = f"authorization: Bearer {found.server.key}\r\n" if found.server.key else ""
    with socket.create_connection(("127.0.0.1", found.port), timeout=60) as client:
        client.sendall(f"{head}{key}content-length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            client.recv(1 << 16)
        time.sleep(_MOMENT)
    return _rests(found)


def _rests(found: Running) -> str:
    """Three quiet looks are rest: fewer may fall between the steps of `ps`, or while others have the processor."""
    spent, quiet = found.processor_seconds(), 0
    for _ in range(_LOOKS):
        time.sleep(_MOMENT)
        before, spent = spent, found.processor_seconds()
        quiet = quiet + 1 if spent == before else 0
        if quiet == 3:
            return "ends the work"
    found.occupied = True
    return f"still works after {_LOOKS * _MOMENT:.0f} s"
