"""Probes of routes, parameters, invalid requests, access, several models, and of a server that generates."""

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.lab.bench.servers.server_process import (
    CHAT,
    CHAT_BODY,
    COMPLETIONS,
    PROMPT,
    RunningContender,
    TimedAnswer,
    ask,
    chat,
    complete,
    effect,
    refused,
)

Probe = Callable[[RunningContender], str]
"""Sends requests to a running server and returns a few words about the answers."""

_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
_SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_FOREIGN_HOST = "evil.example"


def sampled(server: RunningContender, seed: int = 5) -> list[str]:
    """Texts at temperature 1."""
    answer = complete(server, temperature=1, max_tokens=32, seed=seed)
    return [] if answer is None else answer.texts


def completions(server: RunningContender) -> dict[str, list[str]]:
    """Completions of one prompt by a fresh server. A draft must not change them."""
    return {
        "greedy": _greedy(server, 64),
        "temperature 1 and a `seed`": sampled(server),
        "greedy, with the same prompt again": _greedy(server, 64),
    }


def routes() -> dict[str, Probe]:
    asked: dict[str, Any] = {
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2},
        CHAT: {**CHAT_BODY, "max_tokens": 2},
        "/v1/responses": {"input": "import", "max_output_tokens": 2},
        "/v1/messages": {**CHAT_BODY, "max_tokens": 2},
        "/v1/messages/count_tokens": CHAT_BODY,
        "/v1/responses/input_tokens": {"input": "import"},
        "/v1/embeddings": {"input": "import"},
        "/api/chat": {**CHAT_BODY, "model": "demo", "stream": False, "options": {"num_predict": 2}},
        "/api/generate": {"prompt": "import", "model": "demo", "stream": False, "options": {"num_predict": 2}},
        "/api/show": {"model": "demo"},
        "/api/tags": None,
        "/api/ps": None,
        "/api/version": None,
        "/v1/models": None,
        "/health": None,
        "/metrics": None,
    }

    def route(path: str) -> Probe:
        def probe(server: RunningContender) -> str:
            answer = ask(server, path, asked[path])
            if answer is None:
                return "closes the connection"
            return {200: "yes", 501: "with an option"}.get(answer.status, f"no ({answer.status})")

        return probe

    return {f"`{path}`": route(path) for path in asked}


def parameters() -> dict[str, Probe]:
    return {
        "the same greedy request, five times": _repeated,
        "`seed`": _seeded,
        "`max_completion_tokens`": lambda server: effect(
            chat(server, max_completion_tokens=3), lambda answer: answer.body["usage"]["completion_tokens"] == 3
        ),
        "`stop` at a line break": _stops(lambda _: "\n"),
        "`stop` within a word": _stops(lambda text: text[6:9]),
        "`n`": lambda server: effect(complete(server, n=2), lambda answer: len(answer.texts) == 2),
        "several prompts": lambda server: effect(
            complete(server, prompt=[PROMPT, PROMPT]), lambda answer: len(answer.texts) == 2
        ),
        "a prompt of token ids": lambda server: effect(complete(server, prompt=[5, 6, 7]), lambda _: True),
        "`top_p`": _makes_greedy(top_p=0.001),
        "`top_k`": _makes_greedy(top_k=1),
        "`min_p`": _makes_greedy(min_p=1.0),
        "`repetition_penalty`": _differs(repetition_penalty=2.0),
        "`frequency_penalty`": _differs(frequency_penalty=2.0),
        "`presence_penalty`": _differs(presence_penalty=2.0),
        "`logit_bias`": _differs(logit_bias={"300": 100.0}),
        "`logprobs` (chat)": lambda server: effect(
            chat(server, logprobs=True, top_logprobs=2), lambda answer: bool(answer.body["choices"][0].get("logprobs"))
        ),
        "`response_format`, a JSON schema": lambda server: effect(
            chat(server, max_tokens=400, response_format=_FORMAT), lambda answer: _is_json(answer.texts[0])
        ),
        "`tools`, with a model without tools": lambda server: effect(chat(server, tools=[_TOOL]), lambda _: False),
        "`best_of`": lambda server: effect(
            complete(server, best_of=3, temperature=1, seed=1),
            lambda answer: answer.body["usage"]["completion_tokens"] > 16,
        ),
        "`echo` with `logprobs` of the prompt": lambda server: effect(
            complete(server, echo=True, logprobs=1, max_tokens=1), _tells_of_prompt
        ),
        "`echo`": lambda server: effect(complete(server, echo=True), lambda answer: answer.texts[0].startswith(PROMPT)),
        "`suffix`": _differs(suffix="return items"),
    }


