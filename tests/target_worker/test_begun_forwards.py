"""Laws of forwards that begin before their Verify, and before the tokens that they take are read ("chained")."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import msgspec
import pytest

from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Forest, Prefilled, Start, Stop, Verdict, Verify
from protocol.sampling import logits_processors
from target_worker import engine
from target_worker.engine import TargetEngine
from target_worker.verification import Walk
from target_worker.worker import TargetWorker
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY, tree_model
from tests.support.target_requests import HELLO, ROOT, Request

_PROMPT: tuple[int, ...] = (5, 9, 2, 33, 41, 7, 5, 9)
_GENERATED = 24
_GREEDY, _HOT = Sampling(), Sampling(temperature=1.0, seed=3)
_SAMPLINGS = {
    "greedy": _GREEDY,
    "hot": _HOT,
    "filtered": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.4, seed=8),
    "nucleus": Sampling(temperature=0.9, top_k=40, top_p=0.8, min_p=0.001, logit_bias=((3, 1.0),), seed=8),
    "log-probabilities": Sampling(temperature=0.7, seed=5, logprobs=2),
    "nucleus, told": Sampling(temperature=1.1, top_p=0.7, seed=5, logprobs=2),
    "rejection": Sampling(temperature=0.8, seed=2, verification="rejection"),
}
_FAMILIES = ("gemma3_text", "qwen3_5", "mamba2", "deepseek_v3")
"""With windows, with layers that fold tokens into a state and others, with such layers alone, with latent attention."""
Tree = tuple[Sequence[int], Sequence[int]]
"""Tokens below the root and their parents' entries (0 is the root)."""


def _worker(chains: bool, model: LanguageModel | None = None, **settings: Any) -> TargetWorker:
    ticks = count()
    model = model or tree_model()
    model.chains = chains
    return TargetWorker(TargetEngine(model, 3), lambda: float(next(ticks)), HELLO, **settings)


def _start(sampling: Sampling = _GREEDY, sequence: int = 1, ends: tuple[int, ...] = ()) -> Start:
    return Start(RequestId(sequence), 0, _PROMPT, ROOT, sampling, eos_tokens=ends)


@cache
def _model(family: str) -> LanguageModel:
    return LanguageModel(tiny(family))


@cache
def _plain(sampling: Sampling, model: LanguageModel | None = None) -> tuple[tuple[int, ...], list[Verdict]]:
    """Target-only decoding, where every forward waits for its Verify."""
    request = Request(_worker(chains=False, model=model), _start(sampling))
    verdicts = [request.step() for _ in range(_GENERATED)]
    return tuple(request.tokens), verdicts


@cache
def _reference(name: str) -> tuple[int, ...]:
    return _plain(_SAMPLINGS[name])[0]


def _begin(request: Request) -> None:
    """One round, after which the next forward has begun."""
    request.step(plain_next=True)
    assert request.worker._begun is not None


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("name", _SAMPLINGS)
def test_verdicts_are_those_of_forwards_that_wait(name: str, chains: bool):
    tokens, expected = _plain(_SAMPLINGS[name])
    request = Request(_worker(chains), _start(_SAMPLINGS[name]))
    verdicts = [request.step(plain_next=True) for _ in range(_GENERATED)]

    assert tuple(request.tokens) == tokens
    assert [(each.bonus, each.token_logprobs) for each in verdicts] == [
        (each.bonus, each.token_logprobs) for each in expected
    ]


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("sampling", [_GREEDY, _HOT])
def test_every_kind_of_layer_has_the_same_tokens(family: str, sampling: Sampling):
    model = _model(family)
    tokens, _ = _plain(sampling, model)
    request = Request(_worker(chains=True, model=model), _start(sampling))
    for place in range(_GENERATED):
        request.step(plain_next=place % 5 > 0)

    assert tuple(request.tokens) == tokens


@pytest.mark.parametrize("chains", [False, True])
def test_no_forward_is_repeated(chains: bool):
    request = Request(_worker(chains), _start())
    for _ in range(20):
        request.step(plain_next=True)

    assert request.worker._sequences[RequestId(1)].cache.next_row == 21


