"""Several requests at once share rounds, wait no longer than promised, and never change each other's tokens."""

import pytest

from orchestrator.core.commands import Emit, SendMessage
from orchestrator.core.events import Ended
from orchestrator.core.options import Options
from orchestrator.core.policy.expected_rate import best_count, best_counts
from orchestrator.core.policy.in_turns import Autoregressive
from orchestrator.core.scheduler import Scheduler
from protocol.messages.base import SequenceId
from protocol.messages.worker import Forest, Start, Stop, Verdict, Verify
from tests.orchestrator.core.test_machine import PROMPT, STRATEGIES, Bench, ready, told
from tests.support.simulated_workers import reference


def rounds(bench: Bench) -> list[list[int]]:
    """Whose trees each of the target's forwards was about."""
    messages = [c.message for c in bench.log if isinstance(c, SendMessage) and isinstance(c.message, Verify | Forest)]
    return [[one.sequence for one in (m.trees if isinstance(m, Forest) else (m,))] for m in messages]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_share_rounds_and_get_the_tokens_of_each_alone(strategy):
    bench = ready(strategy)
    for id in (1, 2, 3):
        bench.submit(id, max_tokens=20 + id)
    bench.run()

    assert {id: bench.tokens[id] for id in (1, 2, 3)} == {id: reference(PROMPT, 20 + id, seed=id) for id in (1, 2, 3)}
    assert any(len(sharing) > 1 for sharing in rounds(bench))


def test_plain_rounds_serve_every_request_that_is_ready():
    bench = ready("ar")
    for id in (1, 2, 3):
        bench.submit(id, max_tokens=10)
    bench.run()

    assert rounds(bench) == [[1, 2, 3]] * 10


def test_one_that_ends_or_is_cancelled_leaves_the_others_alone():
    bench = ready("adaptive")
    for id in (1, 2, 3):
        bench.submit(id, max_tokens=6 if id == 1 else 40)
    bench.run(turns=30)
    bench.step(Ended(SequenceId(2), "cancelled"))
    bench.run()

    assert bench.finished[2].reason == "cancelled"
    assert [bench.tokens[id] for id in (1, 3)] == [reference(PROMPT, 6, seed=1), reference(PROMPT, 40, seed=3)]


def test_a_lost_verdict_delays_its_own_request_only():
    bench = ready("ar")
    for id in (1, 2):
        bench.submit(id, max_tokens=10)
    while len(bench.tokens.get(1, [])) < 3:
        bench.run(turns=1)
    lost = next(entry for entry in bench.queue if isinstance(entry[-1], Verdict) and entry[-1].sequence == 2)
    bench.queue.remove(lost)
    began = bench.now
    while 1 not in bench.finished:
        bench.run(turns=1)

    assert bench.now < began + 1.0
    bench.run()
    assert {id: bench.tokens[id] for id in (1, 2)} == {id: reference(PROMPT, 10, seed=id) for id in (1, 2)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_new_request_has_its_prompt_read_and_its_first_token_in_the_next_round(strategy):
    bench = ready(strategy)
    bench.submit(1, max_tokens=50)
    bench.run(turns=9)
    bench.delay["target"] = 0.3
    before = len(rounds(bench))
    bench.submit(2, max_tokens=5)
    while len(bench.tokens.get(2, [])) < 1:
        bench.run(turns=1)

    assert rounds(bench)[before] == [2], "its prefill, and one short round"
    bench.run()
    assert [1, 2] in [sorted(sharing) for sharing in rounds(bench)]


def test_a_long_prompt_lets_the_others_have_a_round_a_second():
    bench = ready("ar")
    bench.submit(1, max_tokens=50)
    bench.run(turns=9)
    answers = bench.workers["target"].handle
    # This prompt is never read to its end.
    bench.workers["target"].handle = lambda message: (
        [] if isinstance(message, Start) and message.sequence == 2 else answers(message)
    )
    bench.submit(2, max_tokens=5)
    began, before = bench.now, len(bench.tokens[1])
    while bench.now < began + 4.5:
        bench.run(turns=1)

    assert 3 <= len(bench.tokens[1]) - before <= 5


def test_a_stream_of_new_requests_does_not_starve_the_others():
    bench = ready("ar")
    bench.submit(1, max_tokens=12)
    bench.run(turns=9)
    newest = 1
    while 1 not in bench.finished and newest < 100:
        newest += 1
        bench.submit(newest, max_tokens=1)
        bench.run(turns=2)

    assert bench.tokens[1] == reference(PROMPT, 12, seed=1)
    assert newest < 50


def test_requests_beyond_the_places_wait_and_take_turns():
    bench = ready("adaptive", concurrent=2, turn=8)
    for id in (1, 2, 3, 4):
        bench.submit(id, max_tokens=30)
    bench.run()

    assert all(len(sharing) <= 2 for sharing in rounds(bench))
    assert {id: bench.tokens[id] for id in range(1, 5)} == {id: reference(PROMPT, 30, seed=id) for id in range(1, 5)}
    first: list[int] = [command.sequence for command in bench.log if isinstance(command, Emit)]
    assert first.index(4) < len(first) - first[::-1].index(1), "the last one begins before the first one has ended"
    stopped = [message.sequence for message in told(bench, Stop)]
    assert stopped.count(1) > 2, "who made room is not served meanwhile"


def test_places_go_round():
    scheduler = Scheduler(Autoregressive(Options()), 2, turn=10)

    assert [scheduler.add(SequenceId(id)) for id in (1, 2, 3, 4)] == [True, True, False, False]
    assert scheduler.preempt(SequenceId(1), 9) is None
    assert scheduler.preempt(SequenceId(1), 1) == 3
    assert scheduler.preempt(SequenceId(2), 12) == 4
    assert scheduler.remove(SequenceId(2)) is None, "it waited"
    assert scheduler.remove(SequenceId(3)) == 1
    assert scheduler.preempt(SequenceId(4), 100) is None, "nobody waits"


def test_the_most_probable_nodes_of_all_trees_are_verified_together():
    paths = [[0.9, 0.8, 0.1], [0.3, 0.2], []]

    share = best_counts(paths, lambda width: 1.0 + 0.2 * width, 0.1)

    assert share.nodes == [2, 0, 0]
    assert share.rate == pytest.approx((3 + 0.9 + 0.8) / (1.0 + 0.2 * 5 + 0.1))
    alone = best_count(paths[0], lambda width: 1.0 + 0.2 * width, 0.1)
    assert best_counts(paths[:1], lambda width: 1.0 + 0.2 * width, 0.1).nodes == [alone.nodes]
