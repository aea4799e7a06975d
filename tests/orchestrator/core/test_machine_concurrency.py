"""Several requests at once share rounds, wait no longer than promised, and never change each other's tokens."""

import pytest

from orchestrator.core.commands import Emit, TellReading
from orchestrator.core.expected_rate import best_count, best_counts
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES, Autoregressive
from orchestrator.core.scheduler import Scheduler
from orchestrator.lab.simulate.devices import Wire
from protocol.messages.base import RequestId
from protocol.messages.worker import Forest, Start, Stop, Verdict, Verify
from tests.support.scripted_simulation import ONE, THREE, TWO, ScriptedSimulation, ready


def rounds(simulation: ScriptedSimulation) -> list[list[int]]:
    """Whose trees each of the target's forwards was about."""
    messages = [message for message in simulation.sent(object) if isinstance(message, Verify | Forest)]
    return [[one.request for one in (m.trees if isinstance(m, Forest) else (m,))] for m in messages]


def submit(simulation: ScriptedSimulation, *max_tokens: int) -> None:
    """Requests whose prompts are one token long, so that the target needs no prefill."""
    for number, count in enumerate(max_tokens, start=1):
        simulation.submit(number, count, prompt=(7,))


def tokens_are_exact(simulation: ScriptedSimulation) -> bool:
    return all(client.tokens == client.reference for client in simulation.clients.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_share_rounds_and_get_the_tokens_of_each_alone(strategy):
    simulation = ready(strategy)
    submit(simulation, 21, 22, 23)
    simulation.run()

    assert tokens_are_exact(simulation)
    assert any(len(sharing) > 1 for sharing in rounds(simulation))


def test_one_that_ends_or_is_cancelled_leaves_the_others_alone():
    simulation = ready("adaptive")
    submit(simulation, 6, 40, 40)
    simulation.run_events(30)
    simulation.cancel(TWO)
    simulation.run()

    assert simulation.clients[TWO].reason == "cancelled"
    for id in (ONE, THREE):
        assert simulation.clients[id].tokens == simulation.clients[id].reference


def test_a_lost_verdict_delays_its_own_request_only():
    simulation = ready("ar")
    submit(simulation, 10, 10)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 3)
    simulation.holds = lambda message: isinstance(message, Verdict) and message.request == TWO
    began = simulation.now
    simulation.run_while(lambda: ONE in simulation.live)
    assert simulation.now < began + 1.0

    simulation.holds = lambda message: False
    simulation.run()
    assert tokens_are_exact(simulation)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_new_request_has_its_prompt_read_and_its_first_token_in_the_next_round(strategy):
    simulation = ready(strategy)
    simulation.submit(1, max_tokens=50)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 4)
    simulation.hosts[simulation.own["target"]].rewire(Wire(delay=0.15))
    before = len(rounds(simulation))
    simulation.submit(2, max_tokens=5)
    simulation.run_while(lambda: not simulation.clients[TWO].tokens)

    assert rounds(simulation)[before] == [2], "its prefill, and one short round"
    simulation.run()
    assert [1, 2] in [sorted(sharing) for sharing in rounds(simulation)]


def test_a_long_prompt_lets_the_others_have_a_round_a_second():
    simulation = ready("ar")
    simulation.submit(1, max_tokens=50)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 4)
    # This prompt is never read to its end.
    simulation.holds = lambda message: isinstance(message, Start) and message.request == TWO
    simulation.submit(2, max_tokens=5)
    before = len(simulation.clients[ONE].tokens)
    simulation.run_until(simulation.now + 4.5)

    assert 3 <= len(simulation.clients[ONE].tokens) - before <= 5


def test_a_stream_of_new_requests_does_not_starve_the_others():
    simulation = ready("ar")
    simulation.submit(1, max_tokens=12)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 4)
    newest = 1
    while ONE in simulation.live and newest < 100:
        newest += 1
        simulation.submit(newest, max_tokens=1)
        simulation.run_until(simulation.now + 0.02)

    assert simulation.clients[ONE].tokens == simulation.clients[ONE].reference
    assert newest < 50


