"""The process in which mlx-lm's own decoding runs: `python -m orchestrator.lab.bench.mlx_lm_process SETUP`.

It imports MLX, as `paced_network` does; no other module may import either.
"""

import signal
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from orchestrator.lab.bench.mlx_lm import Job, JobResult, Setup
from protocol.child_process import claim_output
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError, PipelineError
from protocol.inference.recorded_network import KnownText, RecordedNetwork
from protocol.inference.stored_model import stock_network
from protocol.messages.worker import Paced
from protocol.worker.pacing import DevicePace, PacedPart, Pacer
from protocol.worker.recorded_texts import RecordedText, RecordedTexts, request_sampling


class _Call(NamedTuple):
    pacer: Pacer
    began: float
    part: PacedPart
    logits: Any


class PacedDevice:
    """The device that all models of one generation share."""

    def __init__(self) -> None:
        self._pending: _Call | None = None
        self._pacers: list[Pacer] = []

    def network(self, network: Any, pace: DevicePace) -> Any:
        """`network` with the pace of this device."""
        self._pacers.append(Pacer(pace))
        return PacedNetwork(network, self, self._pacers[-1])

    def settle(self) -> None:
        """Wait until the device would have finished the pending call, if there is one."""
        if self._pending is not None:
            call, self._pending = self._pending, None
            mx.eval(call.logits)
            call.pacer.forward(call.began, (call.part,))

    def call(self, network: Any, pacer: Pacer, tokens: mx.array, **keywords: Any) -> mx.array:
        self.settle()
        began, part = time.perf_counter(), PacedPart(tokens.size, _context(keywords.get("cache")))
        logits = network(tokens, **keywords)
        mx.async_eval(logits)
        self._pending = _Call(pacer, began, part, logits)
        return logits

    def take(self) -> Paced:
        """The times of all calls that were settled since the last `take`."""
        return sum(filter(None, (pacer.take() for pacer in self._pacers)), Paced())


class PacedNetwork:
    """A paced model: calls are paced, everything else is the model's."""

    def __init__(self, network: Any, device: PacedDevice, pacer: Pacer) -> None:
        self._network = network
        self._device = device
        self._pacer = pacer

    def __call__(self, tokens: mx.array, **keywords: Any) -> mx.array:
        """(B, L) tokens to (B, L, V) logits."""
        return self._device.call(self._network, self._pacer, tokens, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def _context(cache: Any) -> int:
    """Tokens in mlx-lm's cache, which has an entry for each layer."""
    return int(getattr(cache[0], "offset", 0)) if cache else 0


_PREFILL_CHUNK = 512


class Networks(NamedTuple):
    """Stock networks, in the precision that our workers use."""

    target: Any
    """None if recorded texts stand in for it."""
    draft: Any
    """None without a draft."""
    paces: tuple[DevicePace, DevicePace] | None = None
    """Of the target and of the draft."""
    texts: RecordedTexts | None = None

    def text(self, job: Job) -> RecordedText | None:
        """The recorded text of a job; None if the target computes. Raises InputError for a job without a text."""
        if self.texts is None:
            return None
        text = self.texts.of_prompt(job.tokens, request_sampling(job.temperature, job.seed))
        if text is None:
            raise InputError("No text is recorded for this prompt, temperature and seed: record it first.")
        return text


def main() -> int:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = claim_output()
    paces = None
    if setup.target_pace is not None and setup.draft_pace is not None:
        paces = setup.target_pace, setup.draft_pace
    began = time.perf_counter()
    draft = stock_network(Path(setup.draft)) if setup.draft else None
    if setup.texts:
        texts = RecordedTexts.read(Path(setup.texts), ModelFolder(Path(setup.target)).fingerprint)
        networks = Networks(None, draft, paces, texts)
    else:
        networks = Networks(stock_network(Path(setup.target)), draft, paces)
    loaded = time.perf_counter()
    if setup.tokenizer:
        load_tokenizer(Path(setup.target), {"trust_remote_code": False})
    report({"weights": loaded - began, "tokenizer": time.perf_counter() - loaded})
    for line in sys.stdin.buffer:
        report(decode(networks, msgspec.json.decode(line, type=Job)))
    return 0


def decode(networks: Networks, job: Job) -> JobResult:
    """Run a job. The clock starts when the caches hold all but the prompt's last token.

    Raises PipelineError if the tokens are not those of the recorded text, if there is one.
    """
    requested = time.perf_counter()
    mx.random.seed(job.seed)
    arrivals: list[float] = []
    tokens: list[int] = []
    drafted: list[bool] = []
    streams: list[Any] = [generation_stream]
    device = PacedDevice()
    with wired_limit(networks.target, streams):
        steps = _steps(networks, job, device)
        began = ended = time.perf_counter()
        for token, from_draft in steps:
            ended = time.perf_counter()
            arrivals.append(ended - requested)
            tokens.append(token)
            drafted.append(from_draft)
            if token in job.ends:
                break
        steps.close()
        # mlx-lm computes ahead: that work must not run into the next contender's time.
        mx.synchronize(generation_stream)
    text = networks.text(job)
    if text is not None and tuple(tokens) != text.tokens[: len(tokens)]:
        raise PipelineError("mlx-lm's tokens are not those of the recorded text: delete the recording and try again.")
    paced = device.take() if networks.paces else None
    return JobResult(tuple(tokens), tuple(drafted), ended - began, paced, tuple(arrivals))


def _steps(networks: Networks, job: Job, device: PacedDevice) -> Generator[tuple[int, bool], None, None]:
    """mlx-lm's loop over caches that hold the prompt: tokens, and whether each is an accepted draft token."""
    draft, paces, text = networks.draft, networks.paces, networks.text(job)
    target: Any = networks.target if text is None else _recorded_network(networks, text)
    *prefix, root = job.tokens
    cache = _prefilled(target, prefix)
    if paces is not None:
        target, draft = device.network(target, paces[0]), device.network(draft, paces[1])
    common: dict[str, Any] = {"max_tokens": job.max_tokens, "sampler": make_sampler(temp=job.temperature)}
    if job.draft_tokens == 0:
        return _plain(generate_step(mx.array([root]), target, prompt_cache=cache, **common))
    cache += _prefilled(networks.draft, prefix)
    common |= {"num_draft_tokens": job.draft_tokens, "prompt_cache": cache}
    return _speculative(speculative_generate_step(mx.array([root]), target, draft, **common), device)


def _recorded_network(networks: Networks, text: RecordedText) -> RecordedNetwork:
    assert networks.texts is not None
    return RecordedNetwork(KnownText(text.whole, networks.texts.target.vocabulary))


def _plain(steps: Any) -> Generator[tuple[int, bool], None, None]:
    for token, _ in steps:
        yield int(token), False


def _speculative(steps: Any, device: PacedDevice) -> Generator[tuple[int, bool], None, None]:
    """The tokens of a round come when its verification is done."""
    for token, _, from_draft in steps:
        device.settle()
        yield int(token), bool(from_draft)


def _prefilled(network: Any, tokens: Sequence[int]) -> list[Any]:
    """A prompt cache that holds `tokens`."""
    cache = make_prompt_cache(network)
    for begin in range(0, len(tokens), _PREFILL_CHUNK):
        network(mx.array([tokens[begin : begin + _PREFILL_CHUNK]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


if __name__ == "__main__":
    sys.exit(main())
