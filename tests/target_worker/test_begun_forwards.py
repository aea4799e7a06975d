"""Laws of forwards that begin before their Verify, and before the tokens that they take are read ("chained")."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Forest, Prefilled, Start, Stop, Verdict, Verify
from protocol.sampling import logits_processors
from target_worker import engine
from target_worker.verification import Walk
from target_worker.worker import TargetWorker
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import tree_model
from tests.support.target_requests import GREEDY, HOT, PROMPT, Request, Tree, start, target, wrong_at_last

_GENERATED = 24
_SAMPLINGS = {
    "greedy": GREEDY,
    "hot": HOT,
    "filtered": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.4, seed=8),
    "nucleus": Sampling(temperature=0.9, top_k=40, top_p=0.8, min_p=0.001, logit_bias=((3, 1.0),), seed=8),
    "log-probabilities": Sampling(temperature=0.7, seed=5, logprobs=2),
    "nucleus, told": Sampling(temperature=1.1, top_p=0.7, seed=5, logprobs=2),
}
_FAMILIES = ("gemma3_text", "qwen3_5", "mamba2", "deepseek_v3")
"""With windows, with layers that fold tokens into a state and others, with such layers alone, with latent attention."""


def _worker(chains: bool, model: LanguageModel | None = None, **settings: Any) -> TargetWorker:
    model = model or tree_model()
    model.chains = chains
    return target(model, 3, **settings)


@cache
def _model(family: str) -> LanguageModel:
    return LanguageModel(tiny(family))


@cache
def _plain(sampling: Sampling, model: LanguageModel | None = None) -> tuple[tuple[int, ...], list[Verdict]]:
    """Target-only decoding, where every forward waits for its Verify."""
    request = Request(_worker(chains=False, model=model), start(PROMPT, sampling))
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
    request = Request(_worker(chains), start(PROMPT, _SAMPLINGS[name]))
    verdicts = [request.step(plain_next=True) for _ in range(_GENERATED)]

    assert tuple(request.tokens) == tokens
    assert [(each.bonus, each.token_logprobs) for each in verdicts] == [
        (each.bonus, each.token_logprobs) for each in expected
    ]


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_every_kind_of_layer_has_the_same_tokens(family: str, sampling: Sampling):
    model = _model(family)
    tokens, _ = _plain(sampling, model)
    request = Request(_worker(chains=True, model=model), start(PROMPT, sampling))
    for place in range(_GENERATED):
        request.step(plain_next=place % 5 > 0)

    assert tuple(request.tokens) == tokens


@pytest.mark.parametrize("chains", [False, True])
def test_no_forward_is_repeated(chains: bool):
    request = Request(_worker(chains), start())
    for _ in range(20):
        request.step(plain_next=True)

    assert request.worker._sequences[RequestId(1)].cache.next_row == 21


@pytest.mark.parametrize("name", ["greedy", "hot", "nucleus", "log-probabilities"])
def test_a_chained_forward_begins_before_the_token_that_it_takes_is_read(name: str, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    worker = _worker(chains=True)
    request = Request(worker, start(PROMPT, _SAMPLINGS[name]))
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
    request = Request(_worker(chains=True), start(PROMPT, _SAMPLINGS[name]))
    verdicts: list[Verdict] = []
    begun: set[bool] = set()
    while len(request.tokens) < len(tokens):
        verdicts.append(request.step(plain_next=True))
        begun.add(request.worker._begun is not None)
    trees = Request(_worker(chains=True), start(PROMPT, _SAMPLINGS[name]))
    while len(trees.tokens) < len(tokens) - 5:
        trees.step(*_chain(name, trees, 4))

    assert begun == {True, False}
    assert [(each.bonus, each.token_logprobs) for each in verdicts] == [
        (each.bonus, each.token_logprobs) for each in expected
    ]
    assert tuple(trees.tokens) == tokens[: len(trees.tokens)]


@pytest.mark.parametrize("chains", [False, True])
def test_a_tree_that_comes_too_late_is_answered_by_the_root_alone_and_the_verdict_says_so(chains: bool):
    request = Request(_worker(chains), start(PROMPT, HOT))
    _begin(request)
    first = request.step(*_chain("hot", request, 4))
    second = request.step(*_chain("hot", request, 4))

    assert (first.path, first.root_alone) == ((), True)
    assert (len(second.path), second.root_alone) == (3, False)
    assert tuple(request.tokens) == _reference("hot")[: len(request.tokens)]


def _chain(name: str, request: Request, depth: int) -> Tree:
    return wrong_at_last(_reference(name)[len(request.tokens) : len(request.tokens) + depth])


@pytest.mark.parametrize("chains", [False, True])
def test_nothing_begins_behind_an_end_token_and_beyond_the_context(chains: bool):
    worker = _worker(chains, tree_model(max_position_embeddings=len(PROMPT) + 6))
    ended = Request(worker, start(eos_tokens=(_reference("greedy")[len(PROMPT) + 3],)))
    for _ in range(4):
        ended.step(plain_next=True)
    assert worker._begun is None

    full = Request(worker, start(request=2))
    for _ in range(7):
        full.step(plain_next=True)

    assert worker._begun is None
    assert tuple(full.tokens) == _reference("greedy")[: len(PROMPT) + 7]


def _restarted(request: Request) -> Request:
    again = start(request.tokens, HOT, round=request.round)
    return Request(request.worker, msgspec.structs.replace(again, root=request.root))


@pytest.mark.parametrize("chains", [False, True])
def test_a_restart_gives_the_same_tokens(chains: bool):
    worker = _worker(chains)
    before = Request(worker, start(PROMPT, HOT))
    _begin(before)
    after = _restarted(before)

    assert tuple(after.decode(_GENERATED - 1)) == _reference("hot")


@pytest.mark.parametrize("chains", [False, True])
def test_a_stopped_sequence_leaves_no_rows_to_others(chains: bool):
    worker = _worker(chains, prefix_cache=1 << 20)
    _begin(Request(worker, start(PROMPT, HOT)))
    list(worker.handle(Stop(RequestId(1))))
    assert worker._begun is None

    assert tuple(Request(worker, start(PROMPT, HOT, request=2)).decode(_GENERATED)) == _reference("hot")


@pytest.mark.parametrize("chains", [False, True])
def test_nothing_begins_while_a_prompt_waits(chains: bool):
    worker = _worker(chains)
    request = Request(worker, start())
    list(worker.handle(start(request=2)))
    list(worker.handle(request.verify(plain_next=True)))

    replies: list[Any] = []
    while worker.has_work:
        replies += worker.work()

    assert worker._begun is None
    assert [reply.request for reply in replies if isinstance(reply, Prefilled)] == [2]


@pytest.mark.parametrize("failure", ["memory", "interruption", "level"])
def test_a_forward_that_has_begun_ends_with_the_sequences_that_a_failed_call_ends(failure: str):
    worker = _worker(chains=True)
    request = Request(worker, start(PROMPT, HOT))
    _begin(request)
    if failure == "level":
        lost = list(worker.lower("too wide") or ())
    else:
        lost = list(worker.run_short() if failure == "memory" else worker.run_interrupted())

    assert worker._begun is None
    assert any(isinstance(each, Fault) for each in lost)
    assert tuple(_restarted(request).decode(_GENERATED - 1)) == _reference("hot")


class _Orchestrator:
    """Several requests whose rounds are trees or roots alone, beside a worker that works at random moments."""

    def __init__(self, worker: TargetWorker, starts: Sequence[Start], name: str, seed: int) -> None:
        self.worker = worker
        self.requests = [Request(worker, each) for each in starts]
        self._name = name
        self._chance = random.Random(seed)

    def decode(self, joining: Callable[[], Start | None]) -> None:
        """Until each has all tokens, or one that ends it; `joining`: a further request, now and then."""
        while running := [each for each in self.requests if not self._finished(each)]:
            more = joining() if self._chance.random() < 0.1 else None
            if more is not None:
                self.requests.append(Request(self.worker, more))
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
            entries = _chain(self._name, request, 4) if tree and place < len(PROMPT) + _GENERATED - 5 else ((), ())
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
        return ends or len(request.tokens) >= len(PROMPT) + _GENERATED


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("name", ["greedy", "hot", "filtered", "nucleus", "nucleus, told"])
def test_tokens_are_those_of_the_target_alone_whenever_trees_and_requests_come(name: str, chains: bool):
    sampling, reference = _SAMPLINGS[name], _reference(name)
    ends = (reference[len(PROMPT) + 11],)
    for seed in range(3):
        starts = [start(PROMPT, sampling, request=1 + each) for each in range(1 + seed % 3)]
        more = iter([start(PROMPT, sampling, 11, eos_tokens=ends), start(PROMPT, sampling, 12)])
        several = _Orchestrator(_worker(chains), starts, name, seed)

        several.decode(lambda more=more: next(more, None))

        for request in several.requests:
            assert tuple(request.tokens[: len(reference)]) == reference[: len(request.tokens)]


@pytest.mark.parametrize("name", ["greedy", "hot", "nucleus, told", "log-probabilities"])
def test_requests_that_share_a_forward_are_all_sampled_before_one_is_read(name: str, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    worker = _worker(chains=False)
    requests = [Request(worker, start(PROMPT, _SAMPLINGS[name], request=1 + each)) for each in range(3)]
    monkeypatch.setattr(engine, "coupled", _noted(engine.coupled, order))
    replies = list(worker.handle(Forest(tuple(request.verify() for request in requests))))

    assert order == ["begin"] * 3 + ["read"] * 3
    assert {reply.bonus for reply in replies if isinstance(reply, Verdict)} == {_reference(name)[len(PROMPT)]}


def _noted(rule: Callable[..., Walk], order: list[str]) -> Callable[..., Walk]:
    def noted(*given: Any, **named: Any) -> Walk:
        order.append("begin")
        walk = rule(*given, **named)
        return lambda: order.append("read") or walk()

    return noted
