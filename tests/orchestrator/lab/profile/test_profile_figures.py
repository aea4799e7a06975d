"""Every figure of a profile on a run made by hand, in which each moment is known."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from orchestrator.core.options import Options
from orchestrator.lab.profile.figures import expected_rounds, grown_by, idle_by_cause, target_time
from orchestrator.lab.profile.overlap import (
    DRAFT_WORK,
    TARGET_WORK,
    Interval,
    Intervals,
    Repeat,
    TracedRequest,
    TracedStep,
    difference,
    draft_time,
    efficiency,
    intersection,
    overlapped_share,
    rounds,
    time_alone,
    total,
    traced_requests,
    union,
)
from orchestrator.lab.profile.run import TracedRun, TracedSpan, WorkerLife
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.machine.profiles.device_profiles import load_profile
from orchestrator.runtime.recording import Seen, Traced
from protocol.messages.base import NodeId, RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Prefilled, Start, Verdict, Verify
from protocol.speculation.token_tree import node_id
from protocol.worker.spans import SpanKind
from tests.support.simulation import modelled_pipeline

ONE = RequestId(1)
ROOT = NodeId(7)
A = node_id(ROOT, 10)
B = node_id(A, 11)
C = node_id(B, 12)
TARGET, DRAFT = 1, 2
FIRST, SECOND, THIRD = (TracedStep(DRAFT, serial) for serial in (1, 2, 3))


def grow(at: int, serial: int, parent: NodeId, *tokens: int, evaluated: int = 1) -> Seen:
    parents = (parent,) * len(tokens)
    return Seen(at, "draft", DRAFT, serial, Grow(ONE, 0, parents, tokens, (0.5,) * len(tokens), evaluated, 0.0))


def verify(at: int, round: int, root: NodeId, *chain: int) -> Seen:
    tokens = (1, *chain)
    return Seen(at, "target", TARGET, 0, Verify(ONE, round, root, 0, tokens, tuple(range(-1, len(chain)))))


def verdict(at: int, round: int, path: tuple[NodeId, ...], bonus: int) -> Seen:
    return Seen(at, "target", TARGET, 0, Verdict(ONE, round, path, bonus, 0.0))


# The prompt takes from 110 to 200. Round 0 verifies A, which step 1 found, and adds B, which step 2 foresaw;
# round 1 verifies C, which step 3 found ahead of the verdict. The orchestrator then waits from 620 to 680.
SEEN = (
    Seen(100, "target", TARGET, 0, Start(ONE, 0, (1, 2), ROOT, Sampling(temperature=0.5))),
    Seen(210, "target", TARGET, 0, Prefilled(ONE, 0, 1, 0.0)),
    grow(250, 1, ROOT, 10, 99),
    verify(260, 0, ROOT, 10),
    grow(330, 2, A, 11),
    grow(430, 3, B, 12),
    verdict(480, 0, (A,), 11),
    verify(490, 1, B, 12),
    verdict(620, 1, (C,), 50),
    verify(680, 2, node_id(C, 50)),
    verdict(800, 2, (), 51),
)
TARGET_SPANS = (
    TracedSpan(SpanKind.PREFILL, 110, 200, 1, 0, 1),
    TracedSpan(SpanKind.VERIFY, 270, 470, 1, 0, 2),
    TracedSpan(SpanKind.TIDY, 470, 475, 1, 0),
    TracedSpan(SpanKind.VERIFY, 500, 600, 1, 1, 2),
    TracedSpan(SpanKind.TIDY, 600, 605, 1, 1),
    TracedSpan(SpanKind.VERIFY, 690, 790, 1, 2, 1),
    TracedSpan(SpanKind.TIDY, 790, 795, 1, 2),
)
DRAFT_SPANS = (
    TracedSpan(SpanKind.PREFILL, 120, 150),
    TracedSpan(SpanKind.GROW, 150, 240, 1, 0, 1, 1),
    TracedSpan(SpanKind.GROW, 240, 320, 1, 0, 1, 2),
    TracedSpan(SpanKind.GROW, 320, 420, 1, 0, 1, 3),
    TracedSpan(SpanKind.GROW, 590, 710, 1, 1, 1, 4),
)
RUN = TracedRun(
    orchestrator=(
        TracedSpan(SpanKind.STEP, 210, 215),
        TracedSpan(SpanKind.WAIT, 215, 260, 1, 0),
        TracedSpan(SpanKind.WAIT, 620, 680, 1, 2),
    ),
    lives=(
        WorkerLife(Traced("target", TARGET, "gpu"), TARGET_SPANS),
        WorkerLife(Traced("draft", DRAFT, "ane"), DRAFT_SPANS),
    ),
    seen=SEEN,
)


@pytest.fixture
def traced() -> TracedRequest:
    (only,) = traced_requests(RUN)
    return only


def test_a_request_lasts_from_its_start_to_its_last_verdict_at_the_target(traced: TracedRequest):
    assert (traced.began, traced.decoding, traced.ended, traced.temperature) == (100, 200, 790, 0.5)
    assert traced_requests(replace(RUN, seen=SEEN[:4])) == traced_requests(TracedRun((), (), ())) == []


@pytest.mark.parametrize(
    ("draft", "target", "both", "expected"),
    [
        (60, 100, 100, 1.0),
        (60, 100, 160, 0.0),
        (60, 100, 130, 0.5),
        (100, 60, 130, 0.5),
        (60, 100, 90, None),
        (60, 100, 400, 0.0),
        (0, 100, 100, None),
    ],
    ids=["hidden", "in turns", "half", "either is the shorter", "less than one alone", "too slow", "no draft"],
)
def test_overlap_efficiency(draft: float, target: float, both: float, expected: float | None):
    found = efficiency([Repeat(draft, target, both)] * 6)

    assert found == (None if expected is None else (expected, expected, expected))
    assert efficiency([Repeat(draft, target, both)] * 5) is None


@pytest.mark.parametrize(("noise", "known"), [(5, True), (40, False)])
def test_an_efficiency_within_the_noise_is_not_known(noise: float, known: bool):
    repeats = [Repeat(60, 100 + noise * side, 130) for side in (-1, 1)] * 6

    found = efficiency(repeats)
    assert (found is not None) == known
    assert found is None or found[1] < found[0] == 0.5 < found[2]


def test_overlapped_share_is_of_the_draft():
    assert overlapped_share([(0, 10), (20, 30)], [(5, 22)]) == 7 / 20
    assert overlapped_share([], [(0, 9)]) is None


def test_steps_are_used_if_they_led_to_an_accepted_token(traced: TracedRequest):
    done = rounds(traced.seen)

    assert [each.accepted_from for each in done] == [{FIRST}, {THIRD}, set()]
    # C was computed behind B and B behind A, both before the target had chosen them.
    assert [each.used for each in done] == [{FIRST}, {FIRST, SECOND, THIRD}, set()]


@pytest.mark.parametrize(
    ("seen", "accepted_from", "used"),
    [
        (
            (
                *(grow(10, 1, ROOT, 10), verify(20, 0, ROOT), verdict(30, 0, (), 10)),
                *(grow(40, 2, A, 11), verify(50, 1, A, 11), verdict(60, 1, (B,), 12)),
            ),
            [set(), {SECOND}],
            [set(), {SECOND}],
        ),
        ((verify(20, 0, ROOT, 10), grow(25, 1, ROOT, 10), verdict(30, 0, (A,), 11)), [set()], [set()]),
        ((*SEEN, verdict(900, 1, (C,), 50)), [{FIRST}, {THIRD}, set()], [{FIRST}, {FIRST, SECOND, THIRD}, set()]),
    ],
    ids=["a root that was known owes nothing to its guess", "others' guesses credit no step", "a verdict counts once"],
)
def test_growth_is_used_by_the_rounds_that_needed_it(seen: tuple, accepted_from: list, used: list):
    done = rounds(seen)

    assert [each.accepted_from for each in done] == accepted_from
    assert [each.used for each in done] == used


def test_every_moment_of_the_draft_is_told_once(traced: TracedRequest):
    used = set().union(*(each.used for each in rounds(traced.seen)))

    time = draft_time(traced, grown_by(RUN), used)
    assert time == {"used": 50 + 100, "discarded": 15 + 20, "exposed": 40 + 30 + 85, "prefill": 0, "idle": 250}
    assert sum(time.values()) == total(traced.decode)


def test_every_moment_of_the_target_is_told_once_and_it_waits_for_the_process_that_holds_the_request(
    traced: TracedRequest,
):
    time, idle = target_time(traced), idle_by_cause(traced)

    assert (time["prefill"], time["verify"], time["tidy"]) == (90, 400, 10)
    assert sum(time.values()) == total(traced.all)
    assert idle == {
        "draft": [(215, 260), (620, 680)],
        "prefill": [],
        "orchestrator": [(210, 215), (480, 490)],
        "messages": [(100, 110), (200, 210), (260, 270), (475, 480), (490, 500), (605, 620), (680, 690)],
    }


def test_waiting_for_a_draft_that_still_reads_is_waiting_for_its_prefill(traced: TracedRequest):
    reading = replace(traced, draft=(TracedSpan(SpanKind.PREFILL, 150, 230), *traced.draft))

    idle = idle_by_cause(reading)
    assert (idle["prefill"], idle["draft"]) == ([(215, 230)], [(230, 260), (620, 680)])


def test_time_alone_counts_the_part_inside_and_is_not_known_of_a_replay_that_lacks_work():
    target, draft = RUN.lives
    fast = tuple(span._replace(end=span.begin + span.length // 2) for span in draft.spans)

    # TracedStep 1 lies in the window with 40 of its 90.
    assert time_alone(draft, WorkerLife(draft.worker, fast), DRAFT_WORK, [(200, 790)]) == (40 + 80 + 100 + 120) // 2
    assert time_alone(target, WorkerLife(target.worker, target.spans[:3]), TARGET_WORK, [(0, 1000)]) is None


class Repeating(ModelledLanguage):
    """A text of which every other forty tokens repeat themselves."""

    def token(self, request: int, position: int) -> int:
        return super().token(request, position % 8 if position // 40 % 2 else position)


@pytest.mark.thorough
def test_a_replay_tells_what_was_expected_of_each_round_and_what_came():
    options, devices = Options(), Devices.of(load_profile("m4-qwen3-8b"))
    simulation = modelled_pipeline(options, Repeating(AcceptanceModel(accept=0.6)), devices, kept=None)
    for request, temperature in ((1, 1.0), (2, 0.0), (3, 0.7)):
        simulation.submit(request, 400, temperature)
        simulation.run()

    table = expected_rounds([(event, now) for now, event, _ in simulation.history], options, last=2)

    for heat, request in ((0, 2), (0.7, 3)):
        (figures,) = (one.statistics for id, one in simulation.clients.items() if id == request)
        assert figures is not None
        for by in ("depth", "width"):
            rows: list[Any] = [row for row in table.rows if row[0] == heat and str(row[1]).startswith(by)]
            count = sum(row[3] for row in rows)
            expected, came, wanted, took = (sum(row[3] * row[at] for row in rows) / count for at in (4, 5, 6, 7))
            assert {row[2] for row in rows} == {"guess", "none"}
            assert (count, came) == (figures.rounds, pytest.approx(figures.tokens_per_round, rel=0.02))
            assert (expected, wanted) == (pytest.approx(came, rel=0.15), pytest.approx(took, rel=0.05))
    assert {row[0] for row in table.rows} == {0, 0.7}


# Sets of moments -----------------------------------------------------------------------------------


def some(chance: random.Random) -> list[Interval]:
    """Intervals of any kind: overlapping, nested, touching, empty, backwards."""
    return [(chance.randrange(40), chance.randrange(40)) for _ in range(chance.randrange(6))]


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


def proper(intervals: Intervals) -> bool:
    edges = [edge for interval in intervals for edge in interval]
    return all(one < other for one, other in pairwise(edges))


@pytest.mark.parametrize("seed", range(60))
def test_the_algebra_is_that_of_sets_of_moments(seed: int):
    chance = random.Random(seed)
    raw, others = some(chance), some(chance)
    one, other = union(raw), union(others)

    assert moments(one) == moments(raw)
    assert moments(intersection(one, other)) == moments(one) & moments(other)
    assert moments(difference(one, other)) == moments(one) - moments(other)
    assert total(one) == len(moments(one))
    assert all(map(proper, (one, intersection(one, other), difference(one, other))))
