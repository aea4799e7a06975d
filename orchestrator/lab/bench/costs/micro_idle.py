"""Measures how long a target leaves its device without work between two forwards, beside mlx-lm's own loop.

Imports MLX, so it runs as a process: `python -m orchestrator.lab.bench.costs.micro_idle [LAYERS [ROUNDS]]` writes a
`HostCost` a loop as JSON. The network is random and has so few features that computing takes no time worth mentioning.
Norm, rope and attention are one node of the graph each, as on a GPU. Times are the processor time of the thread that
builds the forwards, and of all rounds the fastest tenth, so that other programs hardly count.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3
from mlx_lm.sample_utils import make_sampler

from orchestrator.lab.bench.costs.micro import HostCost
from protocol.child_process import claim_output
from protocol.inference.device import compute
from protocol.inference.language_model import LanguageModel
from protocol.inference.staged_dispatch import stage
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Hello, Start, Verdict, Verify
from protocol.sampling.processors import filters
from protocol.speculation.token_tree import node_id
from protocol.worker.interface import WorkerReply
from target_worker import engine as engine_module
from target_worker import verification
from target_worker.engine import Pick, Proposal, TargetEngine, TargetSequence
from target_worker.worker import TargetWorker

_LAYERS = (28, 36, 64)
_STOCK = "mlx-lm's loop"
_STOCK_NUCLEUS = "mlx-lm's loop, top_p"
_PLAIN_NUCLEUS = "the same, top_p"
_ROUNDS = 96
_TURNS = 12
"""The loops are measured in turns, so that a slow minute meets all of them."""
_VOCABULARY = 256
_PROMPT = tuple(range(2, 34))
_ROOT = NodeId(1)
_SEQUENCE = SequenceId(1)
_GREEDY = Sampling()
_NUCLEUS = Sampling(temperature=0.7, top_p=0.9, seed=1)
_TOLD = Sampling(logprobs=2)


def main() -> int:
    layers = [int(count) for count in sys.argv[1].split(",")] if len(sys.argv) > 1 else _LAYERS
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else _ROUNDS
    report = claim_output()
    _as_on_a_gpu()
    report([cost for count in layers for cost in measure(count, rounds)])
    return 0


def measure(layers: int, rounds: int = _ROUNDS) -> list[HostCost]:
    """The costs of mlx-lm's loop, without and with a nucleus, and of the target's rounds: of single tokens and of trees
    of five that hit, as on a processor and (chained, staged) as on a GPU; single tokens with a nucleus and with
    log-probabilities too."""
    model, staged = LanguageModel(_network(layers)), LanguageModel(_network(layers))
    if mx.default_device() == mx.Device(mx.cpu):
        stage(staged.network)
    text = _text(model, 4 * rounds + 8)
    loops: dict[str, _Loop] = {
        _STOCK: _Stock(_network(layers)),
        _STOCK_NUCLEUS: _Stock(_network(layers), make_sampler(_NUCLEUS.temperature, _NUCLEUS.top_p)),
        "plain rounds": _Rounds(model, lambda _: ((), ()), chains=False),
        "plain rounds, chained": _Rounds(model, lambda _: ((), ()), chains=True),
        _PLAIN_NUCLEUS: _Rounds(model, lambda _: ((), ()), chains=True, sampling=_NUCLEUS),
        "the same, logprobs": _Rounds(model, lambda _: ((), ()), chains=True, sampling=_TOLD),
        "rounds that hit": _Rounds(model, lambda place: _tree(text, place), chains=False),
        "rounds that hit, staged": _Rounds(staged, lambda place: _tree(text, place), chains=False),
    }
    for _ in range(_TURNS):
        for loop in loops.values():
            loop.run(rounds // _TURNS)
    host = {name: _low(loop.host) for name, loop in loops.items()}
    # mlx-lm computes log-probabilities of every token.
    stock = {_STOCK_NUCLEUS: _STOCK_NUCLEUS, _PLAIN_NUCLEUS: _STOCK_NUCLEUS}
    return [
        HostCost(layers, name, host[name], *_parts(loop), host[stock.get(name, _STOCK)]) for name, loop in loops.items()
    ]


def _network(layers: int) -> Any:
    mx.random.seed(0)
    network: Any = qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=64,
            num_hidden_layers=layers,
            intermediate_size=64,
            num_attention_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=_VOCABULARY,
            num_key_value_heads=1,
            max_position_embeddings=4096,
            head_dim=32,
            tie_word_embeddings=True,
            rope_theta=1e4,
        )
    )
    nn.quantize(network, group_size=32, bits=4)
    compute(network.parameters())
    return network


def _as_on_a_gpu() -> None:
    """Let the layers' norms, ropes and attention be one node each. Their results no longer mean anything."""
    norm: Any = nn.RMSNorm
    rope: Any = nn.RoPE
    layers: Any = qwen3
    norm.__call__ = lambda self, x: x * self.weight
    rope.__call__ = lambda _, x, offset=0: _depends(x, offset) if isinstance(offset, mx.array) else x * 1.0
    layers.scaled_dot_product_attention = _attention
    # A processor waits for the logits here.
    filters.log_total = verification.log_total = lambda rows: mx.logsumexp(rows, axis=-1, keepdims=True)


