"""First text, speed and reused tokens of HTTP servers that run already, by OpenAI's completions API. Starts none."""

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import httpx

from orchestrator.lab.bench.prompts import read_prompts
from orchestrator.lab.findings import Field, Findings, Listener, tabulated
from orchestrator.lab.report import machine_lines
from protocol.errors import InputError

_COMPLETIONS = "/v1/completions"
_CHARACTERS = 4
"""Of a token of English, roughly: the table has the server's own count."""
_LONGEST_ANSWER = 3600.0
_KEY = "#"
_LEAST_TOKENS = 2
"""A single token has no speed."""


class Answer(NamedTuple):
    """One streamed answer, as the client saw it."""

    prompt_tokens: int | None
    """By the server's count; None if it states none."""
    cached_tokens: int | None
    """Of the prompt, from an earlier request; None if it states none."""
    first: float
    """Seconds from sending to the first text."""
    speed: float | None
    """Tokens a second after the first text; None for an answer of a single token."""


class Trial(NamedTuple):
    """A prompt that the server has not seen, then the same prompt again."""

    server: str
    length: int
    """Prompt tokens that were wanted."""
    new: Answer
    again: Answer


_FIELDS: tuple[Field[Sequence[Trial]], ...] = (
    Field("server", lambda trials: trials[0].server),
    Field("prompt", lambda trials: trials[0].new.prompt_tokens, ",d", "prompt tokens by the server's count"),
    Field("first text, s", lambda trials: median(trial.new.first for trial in trials), ".2f"),
    Field("again, s", lambda trials: median(trial.again.first for trial in trials), ".2f", "the same prompt again"),
    Field("cached", lambda trials: trials[0].again.cached_tokens, ",d", "tokens of it that the server reused"),
    Field("tokens/s", lambda trials: _middle([trial.new.speed for trial in trials]), ".1f", "after the first text"),
)


def measure(
    addresses: Sequence[str],
    lengths: Sequence[int],
    max_tokens: int,
    repeats: int,
    watch: Listener,
    *,
    model: str | None = None,
    start: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Findings:
    """Every server with prompts of about each of these lengths, one request at a time, servers in turns.

    `addresses`: such as http://127.0.0.1:8000, with `#KEY` behind it where a key is needed. `start`: begins every
    prompt; another one than at an earlier measurement, so that no server knows the prompts. Raises InputError for a
    server that does not answer or that refuses.
    """
    watch.begin(2 * len(addresses) * len(lengths) * repeats, "the servers")
    found: dict[tuple[int, str], list[Trial]] = {}
    for length in lengths:
        for repeat in range(repeats):
            body = _body(f"{start} {length} {repeat}. ", length, max_tokens, model)
            for address in addresses:
                name = address.partition(_KEY)[0]
                answers = []
                for _ in range(2):
                    answers.append(_asked(address, body, clock))
                    watch.finished(f"{name}, {length:,} tokens")
                found.setdefault((length, address), []).append(Trial(name, length, *answers))
    trials = [trial for group in found.values() for trial in group]
    return Findings(
        title="servers",
        conditions=(f"{max_tokens} tokens at temperature 0, medians of {repeats} repeats.", *machine_lines()),
        tables=(tabulated("", _FIELDS, list(found.values())),),
        figures={
            "machine": machine_lines(),
            "trials": [
                {**trial._asdict(), "new": trial.new._asdict(), "again": trial.again._asdict()} for trial in trials
            ],
        },
    )


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _body(start: str, length: int, max_tokens: int, model: str | None) -> dict[str, object]:
    text = "\n\n".join(prompt.text for prompt in read_prompts(None, None, chat=True))
    size = length * _CHARACTERS
    return {
        "prompt": (start + text * (1 + size // len(text)))[:size],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({} if model is None else {"model": model}),
    }


def _asked(address: str, body: dict[str, object], clock: Callable[[], float]) -> Answer:
    url, _, key = address.partition(_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    usage: dict[str, object] = {}
    times: list[float] = []
    began = clock()
    try:
        with (
            httpx.Client(base_url=url, headers=headers, timeout=_LONGEST_ANSWER) as client,
            client.stream("POST", _COMPLETIONS, json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                text = response.read()[:300].decode(errors="replace")
                raise InputError(f"{url} refuses the request ({response.status_code}): {text}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                if any(choice.get("text") for choice in chunk.get("choices") or ()):
                    times.append(clock())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{url} does not answer ({error}): start the server, and pass its address.") from error
    if not times:
        raise InputError(f"{url} answered without any text: pass a model that completes text.")
    tokens = _count(usage, "completion_tokens") or len(times)
    details = usage.get("prompt_tokens_details")
    return Answer(
        prompt_tokens=_count(usage, "prompt_tokens"),
        cached_tokens=_count(details, "cached_tokens"),
        first=times[0] - began,
        speed=(tokens - 1) / (times[-1] - times[0]) if tokens >= _LEAST_TOKENS and times[-1] > times[0] else None,
    )


def _count(fields: object, name: str) -> int | None:
    found = fields.get(name) if isinstance(fields, dict) else None
    return found if isinstance(found, int) else None
