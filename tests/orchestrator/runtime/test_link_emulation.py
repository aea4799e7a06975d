"""Laws of the emulated link: no message is early, overtakes another, or is lost for good."""

import random

import pytest

from orchestrator.runtime.link_emulation import TIMEOUT, EmulatedLink, EmulatedWire


def wire(delay=0.01, loss=0.0, chances=None, seed=0):
    source = random.Random(seed).random if chances is None else iter(chances).__next__
    return EmulatedWire(EmulatedLink(delay=delay, loss=loss), source)


def arrivals(wire, departures):
    """When each of the messages, named by their number, arrives."""
    for number, at in enumerate(departures):
        wire.send(number, at)
    result = []
    while (due := wire.due()) is not None:
        result += [(number, due) for number in wire.arrived(due)]
    return result


def test_a_message_arrives_after_the_delay_and_not_before():
    line = wire(delay=0.01)
    line.send("news", 5.0)

    assert line.arrived(5.0099) == []
    assert line.due() == pytest.approx(5.01)
    assert line.arrived(5.01) == ["news"]
    assert line.due() is None


def test_order_is_kept_and_all_arrive_under_loss():
    departures = [0.003 * index for index in range(2000)]
    arrived = arrivals(wire(loss=0.2, seed=3), departures)

    assert [number for number, _ in arrived] == list(range(2000))
    assert all(due >= departures[number] + 0.01 for number, due in arrived)
    assert [due for _, due in arrived] == sorted(due for _, due in arrived)


TIMER = 0.02 + TIMEOUT


@pytest.mark.parametrize(
    ("chances", "departures", "due"),
    [
        ([0.4, 0.6], [1.0], 1.0 + TIMER + 0.01),
        ([0.4, 0.4, 0.6], [1.0], 1.0 + 3 * TIMER + 0.01),
        ([0.4, 0.6, 0.6], [1.0, 1.001], 1.23),
        ([0.4, 0.6, 0.6, 0.6, 0.6], [1.0, 1.001, 1.002, 1.003], 1.003 + 3 * 0.01),
    ],
    ids=["timer", "doubled", "those behind it wait", "fast retransmit"],
)
def test_a_lost_message_comes_with_the_timer_or_behind_three_others(chances, departures, due):
    arrived = arrivals(wire(delay=0.01, loss=0.5, chances=chances), departures)

    assert arrived == [(number, pytest.approx(due)) for number in range(len(departures))]


def test_the_share_of_messages_that_are_late_is_the_share_of_losses():
    departures = [float(index) for index in range(4000)]
    late = [due > departures[number] + 0.02 for number, due in arrivals(wire(loss=0.05, seed=1), departures)]

    assert sum(late) / len(late) == pytest.approx(0.05, abs=0.015)