def _attention(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
    return _depends(queries, keys, values)


def _depends(array: mx.array, *others: mx.array) -> mx.array:
    return mx.depends([array], list(others))[0]


def _low(times: Sequence[float]) -> float:
    return float(np.quantile(times, 0.1)) if times else 0.0


def _parts(loop: "_Loop") -> tuple[float, float, float]:
    answer, commit, build = loop.parts
    return _low(answer), _low(commit), _low(build)


class _Loop(Protocol):
    host: list[float]
    """Seconds of the thread, a round."""
    parts: tuple[list[float], list[float], list[float]]
    """Seconds from a result to its verdict, to the next forward's building, and to its first work; none of a loop whose
    device always has work."""

    def run(self, rounds: int) -> None: ...


class _Stock:
    """mlx-lm's loop dispatches each forward before it reads the token of the one before it."""

    def __init__(self, network: Any, sampler: Callable[[mx.array], mx.array] | None = None) -> None:
        self.host: list[float] = []
        self.parts: tuple[list[float], list[float], list[float]] = ([], [], [])
        self._tokens = generate_step(mx.array(_PROMPT), network, max_tokens=-1, sampler=sampler)
        next(self._tokens)
        next(self._tokens)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            began = time.thread_time()
            next(self._tokens)
            self.host.append(time.thread_time() - began)


class _Watch:
    """Counts the seconds inside a worker, and divides those between a result and the next work."""

    def __init__(self) -> None:
        self.parts: tuple[list[float], list[float], list[float]] = ([], [], [])
        self._seconds = 0.0
        self._resumed: float | None = None
        self._under_way = 0
        """Forwards that have begun and whose result is not read."""
        self._marks: list[float] = []
        """When the last result was read, its verdict was made, and the next forward began to be built."""

    @property
    def seconds(self) -> float:
        """So far."""
        return self._seconds + (0.0 if self._resumed is None else time.thread_time() - self._resumed)

    def replies(self, replies: Iterable[WorkerReply]) -> Iterator[WorkerReply]:
        """These replies of the worker; the time to make them counts."""
        self._resumed = time.thread_time()
        for reply in replies:
            self._mark(1)
            self._seconds, self._resumed = self.seconds, None
            yield reply
            self._resumed = time.thread_time()
        self._seconds, self._resumed = self.seconds, None

    def begins(self) -> None:
        """A forward is built from now on."""
        self._under_way += 1
        self._mark(2)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Inside, it sees that work is dispatched and that a result was read."""
        functions: Any = mx
        dispatch, read = functions.async_eval, verification.as_ids

        def dispatched(*arguments: Any) -> None:
            self._mark(3)
            if len(self._marks) == 1 + len(self.parts):
                self._divide([after - before for before, after in pairwise(self._marks)])
            dispatch(*arguments)

        def then_read(picks: mx.array) -> list[int]:
            found = read(picks)
            self._under_way -= 1
            if self._under_way:
                self._divide([0.0] * len(self.parts))
            else:
                self._marks = [self.seconds]
            return found

        functions.async_eval = dispatched
        verification.as_ids = engine_module.as_ids = then_read
        try:
            yield
        finally:
            functions.async_eval = dispatch
            verification.as_ids = engine_module.as_ids = read

    def _mark(self, count: int) -> None:
        if len(self._marks) == count:
            self._marks.append(self.seconds)

    def _divide(self, seconds: Sequence[float]) -> None:
        self._marks = []
        for times, part in zip(self.parts, seconds, strict=True):
            times.append(part)


class _WatchedEngine(TargetEngine):
    def __init__(self, model: LanguageModel, watch: _Watch) -> None:
        super().__init__(model)
        self._watch = watch

    def begin_forward(self, asked: Sequence[Proposal]) -> list[mx.array]:
        self._watch.begins()
        return super().begin_forward(asked)

    def begin_behind(
        self, picks: Sequence[Pick], sequences: Sequence[TargetSequence]
    ) -> tuple[list[mx.array], list[Pick]]:
        self._watch.begins()
        return super().begin_behind(picks, sequences)


class _Rounds:
    """A target's rounds. `propose`: from the number of generated tokens, the tokens below the root and the entries of
    their parents."""

    def __init__(
        self,
        model: LanguageModel,
        propose: Callable[[int], tuple[Sequence[int], Sequence[int]]],
        *,
        chains: bool,
        sampling: Sampling = _GREEDY,
    ) -> None:
        self.host: list[float] = []
        self._watch = _Watch()
        self.parts = self._watch.parts
        hello = Hello("target", "mlx", "random", "qwen3", _VOCABULARY, model.context, "", "", 0)
        self._worker = TargetWorker(_WatchedEngine(model, self._watch), time.perf_counter, hello)
        self._propose, self._model, self._chains = propose, model, chains
        self._tokens = list(_PROMPT)
        self._round, self._root = 0, _ROOT
        list(self._worker.handle(Start(_SEQUENCE, self._round, _PROMPT, _ROOT, sampling)))
        while self._worker.has_work:
            list(self._worker.work())

    def run(self, rounds: int) -> None:
        self._model.chains = self._chains
        with self._watch.watching():
            for _ in range(rounds):
                before = self._watch.seconds
                self._one_round()
                self.host.append(self._watch.seconds - before)

    def _one_round(self) -> None:
        tokens, parents = self._propose(len(self._tokens) - len(_PROMPT))
        entries = (self._tokens[-1], *tokens), (-1, *parents)
        place = len(self._tokens) - 1
        verify = Verify(_SEQUENCE, self._round, self._root, place, *entries, plain_next=not tokens)
        replies = list(self._watch.replies(self._worker.handle(verify)))
        if self._worker.has_work:
            # It begins the next forward.
            list(self._watch.replies(self._worker.work()))
        (verdict,) = (reply for reply in replies if isinstance(reply, Verdict))
        ids = [self._root]
        for token, parent in zip(verify.tokens[1:], verify.parents[1:], strict=True):
            ids.append(node_id(ids[parent], token))
        self._tokens += [*(verify.tokens[ids.index(node)] for node in verdict.path), verdict.bonus]
        self._root = node_id((self._root, *verdict.path)[-1], verdict.bonus)
        self._round += 1


def _text(model: LanguageModel, count: int) -> list[int]:
    """The most probable tokens behind the prompt."""
    sequence, tokens = model.sequence(), list(_PROMPT)
    sequence.prefill(tokens[:-1])
    for _ in range(count):
        logits = sequence.prefill(tokens[-1:])
        assert logits is not None
        tokens += verification.as_ids(mx.argmax(logits[-1:], axis=-1))
    return tokens[len(_PROMPT) :]


def _tree(text: Sequence[int], place: int) -> tuple[Sequence[int], Sequence[int]]:
    """Two of the target's own tokens, and a sibling of each."""
    first, second = text[place : place + 2]
    return (first, (first + 1) % _VOCABULARY, second, (second + 1) % _VOCABULARY), (0, 0, 1, 1)


if __name__ == "__main__":
    sys.exit(main())
