"""Probes of one long prompt: what a stream tells while it is read, and what is left of it after a restart."""

import json
import time
from collections.abc import Iterator

from orchestrator.lab.bench.servers.http_requests import COMPLETIONS, complete
from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.server_process import RunningServer, Server, running

TOKENS = 6144
CONTEXT = TOKENS + 1024
_ANSWER = 128
"""Tokens. While they are generated, a target copies the prompt's keys and values to where the disk is written from."""
_DISK_SECONDS = 5.0
"""Between an answer and the end of its server, so that it can write to a disk."""


def long_prompts() -> dict[str, Probe]:
    return {"progress in a stream": _progress}


def restarted(server: Server) -> str:
    """Seconds to the first text of a long prompt, and again after a restart of the server."""
    (before, _), (after, cached) = (_first_text(server) for _ in range(2))
    return f"{before:.1f}, then {after:.1f} with {cached:,} tokens from the cache"


def _progress(server: RunningServer) -> str:
    """Clients skip comments of an event stream, so their users do not see what is in them."""
    lines = list(_lines(server, "1"))
    if any('"prompt_progress"' in line for line in lines):
        return "events"
    told = any(line.startswith(":") and any(letter.isdigit() for letter in line) for line in lines)
    return "comments" if told else "none"


def _first_text(server: Server) -> tuple[float, int]:
    """The tokens of the prompt that were there are the second figure."""
    times, cached = [], 0
    with running(server) as process:
        complete(process)
        began = time.monotonic()
        for line in _lines(process, "2"):
            chunk = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                times.append(time.monotonic() - began)
            cached = ((chunk.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        time.sleep(_DISK_SECONDS)
    if not times:
        raise RuntimeError(f"{server.title} answers a long prompt without text.")
    return times[0], cached


def _lines(server: RunningServer, first_word: str) -> Iterator[str]:
    """Of the stream that answers a prompt of TOKENS tokens."""
    body = {
        "prompt": f"{first_word}{' a' * (TOKENS - 1)}",
        "max_tokens": _ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        yield from response.iter_lines()