@pytest.mark.parametrize("name", ["greedy", "hot", "nucleus", "log-probabilities"])
def test_a_chained_forward_begins_before_the_token_that_it_takes_is_read(name: str, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    worker = _worker(chains=True)
    request = Request(worker, _start(_SAMPLINGS[name]))
    begin, read = worker._engine.begin_behind, worker._engine.read
    monkeypatch.setattr(worker._engine, "begin_behind", lambda *given: order.append("begin") or begin(*given))
    monkeypatch.setattr(worker._engine, "read", lambda *given: order.append("read") or read(*given))

    for _ in range(3):
        request.step(plain_next=True)
    request.step()

    assert order == ["begin", "read"] * 3 + ["read"]


@pytest.mark.parametrize("name", ["nucleus", "nucleus, told"])
def test_a_nucleus_beyond_its_shortlist_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch):
    tokens, expected = _reference(name), _plain(_SAMPLINGS[name])[1]
    monkeypatch.setattr(logits_processors, "_SHORTLIST", 16)
    request = Request(_worker(chains=True), _start(_SAMPLINGS[name]))
    verdicts: list[Verdict] = []
    begun: set[bool] = set()
    while len(request.tokens) < len(tokens):
        verdicts.append(request.step(plain_next=True))
        begun.add(request.worker._begun is not None)
    trees = Request(_worker(chains=True), _start(_SAMPLINGS[name]))
    while len(trees.tokens) < len(tokens) - 5:
        trees.step(*_chain(name, trees, 4))

    assert begun == {True, False}
    assert [(each.bonus, each.token_logprobs) for each in verdicts] == [
        (each.bonus, each.token_logprobs) for each in expected
    ]
    assert tuple(trees.tokens) == tokens[: len(trees.tokens)]


@pytest.mark.parametrize("chains", [False, True])
def test_a_tree_that_comes_too_late_is_answered_by_the_root_alone_and_the_verdict_says_so(chains: bool):
    request = Request(_worker(chains), _start(_HOT))
    _begin(request)
    first = request.step(*_chain("hot", request, 4))
    second = request.step(*_chain("hot", request, 4))

    assert (first.path, first.root_alone) == ((), True)
    assert (len(second.path), second.root_alone) == (3, False)
    assert tuple(request.tokens) == _reference("hot")[: len(request.tokens)]


def _chain(name: str, request: Request, depth: int) -> Tree:
    """The right tokens, except for the last."""
    coming = _reference(name)[len(request.tokens) : len(request.tokens) + depth]
    tokens = [*coming[:-1], *((token + 1) % VOCABULARY for token in coming[-1:])]
    return tokens, range(len(tokens))


@pytest.mark.parametrize("chains", [False, True])
def test_nothing_begins_behind_an_end_token_and_beyond_the_context(chains: bool):
    worker = _worker(chains, tree_model(max_position_embeddings=len(_PROMPT) + 6))
    ended = Request(worker, _start(ends=(_reference("greedy")[len(_PROMPT) + 3],)))
    for _ in range(4):
        ended.step(plain_next=True)
    assert worker._begun is None

    full = Request(worker, _start(sequence=2))
    for _ in range(7):
        full.step(plain_next=True)

    assert worker._begun is None
    assert tuple(full.tokens) == _reference("greedy")[: len(_PROMPT) + 7]


@pytest.mark.parametrize("chains", [False, True])
def test_a_restart_gives_the_same_tokens(chains: bool):
    worker = _worker(chains)
    before = Request(worker, _start(_HOT))
    _begin(before)
    start = msgspec.structs.replace(_start(_HOT), tokens=tuple(before.tokens), round=1, root=before.root)
    after = Request(worker, start)

    assert tuple(after.decode(_GENERATED - 1)) == _reference("hot")


@pytest.mark.parametrize("chains", [False, True])
def test_a_stopped_sequence_leaves_no_rows_to_others(chains: bool):
    worker = _worker(chains, prefix_cache=1 << 20)
    _begin(Request(worker, _start(_HOT)))
    list(worker.handle(Stop(RequestId(1))))
    assert worker._begun is None

    assert tuple(Request(worker, _start(_HOT, sequence=2)).decode(_GENERATED)) == _reference("hot")


@pytest.mark.parametrize("chains", [False, True])
def test_nothing_begins_while_a_prompt_waits(chains: bool):
    worker = _worker(chains)
    request = Request(worker, _start())
    list(worker.handle(_start(sequence=2)))
    list(worker.handle(request.verify(plain_next=True)))

    replies: list[Any] = []
    while worker.has_work:
        replies += worker.work()

    assert worker._begun is None
    assert [reply.request for reply in replies if isinstance(reply, Prefilled)] == [2]


