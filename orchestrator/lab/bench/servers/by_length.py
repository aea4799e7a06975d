"""Time to the first token, speed and memory by the length of the prompt, of this server and of mlx-lm's own.

The models are the default pair, or a small one with random weights, for lengths that a real model would take hours for.
Prompts differ from their first token on. The servers take turns, each started again, so that memory is that of one
prompt. On a processor mlx-lm's server gets what makes it fastest there, as our workers do: models in 32 bits without
quantisation, OpenBLAS and all cores.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tokenizers import Tokenizer

from orchestrator.lab.bench.models import bench_models
from orchestrator.lab.bench.prompts import read_prompts
from orchestrator.lab.bench.servers.random_pair import random_pair
from orchestrator.lab.bench.servers.server_process import (
    COMPLETIONS,
    ComparedServer,
    RunningContender,
    end_with_servers,
    running,
)
from orchestrator.lab.findings import Field, Findings, Watch, tabulated
from orchestrator.lab.report import machine_lines
from orchestrator.machine.hardware import computes_on_processor, usable_cores, worker_environment
from protocol.errors import InputError

_KEY = "a-key-for-comparing"
_SAMPLE_SECONDS = 0.5
_LEAST_TOKENS = 8
"""Shorter answers have no speed."""
_SPARE_CONTEXT = 1024


class TimedRequest(NamedTuple):
    """One request."""

    server: str
    length: int
    """Prompt tokens that were wanted."""
    prompt_tokens: int
    first: float
    """Seconds from sending to the first text."""
    speed: float | None
    """Tokens a second after the first text; None for an answer of few tokens."""
    memory: int
    """Most bytes that the server and its children held at a time; shared ones are counted once."""


_FIELDS: tuple[Field[Sequence[TimedRequest]], ...] = (
    Field("prompt", lambda trials: trials[0].length, ",d"),
    Field("server", lambda trials: trials[0].server),
    Field("first text, s", lambda trials: median(trial.first for trial in trials), ".2f"),
    Field("tokens/s", lambda trials: _speed(trials), ".1f", "after the first text"),
    Field("MiB", lambda trials: max(trial.memory for trial in trials) >> 20, ",d", "the most memory of all processes"),
)


def measure(lengths: Sequence[int], max_tokens: int, repeats: int, random: bool, watch: Watch) -> Findings:
    """Every server with prompts of each of these lengths. Raises RuntimeError for a server that does not start."""
    end_with_servers()
    found: list[list[TimedRequest]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = max(lengths) + max_tokens + _SPARE_CONTEXT
        target, draft = random_pair(folder / "random", context) if random else bench_models(None, None, False)[:2]
        servers = _servers(target, draft, folder, context if random else None)
        watch.begin(len(lengths) * repeats * len(servers), "the servers")
        prompts = _prompts(target, lengths, repeats)
        for place, length in enumerate(lengths):
            turns: list[list[TimedRequest]] = []
            for prompt in prompts[place * repeats : (place + 1) * repeats]:
                turns.append([])
                for server in servers.values():
                    turns[-1].append(_trial(server, length, prompt, max_tokens))
                    watch.finished(f"{server.title}, {length:,} tokens")
            found += map(list, zip(*turns, strict=True))
    return Findings(
        title="servers by the length of the prompt",
        conditions=(f"{max_tokens} tokens, {repeats} repeats. Medians over repeats.", *machine_lines()),
        tables=(tabulated("", _FIELDS, found),),
        figures={"machine": machine_lines(), "trials": [trial._asdict() for trials in found for trial in trials]},
    )


def _speed(trials: Sequence[TimedRequest]) -> float | None:
    known = [trial.speed for trial in trials if trial.speed is not None]
    return median(known) if known else None


def _servers(target: Path, draft: Path, folder: Path, context: int | None) -> dict[str, ComparedServer]:
    # The folders of a target and of its draft may have one name.
    stock_target, stock_draft = _stock(target, folder / "stock-target"), _stock(draft, folder / "stock-draft")
    ours = ("-m", "orchestrator.cli.app", "serve", "--api-key", _KEY, "--target", str(target), "--draft", str(draft))
    ours = (*ours, "--context", str(context)) if context else ours
    theirs = ("-m", "mlx_lm", "server", "--log-level", "WARNING", "--model", str(stock_target))
    blas = worker_environment("target", usable_cores())
    found = [
        ComparedServer("launch-pipeline serve", ours, _KEY),
        ComparedServer("launch-pipeline serve --draft-engine none", (*ours[:-2], "--draft-engine", "none"), _KEY),
        ComparedServer("mlx_lm.server", theirs, environment=blas),
        ComparedServer("mlx_lm.server --draft-model", (*theirs, "--draft-model", str(stock_draft)), environment=blas),
    ]
    return {server.title: server for server in found}


def _stock(model: Path, folder: Path) -> Path:
    """The model as mlx-lm's server is fastest with it."""
    if not computes_on_processor():
        return model
    arguments = ("--hf-path", str(model), "--mlx-path", str(folder), "--dtype", "float32")
    quantised = "quantization" in json.loads((model / "config.json").read_text())
    subprocess.run(
        [sys.executable, "-m", "mlx_lm", "convert", *arguments, *(["--dequantize"] if quantised else [])],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


def _prompts(target: Path, lengths: Sequence[int], repeats: int) -> list[str]:
    """Texts of so many tokens, `repeats` of each length, no two with a common beginning."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = "\n\n".join(prompt.text for prompt in read_prompts(None, None, chat=True))
    found: list[str] = []
    for length in lengths:
        for _ in range(repeats):
            start = f"{len(found) + 1}. "
            tokens = tokenizer.encode(start + text * (1 + length // len(text)) * 8, add_special_tokens=False).ids
            found.append(tokenizer.decode(tokens[:length], skip_special_tokens=False))
    return found


def _trial(server: ComparedServer, length: int, prompt: str, max_tokens: int) -> TimedRequest:
    """One request to a server that has just started and answered once."""
    with running(server) as process:
        _ask(process, "Hello", 8)
        with _peak(process) as held:
            prompt_tokens, first, speed = _ask(process, prompt, max_tokens)
    return TimedRequest(server.title, length, prompt_tokens, first, speed, max(held))


def _ask(process: RunningContender, prompt: str, max_tokens: int) -> tuple[int, float, float | None]:
    """Prompt tokens, seconds to the first text, and tokens a second after it."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    times: list[float] = []
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    with process.client() as client, client.stream("POST", COMPLETIONS, json=body, timeout=3600) as response:
        if response.status_code != 200:
            raise InputError(f"{process.server.title} refuses the prompt: {response.read()[:300].decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                times.append(time.monotonic())
    if not times:
        return usage["prompt_tokens"], time.monotonic() - began, None
    tokens = usage["completion_tokens"]
    speed = (tokens - 1) / (times[-1] - times[0]) if tokens >= _LEAST_TOKENS and times[-1] > times[0] else None
    return usage["prompt_tokens"], times[0] - began, speed


@contextmanager
def _peak(process: RunningContender) -> Iterator[list[int]]:
    """A list that memory is appended to while the context lasts."""
    held = [process.memory()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            held.append(process.memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()
