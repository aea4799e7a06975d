"""The target's messages with a tiny model: the same tokens for every proposal, and a reply to every error."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level, RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import (
    CacheOff,
    Forest,
    Ping,
    Prefilled,
    Prefilling,
    Stop,
    Verdict,
    Verify,
)
from protocol.sampling.gumbel_noise import Noise, scores
from target_worker.disk_cache.kept_prefixes import DiskReading
from target_worker.worker import TargetWorker
from tests.support.models.tiny_models import VOCABULARY, network, stock_logits, tree_model
from tests.support.processing import processed
from tests.support.target_requests import (
    GREEDY,
    HOT,
    PROMPT,
    Request,
    Tree,
    answers,
    fault,
    start,
    target,
    wrong_at_last,
)

_GENERATED = 24
_FILTERED = Sampling(
    temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.4, repetition_context=6, seed=8
)
_SAMPLINGS = {"greedy": GREEDY, "hot": HOT, "filtered": _FILTERED}


def _worker(chunk: int = 3, level: Level = "tree", disk: "_Disk | None" = None, **changes: Any) -> TargetWorker:
    model = tree_model(**changes)
    model.level = level
    return target(model, chunk, disk=disk)


def _decoded(request: Request, propose: Callable[[list[int]], Tree]) -> list[int]:
    while len(request.tokens) < len(PROMPT) + _GENERATED:
        request.step(*propose(request.tokens))
    return request.tokens[: len(PROMPT) + _GENERATED]


@cache
def _reference(sampling: Sampling) -> tuple[int, ...]:
    """Tokens one by one through stock mlx-lm."""
    model, noise, tokens = network(), Noise(VOCABULARY), list(PROMPT)
    while len(tokens) < len(PROMPT) + _GENERATED:
        logits = processed(stock_logits(model, tokens)[None], sampling, tokens)
        tokens.append(int(mx.argmax(scores(logits, [len(tokens)], sampling, noise))))
    return tuple(tokens)


def _nothing(tokens: list[int]) -> Tree:
    return (), ()


def _oracle(sampling: Sampling, depth: int) -> Callable[[list[int]], Tree]:
    return lambda tokens: wrong_at_last(_reference(sampling)[len(tokens) : len(tokens) + depth])


def _wide(sampling: Sampling) -> Callable[[list[int]], Tree]:
    """The right path, each of its tokens among wrong siblings, entries in breadth-first order."""

    def propose(tokens: list[int]) -> Tree:
        coming = _reference(sampling)[len(tokens) : len(tokens) + 3]
        proposed, parents, above = [], [], 0
        for token in coming:
            siblings = [(token + shift) % VOCABULARY for shift in (5, 0, 9)]
            proposed += siblings
            parents += [above] * 3
            above = len(proposed) - 1
        return proposed, parents

    return propose


def _random(seed: int) -> Callable[[list[int]], Tree]:
    chance = random.Random(seed)

    def propose(tokens: list[int]) -> Tree:
        pairs = {(chance.randrange(index + 1), chance.randrange(VOCABULARY)): None for index in range(14)}
        ordered = sorted(pairs)
        return [token for _, token in ordered], [min(parent, entry) for entry, (parent, _) in enumerate(ordered)]

    return propose


def _adversarial(tokens: list[int]) -> Tree:
    """The last tokens of the context below the root, and a chain that repeats one of them."""
    repeated = sorted(set(tokens[-6:]))
    return [*repeated, *[repeated[0]] * 4], [*[0] * len(repeated), 1, *range(len(repeated) + 1, len(repeated) + 4)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", _SAMPLINGS)
@pytest.mark.parametrize("tree", ["nothing", "oracle 2", "oracle 6", "wide", "random", "adversarial"])
def test_the_tokens_do_not_depend_on_what_is_proposed(tree: str, name: str):
    sampling = _SAMPLINGS[name]
    propose = {
        "nothing": _nothing,
        "oracle 2": _oracle(sampling, 2),
        "oracle 6": _oracle(sampling, 6),
        "wide": _wide(sampling),
        "random": _random(5),
        "adversarial": _adversarial,
    }[tree]

    tokens = _decoded(Request(_worker(), start(sampling=sampling)), propose)

    assert tuple(tokens) == _reference(sampling)


@pytest.mark.parametrize("name", _SAMPLINGS)
def test_the_right_part_of_a_proposal_is_accepted(name: str):
    sampling = _SAMPLINGS[name]
    orchestrator = Request(_worker(), start(sampling=sampling))

    verdict = orchestrator.step(*_oracle(sampling, 6)(orchestrator.tokens))

    assert len(verdict.path) == 5


def test_the_prompt_is_prefilled_in_chunks_and_answered_once():
    worker = _worker(chunk=3)
    replies = list(worker.handle(start()))
    chunks = 0
    while worker.has_work:
        replies += worker.work()
        chunks += 1

    read = [Prefilling(RequestId(1), 0, tokens) for tokens in (3, 6)]
    assert chunks == 3
    assert replies == [*read, Prefilled(RequestId(1), 0, len(PROMPT) - 1, 3.0)]


def test_a_prompt_of_one_token_needs_no_prefill():
    assert answers(_worker(), start([4])) == [Prefilled(RequestId(1), 0, 0, 0.0)]


def test_a_repeated_start_is_ignored_while_the_prompt_is_read_and_answered_after():
    worker = _worker()
    list(worker.handle(start()))
    list(worker.work())

    assert list(worker.handle(start())) == []
    assert len(answers(worker, start())) == 1
    assert answers(worker, start()) == [Prefilled(RequestId(1), 0, len(PROMPT) - 1, 3.0)]


def test_a_verification_does_not_wait_for_another_sequence_s_prompt():
    worker = _worker(chunk=1)
    orchestrator = Request(worker, start())
    list(worker.handle(start(request=2)))
    verify = orchestrator.verify()

    (verdict,) = worker.handle(verify)

    assert isinstance(verdict, Verdict)
    assert worker.has_work


def test_a_start_reuses_the_prefix_that_is_held():
    worker = _worker()
    first = Request(worker, start(sampling=HOT))
    first.step(*_oracle(HOT, 4)(first.tokens))
    forked = [*first.tokens[:-2], 60, 61, 62]

    second = Request(worker, start(forked, HOT, round=9))

    assert second.replies == [Prefilled(RequestId(1), 9, 2, 1.0)]
    expected = Request(_worker(), start(forked, HOT)).step().bonus
    assert second.step().bonus == expected


def test_a_start_at_an_older_round_is_served_too():
    worker = _worker()
    orchestrator = Request(worker, start(sampling=HOT))
    orchestrator.step()
    orchestrator.step()

    again = Request(worker, start(sampling=HOT))

    assert again.replies == [Prefilled(RequestId(1), 0, 0, 0.0)]
    assert tuple(_decoded(again, _nothing)) == _reference(HOT)


def test_trees_verified_together_give_the_tokens_of_each_alone():
    worker = _worker()
    requests = [
        (sampling, Request(worker, start(sampling=sampling, request=number)))
        for number, sampling in enumerate((GREEDY, HOT, _FILTERED), start=1)
    ]

    for depth in (3, 0, 2, 1):
        asked = [one.verify(*_oracle(sampling, depth)(one.tokens)) for sampling, one in requests]
        verdicts = answers(worker, Forest(tuple(asked)))
        for (sampling, one), verify, verdict in zip(requests, asked, verdicts, strict=True):
            one.fold(verify, [verdict])
            assert tuple(one.tokens) == _reference(sampling)[: len(one.tokens)]


def test_a_refused_tree_does_not_change_the_other_trees_of_its_forward():
    worker = _worker()
    good, settled, repeated, refused = (Request(worker, start(request=number)) for number in range(1, 5))
    stale = settled.verify()
    settled.step()
    settled.step()
    again = repeated.verify()
    verdict = repeated.step()
    unknown = msgspec.structs.replace(good.verify(), request=RequestId(9))
    bad = _too_deep(refused)

    lost, repeat, refusal, fresh = answers(worker, Forest((unknown, stale, again, bad, good.verify())))

    assert (fault([lost]), repeat, fault([refusal])) == (("lost", 9), verdict, ("refused", 4))
    good.fold(good.verify(), [fresh])
    assert tuple(good.tokens) == _reference(GREEDY)[: len(good.tokens)]


def test_a_repeated_verify_is_answered_with_the_same_verdict():
    worker = _worker()
    orchestrator = Request(worker, start(sampling=HOT))
    verify = orchestrator.verify(*_oracle(HOT, 3)(orchestrator.tokens))
    first = answers(worker, verify)

    assert answers(worker, verify) == first
    orchestrator.fold(verify, first)
    assert tuple(_decoded(orchestrator, _nothing)) == _reference(HOT)


def test_a_prompt_is_prefilled_in_turns_with_what_goes_to_disk():
    disk = _Disk()
    worker = _worker(disk=disk)
    list(worker.handle(start()))
    list(worker.handle(start(request=2)))

    turns = 0
    while any(sequence.prefilling for sequence in worker._sequences.values()):
        list(worker.work())
        turns += 1

    assert 0 < disk.steps <= turns // 2 + 1
    while worker.has_work:
        list(worker.work())
    assert disk.steps == _Disk.most


class _Disk:
    """A disk cache with files to compute."""

    most = 1_000

    def __init__(self) -> None:
        self.steps = 0
        self.reason = ""

    @property
    def waits(self) -> bool:
        return self.steps < self.most

    def step(self) -> None:
        self.steps += 1

    @property
    def off(self) -> bool:
        return bool(self.reason)

    def turned_off(self) -> str:
        reason, self.reason = self.reason, ""
        return reason

    def read(self, *_: object) -> DiskReading | None:
        return None


class _HangingDisk(_Disk):
    """It ends no reading by itself, and holds every prompt."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[DiskReading] = []

    def read(self, *asked: Any) -> DiskReading:
        self.readings.append(DiskReading(*asked))
        return self.readings[-1]

    def resume(self, sequence: TreeSequence, reading: DiskReading) -> int:
        sequence.prefill(reading.tokens[:5])
        return 5

    def keep(self, *_: object) -> None: ...


