"""Laws of the registry: a stamp is valid for one pinned key only, and a silent worker is given up."""

from itertools import count
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orchestrator.runtime.workers.remote_registry import LineLimit, RemoteRegistry, RemoteWorker
from protocol.messages.base import Role
from protocol.messages.remote import Attach
from protocol.messages.worker import Hello, Pong

ONE, OTHER = b"a" * 40, b"b" * 40


def guests(**refusals: str) -> RemoteRegistry:
    numbers = count(1)
    return RemoteRegistry(lambda: next(numbers), dict[Any, str](refusals))


def attached(
    all: RemoteRegistry, identity: bytes = ONE, role: Role = "draft", life: int = 1, now: float = 0.0
) -> RemoteWorker:
    worker = all.attach("mac", identity, b"control", Attach(role, life), now)
    assert isinstance(worker, RemoteWorker)
    return worker


def hello(role: Role = "draft") -> Hello:
    return Hello(role, "mlx", "m", "llama", 32, 64, "t", "gpu", 1)


def test_a_stamp_counts_only_from_the_guest_that_it_was_given_to_until_its_worker_is_dropped():
    all = guests()
    worker = attached(all)

    assert all.find(worker.incarnation, ONE) is worker
    assert all.find(worker.incarnation, OTHER) is None
    assert all.find(worker.incarnation + 1, ONE) is None
    all.drop(worker)
    assert all.find(worker.incarnation, ONE) is None
    assert all.deadline() is None


def test_asking_again_for_the_same_life_gives_the_same_stamp_and_another_life_another():
    all = guests()

    first = attached(all, life=1)
    again = all.attach("mac", ONE, b"elsewhere", Attach("draft", 1), 1.0)

    assert again is first
    assert first.control == b"elsewhere"
    assert attached(all, life=2).incarnation != first.incarnation
    assert attached(all, identity=OTHER, life=1).incarnation != first.incarnation


def test_what_is_not_wanted_is_refused_with_the_reason_and_a_second_target_until_the_first_is_gone():
    all = guests()
    first = attached(all, role="target")

    assert guests(target="has one").attach("mac", ONE, b"c", Attach("target", 1), 0.0) == "has one"
    assert isinstance(all.attach("other", OTHER, b"c", Attach("target", 1), 0.0), str)
    all.drop(first)
    assert attached(all, OTHER, "target").role == "target"


@given(st.lists(st.integers(0, 9), max_size=60))
def test_there_are_never_more_workers_than_the_state_machine_takes_and_few_of_one_machine(machines: list[int]):
    all = guests()
    for life, machine in enumerate(machines):
        all.attach("mac", b"%d" % machine, b"c", Attach("draft", life), 0.0)

    assert len(list(all)) == min(15, sum(min(4, machines.count(machine)) for machine in range(10)))


def test_a_worker_that_plays_another_part_is_not_introduced():
    all = guests()
    worker = attached(all, role="draft")

    assert not all.introduce(worker, b"peer", hello("target"))
    assert worker.hello is None


def test_a_silent_draft_is_given_up_after_ten_seconds_and_one_out_of_reach_at_once():
    all = guests()
    worker = attached(all, now=0.0)
    all.introduce(worker, b"peer", hello())
    worker.heard_at = 5.0

    assert all.deadline() == 15.0
    assert all.overdue(14.9) == []
    assert all.overdue(15.0) == [worker]
    worker.lost = True
    assert all.overdue(0.0) == [worker]
    assert all.deadline() == 0.0


def test_an_attach_without_a_sign_of_life_is_given_up_after_half_a_minute_and_one_that_loads_for_ever_too():
    all = guests()
    silent, loading = attached(all, life=1), attached(all, OTHER, life=2)
    for now in range(0, 900, 20):
        attached(all, OTHER, life=2, now=now)
        assert all.overdue(now) == ([silent] if now >= 30 else [])

    assert all.overdue(900) == [silent, loading]


def test_the_round_trip_is_the_shortest_of_the_last_probes():
    all = guests()
    worker = attached(all)
    for trip in (9e-3, 2e-3, 5e-3):
        asked = all.ping(worker, 1.0)
        all.pong(worker, Pong(asked.sent), 1.0 + trip)

    assert worker.entry().round_trip == pytest.approx(2e-3)


def test_an_answer_to_no_question_of_ours_measures_nothing():
    all = guests()
    worker = attached(all)
    asked = all.ping(worker, 1.0)

    assert not all.pong(worker, Pong(asked.sent + 1.0), 3.0)
    assert worker.round_trip is None
    assert not all.pong(worker, Pong(float("nan")), 3.0)
    all.pong(worker, Pong(asked.sent), 3.0)
    all.pong(worker, Pong(asked.sent), 1.5)
    assert worker.round_trip == pytest.approx(2.0)


def test_the_first_lines_of_a_minute_pass_and_say_how_many_did_not_before():
    limit = LineLimit(2)

    assert [limit.take(now) for now in (0, 1, 2, 59, 60, 61, 62, 130)] == [0, 0, None, None, 2, 0, None, 1]