def invalid_requests(folder: Path) -> dict[str, Probe]:
    """`folder`: a model that the servers do not offer."""
    unknown_role = {"messages": [{"role": "nobody", "content": "a"}], "max_tokens": 2}
    image = [{"role": "user", "content": [_IMAGE]}]
    return {
        "a body that is not JSON": lambda server: refused(ask(server, CHAT, b"{")),
        '`temperature: "hot"`': lambda server: refused(complete(server, temperature="hot")),
        "`temperature: -1`": lambda server: refused(complete(server, temperature=-1)),
        "no `messages`": lambda server: refused(ask(server, CHAT, {"max_tokens": 2})),
        "an unknown role": lambda server: refused(ask(server, CHAT, unknown_role)),
        "an image": lambda server: refused(chat(server, messages=image)),
        "an empty prompt": lambda server: refused(complete(server, prompt="")),
        "a prompt beyond the model's 2,048 tokens": lambda server: refused(complete(server, prompt="word " * 1050)),
        "an unknown model": lambda server: refused(complete(server, model="nobody/none")),
        "`model`: a folder of the server's machine": lambda server: refused(complete(server, model=str(folder))),
    }


def access() -> dict[str, Probe]:
    form = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()

    def readable(server: RunningContender) -> str:
        answer = ask(server, "/v1/models", origin=f"https://{_FOREIGN_HOST}")
        return "closes the connection" if answer is None else answer.headers.get("access-control-allow-origin", "none")

    return {
        "no key": lambda server: refused(ask(server, "/v1/models", key=False)),
        "a foreign `Host`": lambda server: refused(ask(server, "/v1/models", host=_FOREIGN_HOST)),
        "a body of type text/plain, as any web page may send": lambda server: refused(
            ask(server, COMPLETIONS, form, content_type="text/plain")
        ),
        "origins that may read the answers": readable,
    }


def _repeated(server: RunningContender) -> str:
    texts = {tuple(_greedy(server, 64)) for _ in range(5)}
    return "one text" if len(texts) == 1 else f"{len(texts)} texts"


def _seeded(server: RunningContender) -> str:
    first, again, other = sampled(server), sampled(server), sampled(server, 6)
    return "done" if first == again != other else "another text the second time" if first != again else "ignored"


def _stops(pick: Callable[[str], str]) -> Probe:
    """Done if the text ends before the stop string that `pick` takes from it."""

    def probe(server: RunningContender) -> str:
        (text,) = _greedy(server, 64)
        stop = pick(text)
        expected = text.partition(stop)[0]
        return effect(
            complete(server, max_tokens=64, stop=[stop]),
            lambda answer: answer.texts == [expected],
            "removed, but the text continues",
        )

    return probe


def _differs(**fields: Any) -> Probe:
    """Done if the greedy text changes."""
    return lambda server: effect(
        complete(server, max_tokens=64, **fields), lambda answer: answer.texts != _greedy(server, 64)
    )


def _makes_greedy(**fields: Any) -> Probe:
    """Done if the text at temperature 1 is the greedy text."""
    return lambda server: effect(
        complete(server, temperature=1, **fields), lambda answer: answer.texts == _greedy(server, 16)
    )


def _greedy(server: RunningContender, tokens: int) -> list[str]:
    answer = complete(server, max_tokens=tokens)
    return [] if answer is None else answer.texts


def _tells_of_prompt(answer: TimedAnswer) -> bool:
    told = answer.body["choices"][0].get("logprobs") or {}
    return len(told.get("token_logprobs") or ()) > 2


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def models() -> dict[str, Probe]:
    return {
        "`/v1/models` has both": _listed,
        "a model that was not loaded yet": _second,
        "requests for both at once": lambda server: at_once(
            server, [{"model": name, "prompt": PROMPT} for name in server.server.models]
        ),
    }


def _listed(server: RunningContender) -> str:
    def both(answer: TimedAnswer) -> bool:
        return {each["id"] for each in answer.body["data"]} >= {*server.server.models}

    return effect(ask(server, "/v1/models"), both, "one of them")


def _second(server: RunningContender) -> str:
    """Done if it is loaded, and writes a text of its own."""
    first, second = (complete(server, model=name, max_tokens=64) for name in server.server.models)
    return effect(second, lambda answer: first is not None and first.texts != answer.texts)


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


def _form(server: RunningContender) -> str:
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


def at_once(server: RunningContender, bodies: Sequence[dict[str, Any]]) -> str:
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


def _four(server: RunningContender, **fields: Any) -> str:
    return at_once(server, [{"prompt": f"{PROMPT} # {number}", **fields} for number in range(4)])


def _stream(server: RunningContender, order: list[str], fields: dict[str, Any]) -> None:
    body = {"max_tokens": 96, "stream": True, **_ENDLESS, **fields}
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        begun = False
        for line in response.iter_lines():
            if line.startswith("data: {") and not begun:
                begun = True
                order.append("begin")
            elif line == "data: [DONE]":
                order.append("end")


def _abandoned(server: RunningContender, *, stream: bool) -> str:
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


def _becomes_idle(server: RunningContender) -> str:
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