def test_a_prompt_waits_for_the_disk_while_another_one_is_served():
    disk = _HangingDisk()
    worker = _worker(disk=disk)
    other = Request(worker, start(request=2))
    assert disk.readings[0].given_up
    list(worker.handle(start()))
    verdict = list(worker.handle(other.verify()))

    assert [type(reply) for reply in verdict] == [Verdict]
    assert list(worker.work()) == []
    disk.readings[1].end()
    prefilled = answers(worker, Ping(0))
    assert [(each.adopted, each.tokens) for each in prefilled if isinstance(each, Prefilled)] == [(5, 2)]


def test_a_prompt_is_prefilled_if_the_disk_is_late_and_its_tokens_are_the_same():
    disk = _HangingDisk()
    orchestrator = Request(_worker(disk=disk), start())

    (prefilled,) = orchestrator.replies
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.adopted, prefilled.tokens) == (0, len(PROMPT) - 1)
    assert "took more than 10 s" in prefilled.warning
    assert disk.readings[0].given_up
    assert _decoded(orchestrator, lambda _: ((), ())) == list(_reference(GREEDY))


def test_a_disk_cache_that_is_turned_off_is_told_once_without_a_request():
    disk = _HangingDisk()
    worker = _worker(disk=disk)
    disk.reason = "No space left on device"

    assert answers(worker, Ping(0)) == [CacheOff("No space left on device")]
    assert not worker.has_work