def test_requests_beyond_the_places_wait_and_take_turns():
    simulation = ready("adaptive", concurrent=2, turn=8)
    submit(simulation, 30, 30, 30, 30)
    simulation.run()

    assert all(len(sharing) <= 2 for sharing in rounds(simulation))
    assert tokens_are_exact(simulation)
    served: list[int] = [command.request for command in simulation.commands if isinstance(command, Emit)]
    assert served.index(4) < len(served) - served[::-1].index(1), "the last one begins before the first one has ended"
    stopped = [message.request for message in simulation.sent(Stop)]
    assert stopped.count(ONE) > 2, "who made room is not served meanwhile"


def test_places_go_round():
    scheduler = Scheduler(Autoregressive(Options()), 2, turn=10)

    assert [scheduler.add(RequestId(id)) for id in (1, 2, 3, 4)] == [True, True, False, False]
    assert scheduler.preempt(RequestId(1), 9) is None
    assert scheduler.preempt(RequestId(1), 1) == 3
    assert scheduler.preempt(RequestId(2), 12) == 4
    assert scheduler.remove(RequestId(2)) is None, "it waited"
    assert scheduler.remove(RequestId(3)) == 1
    assert scheduler.preempt(RequestId(4), 100) is None, "no request waits"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_nobody_waits_for_shares_a_quarter_of_the_rounds(strategy):
    simulation = ready(strategy)
    simulation.submit(1, 60, prompt=(7,), background=True)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 3)
    before = len(rounds(simulation))
    simulation.submit(2, 40, prompt=(7,))
    simulation.run_while(lambda: TWO in simulation.live)
    shares = [1 in sharing for sharing in rounds(simulation)[before:]]

    assert sum(shares) in range(1, 3 + len(shares) // 4)
    simulation.run()
    assert tokens_are_exact(simulation)


def test_a_request_that_nobody_waits_for_makes_room_early_and_comes_last():
    scheduler = Scheduler(Autoregressive(Options()), 1, turn=100)

    assert [scheduler.add(RequestId(id), id != 3) for id in (1, 2, 3)] == [True, False, False]
    assert scheduler.preempt(RequestId(1), 11) is None
    assert scheduler.preempt(RequestId(1), 1) == 3
    assert scheduler.preempt(RequestId(3), 99) is None
    assert scheduler.preempt(RequestId(3), 1) == 2
    assert scheduler.remove(RequestId(3)) is None, "it waited"
    assert scheduler.preempt(RequestId(2), 99) is None, "only its like wait"


def test_clients_of_waiting_requests_hear_of_their_place_in_the_queue():
    simulation = ready("ar", concurrent=1)
    submit(simulation, 4, 4, 4)
    simulation.run()

    told = [(one.request, one.queued) for one in simulation.commands if isinstance(one, TellReading)]
    assert told == [(2, 1), (2, 1), (3, 2), (3, 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_token_is_the_draft_s_or_prompt_lookup_s_or_the_target_s_own(strategy):
    simulation = ready(strategy)
    submit(simulation, 30, 31)
    simulation.submit(3, 32, prompt=(7, 8, 9) * 9)
    simulation.run()

    for client in simulation.clients.values():
        figures = client.statistics
        assert figures is not None
        own = figures.generated_tokens - figures.draft_tokens - figures.lookup_tokens
        assert own in (figures.rounds - 1, figures.rounds)
        assert (figures.draft_tokens > 0) == (strategy != "ar")


def test_the_most_probable_nodes_of_all_trees_are_verified_together():
    paths = [[0.9, 0.8, 0.1], [0.3, 0.2], []]

    counts, share = best_counts(paths, lambda width: 1.0 + 0.2 * width, 0.1)

    assert counts == [2, 0, 0]
    assert share.rate == pytest.approx((3 + 0.9 + 0.8) / (1.0 + 0.2 * 5 + 0.1))
    alone = best_count(paths[0], lambda width: 1.0 + 0.2 * width, 0.1)
    assert best_counts(paths[:1], lambda width: 1.0 + 0.2 * width, 0.1) == ([alone.nodes], alone)
