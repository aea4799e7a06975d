"""What a server is asked one request at a time: routes, parameters, mistakes, and who may ask."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.tools.bench.servers.asking import (
    CHAT,
    COMPLETIONS,
    HELLO,
    PROMPT,
    ask,
    chat,
    complete,
    effect,
    refused,
)
from orchestrator.tools.bench.servers.running import Running

Probe = Callable[[Running], str]
"""Says in a few words what a running server did."""

_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
_SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_EVIL = "evil.example"


def sampled(found: Running, seed: int = 5) -> list[str]:
    """A text at temperature 1."""
    answer = complete(found, temperature=1, max_tokens=32, seed=seed)
    return [] if answer is None else answer.texts


def sayings(found: Running) -> dict[str, list[str]]:
    """What a server that was just started says to one prompt, which a draft must not change."""
    return {
        "greedy": _greedy(found, 64),
        "temperature 1 and a `seed`": sampled(found),
        "greedy, when the prompt came before": _greedy(found, 64),
    }


def routes() -> dict[str, Probe]:
    asked: dict[str, Any] = {
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2},
        CHAT: {**HELLO, "max_tokens": 2},
        "/v1/responses": {"input": "import", "max_output_tokens": 2},
        "/v1/messages": {**HELLO, "max_tokens": 2},
        "/v1/messages/count_tokens": HELLO,
        "/v1/models": None,
        "/health": None,
        "/metrics": None,
    }

    def route(path: str) -> Probe:
        def look(found: Running) -> str:
            answer = ask(found, path, asked[path])
            return "hangs up" if answer is None else "yes" if answer.status == 200 else f"no ({answer.status})"

        return look

    return {f"`{path}`": route(path) for path in asked}


def parameters() -> dict[str, Probe]:
    return {
        "the same greedy question, five times": _repeated,
        "`seed`": _seeded,
        "`max_completion_tokens`": lambda found: effect(
            chat(found, max_completion_tokens=3), lambda answer: answer.body["usage"]["completion_tokens"] == 3
        ),
        "`stop` at a line break": _stops(lambda _: "\n"),
        "`stop` within a word": _stops(lambda text: text[6:9]),
        "`n`": lambda found: effect(complete(found, n=2), lambda answer: len(answer.texts) == 2),
        "several prompts": lambda found: effect(
            complete(found, prompt=[PROMPT, PROMPT]), lambda answer: len(answer.texts) == 2
        ),
        "a prompt of token ids": lambda found: effect(complete(found, prompt=[5, 6, 7]), lambda _: True),
        "`top_p`": _makes_greedy(top_p=0.001),
        "`top_k`": _makes_greedy(top_k=1),
        "`min_p`": _makes_greedy(min_p=1.0),
        "`repetition_penalty`": _differs(repetition_penalty=2.0),
        "`frequency_penalty`": _differs(frequency_penalty=2.0),
        "`presence_penalty`": _differs(presence_penalty=2.0),
        "`logit_bias`": _differs(logit_bias={"300": 100.0}),
        "`logprobs` (chat)": lambda found: effect(
            chat(found, logprobs=True, top_logprobs=2), lambda answer: bool(answer.body["choices"][0].get("logprobs"))
        ),
        "`response_format`, a JSON schema": lambda found: effect(
            chat(found, max_tokens=400, response_format=_FORMAT), lambda answer: _is_json(answer.texts[0])
        ),
        "`tools`, by a model that knows none": lambda found: effect(chat(found, tools=[_TOOL]), lambda _: False),
        "`echo`": lambda found: effect(complete(found, echo=True), lambda answer: answer.texts[0].startswith(PROMPT)),
        "`suffix`": _differs(suffix="return items"),
    }


def mistakes(folder: Path) -> dict[str, Probe]:
    """`folder`: a model that no server was told to offer."""
    nobody = {"messages": [{"role": "nobody", "content": "a"}], "max_tokens": 2}
    image = [{"role": "user", "content": [_IMAGE]}]
    return {
        "a body that is no JSON": lambda found: refused(ask(found, CHAT, b"{")),
        '`temperature: "hot"`': lambda found: refused(complete(found, temperature="hot")),
        "`temperature: -1`": lambda found: refused(complete(found, temperature=-1)),
        "no `messages`": lambda found: refused(ask(found, CHAT, {"max_tokens": 2})),
        "a role that nobody has": lambda found: refused(ask(found, CHAT, nobody)),
        "an image": lambda found: refused(chat(found, messages=image)),
        "an empty prompt": lambda found: refused(complete(found, prompt="")),
        "a prompt beyond the model's 2,048 tokens": lambda found: refused(complete(found, prompt="word " * 1050)),
        "a model that is not there": lambda found: refused(complete(found, model="nobody/none")),
        "`model`: some folder of the server's machine": lambda found: refused(complete(found, model=str(folder))),
    }


def doors() -> dict[str, Probe]:
    form = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()

    def readable(found: Running) -> str:
        answer = ask(found, "/v1/models", origin=f"https://{_EVIL}")
        return "hangs up" if answer is None else answer.headers.get("access-control-allow-origin", "none")

    return {
        "no key": lambda found: refused(ask(found, "/v1/models", key=False)),
        "another name as `Host`": lambda found: refused(ask(found, "/v1/models", host=_EVIL)),
        "a body as any web page may send it": lambda found: refused(
            ask(found, COMPLETIONS, form, content_type="text/plain")
        ),
        "web pages that may read the answers": readable,
    }


def _repeated(found: Running) -> str:
    texts = {tuple(_greedy(found, 64)) for _ in range(5)}
    return "one text" if len(texts) == 1 else f"{len(texts)} texts"


def _seeded(found: Running) -> str:
    first, again, other = sampled(found), sampled(found), sampled(found, 6)
    return "done" if first == again != other else "another text the second time" if first != again else "ignored"


def _stops(pick: Callable[[str], str]) -> Probe:
    """Done if the text ends where what `pick` takes from it begins."""

    def probe(found: Running) -> str:
        (text,) = _greedy(found, 64)
        stop = pick(text)
        expected = text.partition(stop)[0]
        return effect(
            complete(found, max_tokens=64, stop=[stop]),
            lambda answer: answer.texts == [expected],
            "cut out, and the text goes on",
        )

    return probe


def _differs(**fields: Any) -> Probe:
    """Done if the greedy text is no longer the same."""
    return lambda found: effect(
        complete(found, max_tokens=64, **fields), lambda answer: answer.texts != _greedy(found, 64)
    )


def _makes_greedy(**fields: Any) -> Probe:
    """Done if at temperature 1 only the greedy text is left."""
    return lambda found: effect(
        complete(found, temperature=1, **fields), lambda answer: answer.texts == _greedy(found, 16)
    )


def _greedy(found: Running, tokens: int) -> list[str]:
    answer = complete(found, max_tokens=tokens)
    return [] if answer is None else answer.texts


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