def test_an_ended_sequence_gives_its_reading_up():
    disk = _HangingDisk()
    worker = _worker(disk=disk)
    list(worker.handle(start()))
    list(worker.handle(Stop(RequestId(1))))

    assert disk.readings[0].given_up
    assert not worker.has_work


def test_a_prompt_whose_log_probabilities_are_told_is_not_read():
    disk = _HangingDisk()
    list(_worker(disk=disk).handle(start(sampling=Sampling(logprobs=0, prompt_logprobs=True))))

    assert disk.readings == []


def test_the_verdict_is_sent_before_the_cache_is_compacted():
    worker = _worker()
    orchestrator = Request(worker, start())
    sequence = worker._sequences[RequestId(1)]
    replies = iter(worker.handle(orchestrator.verify()))
    next(replies)

    assert sequence.cache.committed == len(PROMPT) - 1
    assert next(replies, None) is None
    assert sequence.cache.committed == len(PROMPT)


def test_an_unknown_a_stopped_and_a_prefilling_sequence_are_lost():
    known, prefilling = Request(_worker(), start()), _worker()
    list(prefilling.handle(start()))

    assert fault(answers(_worker(), known.verify())) == ("lost", 1)
    assert fault(list(prefilling.handle(known.verify()))) == ("lost", 1)
    assert list(prefilling.handle(Stop(RequestId(1)))) == []
    assert not prefilling.has_work
    assert known.ask(Stop(RequestId(1))) == []
    assert fault(known.ask(known.verify())) == ("lost", 1)


