"""Laws of a target that lies about one request: that one ends after two targets, and the others go on in the next one.
And of an honest one that is slow: it is left alone."""

import dataclasses
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from orchestrator.core.commands import Command, Pardon, Reject, Replace
from orchestrator.core.events import Event, Submitted
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import VOCABULARY
from orchestrator.lab.simulate.worker_host import BuildWorker, Work
from orchestrator.lab.simulate.workers import ModelledTarget
from protocol.messages.base import NodeId, RequestId
from protocol.messages.sampling import TokenLogprob
from protocol.messages.worker import (
    Fault,
    Forest,
    FromWorker,
    Ping,
    Prefilled,
    Prefilling,
    PromptLogprobs,
    Start,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.worker.pacing import DevicePace
from tests.support.scripted_simulation import LANGUAGE, ONE, TWO, ScriptedSimulation

PING_SECONDS = 2.0
SLOW = DevicePace(steps=((1, 0.5),), prefill_rate=1000.0)
"""So that the honest request beside the other one is still at work when that one ends."""
LOST = Fault("lost", "no reason", ONE)


class Lie(NamedTuple):
    """How a target answers the messages of the first request."""

    start: tuple[FromWorker, ...] | None = None
    """None: as an honest one."""
    verify: tuple[FromWorker, ...] | None = None
    always: tuple[FromWorker, ...] = ()
    """Behind each Pong."""
    asked: tuple[tuple[str, Any], ...] = ()
    """What the request asks for."""


def verdict(**lie: Any) -> Lie:
    return Lie(verify=(replace(Verdict(ONE, 0, (), 1, 0.01), **lie),))


LIES = {
    "nothing after a Start": Lie(()),
    "the same part of the prompt for ever": Lie((), always=(Prefilling(ONE, 0, 2),)),
    "more of the prompt than there is": Lie((), always=(Prefilling(ONE, 0, 1000),)),
    "ready in another round": Lie((Prefilled(ONE, 7, 2, 0.1),)),
    "ready without log-probabilities of the prompt": Lie(
        (Prefilled(ONE, 0, 2, 0.1),), asked=(("prompt_logprobs", True),)
    ),
    "one log-probability of the prompt": Lie(
        (), always=(PromptLogprobs(ONE, 0, 0, (TokenLogprob(-1.0),)),), asked=(("prompt_logprobs", True),)
    ),
    "no Verdict": Lie(verify=()),
    "a Verdict without log-probabilities": Lie(asked=(("logprobs", 0),)),
    "a bonus token beyond the vocabulary": verdict(bonus=VOCABULARY),
    "a path that nobody sent": verdict(path=(NodeId(5),)),
    "a Verdict of another round": verdict(round=7),
    "a tree refused that nobody sent": Lie(verify=(Fault("refused", "no reason", ONE, 3),)),
    "lost at each Verify": Lie(verify=(LOST,)),
    "lost at each Start": Lie((LOST,)),
    "lost without end": Lie((), always=(LOST,) * 50),
}
AT_ONCE = {"lost at each Verify", "lost at each Start", "lost without end"}


class LyingTarget(ModelledTarget):
    """Lies about the first request, and serves the others."""

    def __init__(self, lie: Lie) -> None:
        super().__init__(LANGUAGE, SLOW)
        self.lie = lie

    def handle(self, message: ToWorker) -> Work:
        lie = self.lie
        match message:
            case Forest(trees):
                works = [self.handle(tree) for tree in trees]
                replies = tuple(reply for work in works for reply in work.replies)
                return Work(replies, max(work.seconds for work in works))
            case Start(request=1) if lie.start is not None:
                return Work(lie.start)
            case Verify(request=1) if lie.verify is not None:
                return Work(lie.verify)
            case Ping():
                return Work((*super().handle(message).replies, *lie.always))
            case _:
                return super().handle(message)


class Pinged(ScriptedSimulation):
    """A target that is pinged, as by the real loop, and one request that asks for more than the others."""

    def __init__(self, build: BuildWorker, asked: tuple[tuple[str, Any], ...] = ()) -> None:
        super().__init__(Options(strategy="ar"), build)
        self.asked = dict(asked)
        self.start("target")
        self.ping()

    def ping(self) -> None:
        for host in self.hosts.values():
            if host.is_up:
                host.send(Ping(self.now))
        self.clock.at(self.now + PING_SECONDS, self.ping)

    def step(self, event: Event) -> list[Command]:
        if isinstance(event, Submitted) and event.request == ONE:
            sampling = replace(event.task.sampling, **self.asked)
            event = Submitted(ONE, dataclasses.replace(event.task, sampling=sampling))
        return super().step(event)

    def count(self, *kinds: type[Command]) -> int:
        return sum(isinstance(command, kinds) for command in self.commands)

    def asked_about(self, sequence: RequestId) -> int:
        """How many Starts and trees of a sequence were sent."""
        trees = self.sent(Verify) + [tree for forest in self.sent(Forest) for tree in forest.trees]
        return sum(message.request == sequence for message in self.sent(Start) + trees)


@pytest.mark.parametrize("lie", LIES)
def test_a_request_that_two_targets_lie_about_is_rejected_and_the_others_go_on(lie: str):
    simulation = Pinged(lambda role: LyingTarget(LIES[lie]), LIES[lie].asked)
    deceived, other = simulation.submit(1, max_tokens=5), simulation.submit(2, max_tokens=300)
    seconds, messages = (15.0, 12) if lie in AT_ONCE else (100.0, 24)
    simulation.run_while(lambda: deceived in simulation.live and simulation.now < seconds)

    assert "Two targets ended while they computed this request" in simulation.clients[deceived].reason
    assert simulation.count(Replace) == 2
    assert other in simulation.live
    assert simulation.asked_about(deceived) <= messages
    simulation.run()
    assert simulation.clients[other].tokens == simulation.clients[other].reference
    assert simulation.count(Replace) == 2
    assert simulation.count(Reject, Pardon) == 2


def test_requests_that_are_all_lied_about_end_together():
    class AllLost(ModelledTarget):
        def handle(self, message: ToWorker) -> Work:
            return Work() if isinstance(message, Start) else super().handle(message)

    simulation = Pinged(lambda role: AllLost(LANGUAGE, SLOW))
    for number in range(1, 9):
        simulation.submit(number, max_tokens=5)
        simulation.run_until(0.2 * number)
    simulation.run_until(150.0)

    assert simulation.count(Reject) == 8


def test_a_tree_does_not_wait_for_as_long_as_another_prompt_is_read():
    class Silent(ModelledTarget):
        def handle(self, message: ToWorker) -> Work:
            return Work() if isinstance(message, Verify) else super().handle(message)

    simulation = Pinged(lambda role: Silent(LANGUAGE, DevicePace(steps=((1, 0.5),), prefill_rate=100.0)))
    simulation.submit(1, max_tokens=5)
    simulation.submit(2, max_tokens=5, prompt=(2,) * 100_000)
    simulation.run_until(200.0)

    assert simulation.live == {TWO}


class SlowTarget(ModelledTarget):
    """With `start` it reads the whole prompt before the next message, as one that adopts much KV."""

    def __init__(self, step: float, prefill_rate: float, start: float) -> None:
        super().__init__(LANGUAGE, DevicePace(steps=((1, step),), prefill_rate=prefill_rate))
        self.start, self.started = start, set[RequestId]()

    def handle(self, message: ToWorker) -> Work:
        work = super().handle(message)
        if not self.start or not isinstance(message, Start) or message.request in self.started:
            return work
        self.started.add(message.request)
        read = self.work()
        assert read is not None
        return Work((*work.replies, *read.replies), self.start)


@pytest.mark.parametrize(
    ("target", "requests", "prompt"),
    [
        pytest.param((0.5, 20.0, 0.0), 2, 25_000, id="prompts of 20 minutes each"),
        pytest.param((40.0, 1000.0, 0.0), 2, 100, id="forwards of 40 s"),
        pytest.param((0.5, 1000.0, 10.0), 16, 9, id="starts of 10 s each"),
    ],
)
def test_an_honest_target_is_left_alone_however_slow_it_is(
    target: tuple[float, float, float], requests: int, prompt: int
):
    simulation = Pinged(lambda role: SlowTarget(*target))
    for number in range(1, 1 + requests):
        simulation.submit(number, max_tokens=9, prompt=(number,) * prompt)
    simulation.run()

    assert simulation.count(Replace, Reject) == 0
    assert all(client.tokens == client.reference for client in simulation.clients.values())
    assert simulation.asked_about(ONE) < 99