@pytest.mark.parametrize("fault", ["memory", "interruption", "level"])
def test_a_forward_that_has_begun_ends_with_the_sequences_that_a_failed_call_ends(fault: str):
    worker = _worker(chains=True)
    request = Request(worker, _start(_HOT))
    _begin(request)
    if fault == "level":
        lost = list(worker.lower("too wide") or ())
    else:
        lost = list(worker.run_short() if fault == "memory" else worker.run_interrupted())

    assert worker._begun is None
    assert any(isinstance(each, Fault) for each in lost)
    start = msgspec.structs.replace(_start(_HOT), tokens=tuple(request.tokens), round=1, root=request.root)
    assert tuple(Request(worker, start).decode(_GENERATED - 1)) == _reference("hot")


class _Orchestrator:
    """Several requests whose rounds are trees or roots alone, beside a worker that works at random moments."""

    def __init__(self, worker: TargetWorker, starts: Sequence[Start], name: str, seed: int) -> None:
        self.worker = worker
        self.requests = [Request(worker, start) for start in starts]
        self._name = name
        self._chance = random.Random(seed)

    def decode(self, joining: Callable[[], Start | None]) -> None:
        """Until each has all tokens, or one that ends it; `joining`: a further request, now and then."""
        while running := [each for each in self.requests if not self._finished(each)]:
            start = joining() if self._chance.random() < 0.1 else None
            if start is not None:
                self.requests.append(Request(self.worker, start))
                continue
            if self._chance.random() < 0.1:
                running = self._chance.sample(running, self._chance.randint(1, len(running)))
            self._round(running)
            for request in running:
                if self._finished(request):
                    list(self.worker.handle(Stop(request.sequence)))

    def _round(self, running: Sequence[Request]) -> None:
        tree, next = self._chance.random() < 0.3, self._chance.random() < 0.7
        asked: list[Verify] = []
        for request in running:
            place = len(request.tokens)
            entries = _chain(self._name, request, 4) if tree and place < len(_PROMPT) + _GENERATED - 5 else ((), ())
            asked.append(request.verify(*entries, plain_next=next and not entries[0]))
        message = asked[0] if len(asked) == 1 else Forest(tuple(asked))
        replies: list[Any] = []
        for _ in range(1 if self._chance.random() < 0.9 else 2):
            # It is sent again, as if the answer had been slow.
            replies = list(self.worker.handle(message))
        while self.worker.has_work and self._chance.random() < 0.9:
            replies += self.worker.work()
        for request, verify in zip(running, asked, strict=True):
            request.fold(verify, replies)

    def _finished(self, request: Request) -> bool:
        ends = request.tokens[-1] in request.ends
        return ends or len(request.tokens) >= len(_PROMPT) + _GENERATED


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("name", ["greedy", "hot", "filtered", "nucleus", "nucleus, told"])
def test_tokens_are_those_of_the_target_alone_whenever_trees_and_requests_come(name: str, chains: bool):
    sampling, reference = _SAMPLINGS[name], _reference(name)
    ends = (reference[len(_PROMPT) + 11],)
    for seed in range(3):
        starts = [_start(sampling, sequence=1 + each) for each in range(1 + seed % 3)]
        more = iter([_start(sampling, 11, ends), _start(sampling, 12)])
        several = _Orchestrator(_worker(chains), starts, name, seed)

        several.decode(lambda more=more: next(more, None))

        for request in several.requests:
            assert tuple(request.tokens[: len(reference)]) == reference[: len(request.tokens)]


@pytest.mark.parametrize("name", ["greedy", "hot", "nucleus, told", "log-probabilities", "rejection"])
def test_requests_that_share_a_forward_are_all_sampled_before_one_is_read(name: str, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    worker = _worker(chains=False)
    requests = [Request(worker, _start(_SAMPLINGS[name], sequence=1 + each)) for each in range(3)]
    for rule in ("coupled", "rejection"):
        monkeypatch.setattr(engine, rule, _noted(getattr(engine, rule), order))
    replies = list(worker.handle(Forest(tuple(request.verify() for request in requests))))

    assert order == ["begin"] * 3 + ["read"] * 3
    assert {reply.bonus for reply in replies if isinstance(reply, Verdict)} == {_reference(name)[len(_PROMPT)]}


def _noted(rule: Callable[..., Walk], order: list[str]) -> Callable[..., Walk]:
    def noted(*given: Any, **named: Any) -> Walk:
        order.append("begin")
        walk = rule(*given, **named)
        return lambda: order.append("read") or walk()

    return noted