@pytest.mark.parametrize(
    "change", [{"round": 7}, {"position": 3}, {"root": 99}, {"tokens": (1,)}], ids=lambda change: next(iter(change))
)
def test_a_sequence_out_of_step_is_lost_and_unharmed(change: dict[str, Any]):
    orchestrator = Request(_worker(), start(sampling=HOT))

    assert fault(answers(orchestrator.worker, msgspec.structs.replace(orchestrator.verify(), **change)))[0] == "lost"
    assert tuple(_decoded(orchestrator, _nothing)) == _reference(HOT)


def _too_deep(request: Request) -> Verify:
    """A tree beyond the context."""
    far = (PROMPT[-1], *[0] * 505)
    return msgspec.structs.replace(request.verify(), tokens=far, parents=tuple(range(-1, len(far) - 1)))


def test_a_tree_may_fill_the_context_to_its_last_position():
    orchestrator = Request(_worker(max_position_embeddings=10), start())

    verdict = orchestrator.step([1, 2], [0, 1])

    assert verdict.round == 0


_LEVELS: list[tuple[Level, Tree, str]] = [
    ("chain", ([1, 2], [0, 0]), "verifies one path"),
    ("chain", ([1, 2, 3], [0, 1, 1]), "verifies one path"),
    ("plain", ([1], [0]), "one token"),
    ("plain", ([1, 2, 3], [0, 1, 0]), "one token"),
]


@pytest.mark.parametrize(("level", "tree", "words"), _LEVELS)
@pytest.mark.parametrize("joint", [False, True])
def test_a_tree_beyond_the_targets_level_is_refused_and_changes_no_token(
    level: Level, tree: Tree, words: str, joint: bool
):
    worker = _worker(level=level)
    orchestrator, other = (Request(worker, start(sampling=HOT, request=number)) for number in (1, 2))
    bad = orchestrator.verify(*tree)

    refusal, *others = answers(worker, Forest((bad, other.verify())) if joint else bad)

    assert fault([refusal]) == ("refused", 1)
    assert refusal.nodes == len(tree[0])
    assert words in refusal.text
    assert [type(answer) for answer in others] == [Verdict] * joint
    assert tuple(_decoded(orchestrator, _nothing)) == _reference(HOT)


@pytest.mark.parametrize("tokens", [[1] * 513, [1, VOCABULARY, 2]], ids=["too long", "unknown token"])
def test_a_prompt_that_can_not_be_served_is_refused(tokens: list[int]):
    worker = _worker()

    assert fault(answers(worker, start(tokens))) == ("refused", 1)
    assert not worker.has_work
