"""Laws of what a client is told of its prompt: log-probabilities once and in order, and how far it was read."""

from typing import Any

import pytest

from orchestrator.core.commands import Command, Emit, SendMessage, TellReading
from orchestrator.core.events import Arrived, Submitted, Task, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import RequestId
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import Prefilled, Prefilling, PromptLogprobs, Start, Verify

ONE = RequestId(1)
PROMPT = (1, 2, 3, 4, 5)
LIKELIHOODS = tuple(TokenLogprob(-float(place)) for place in range(len(PROMPT) - 1))
READY = Prefilled(ONE, 0, len(PROMPT) - 1, 0.1)


class Told:
    """One request, and what its client was told of the prompt."""

    def __init__(self, wanted: bool = True) -> None:
        self.machine = Machine(Options())
        self.told: list[TokenLogprob] = []
        self.sent: dict[str, list[Any]] = {"target": [], "draft": []}
        self.step(WorkerUp(1, modelled_hello("target")))
        self.step(WorkerUp(2, modelled_hello("draft")))
        self.step(Submitted(ONE, Task(PROMPT, Sampling(prompt_logprobs=wanted), 9)))

    def step(self, event: Any) -> list[Command]:
        commands = self.machine.step(event, 0.0).all()
        for command in commands:
            if isinstance(command, Emit):
                self.told += command.prompt_token_logprobs
            if isinstance(command, SendMessage) and isinstance(command.message, Start | Verify):
                self.sent[command.role].append(command.message)
        return commands

    def tells(self, first: int, end: int, target: int = 1) -> None:
        self.step(Arrived("target", target, PromptLogprobs(ONE, 0, first, LIKELIHOODS[first:end])))


def test_the_client_gets_what_the_target_tells_before_the_first_token():
    request = Told()
    request.tells(0, 3)
    request.tells(3, 4)
    request.step(Arrived("target", 1, READY))

    assert tuple(request.told) == LIKELIHOODS
    assert [type(message) for message in request.sent["target"]] == [Start, Verify]


def test_a_new_target_tells_all_again_and_the_client_gets_only_the_rest():
    request = Told()
    request.tells(0, 2)
    request.step(WorkerDown("target", 1))
    request.step(WorkerUp(3, modelled_hello("target")))
    request.tells(0, 3, target=3)
    request.tells(3, 4, target=3)

    assert tuple(request.told) == LIKELIHOODS
    assert request.machine.stale == 0


def test_only_the_target_is_asked_and_not_after_it_has_told_all():
    request = Told()
    request.tells(0, 4)
    request.step(Arrived("target", 1, READY))
    request.step(WorkerDown("target", 1))
    request.step(WorkerUp(3, modelled_hello("target")))

    asked = {
        role: [message.sampling.prompt_logprobs for message in messages if isinstance(message, Start)]
        for role, messages in request.sent.items()
    }
    assert asked["target"] == [True, False]
    assert not any(asked["draft"])


@pytest.mark.parametrize("first", [1, 4])
def test_a_message_that_leaves_tokens_out_is_dropped_and_counted(first: int):
    request = Told()
    request.tells(first, 5)

    assert (request.told, request.machine.stale) == ([], 1)


def test_no_more_is_told_than_the_prompt_has_and_a_target_that_is_ready_too_early_is_not_believed():
    request = Told()
    request.tells(0, 3)
    request.step(Arrived("target", 1, READY))
    assert request.machine.stale == 1
    assert [type(message) for message in request.sent["target"]] == [Start]
    request.step(Arrived("target", 1, PromptLogprobs(ONE, 0, 0, LIKELIHOODS * 2)))

    assert tuple(request.told) == LIKELIHOODS


def test_what_nobody_asked_for_is_dropped():
    request = Told(wanted=False)
    request.tells(0, 4)
    request.step(Arrived("target", 1, READY))
    request.tells(0, 4)

    assert (request.told, request.machine.stale) == ([], 2)


# How far the prompt was read ---------------------------------------------------------------------


LONG = tuple(range(1, 102))


def reading() -> Machine:
    machine = Machine(Options())
    machine.step(WorkerUp(1, modelled_hello("target")), 0.0)
    machine.step(Submitted(ONE, Task(LONG, Sampling(), 9)), 0.0)
    return machine


def progress(machine: Machine, message: Prefilling, now: float) -> list[Command]:
    return machine.step(Arrived("target", 1, message), now).all()


def test_a_client_learns_how_far_its_prompt_was_read_four_times_a_second():
    machine = reading()

    found = [progress(machine, Prefilling(ONE, 0, tokens), tokens / 100) for tokens in range(10, 100, 10)]

    assert found == [[TellReading(ONE, tokens, 100)] if tokens in (10, 40, 70) else [] for tokens in range(10, 100, 10)]
    assert machine.stale == 0


def test_a_report_that_does_not_fit_is_dropped():
    machine = reading()

    for message in (Prefilling(RequestId(2), 0, 5), Prefilling(ONE, 1, 5), Prefilling(ONE, 0, 101)):
        assert progress(machine, message, 1.0) == []
    machine.step(Arrived("target", 1, Prefilled(ONE, 0, 100, 0.1)), 1.0)
    assert progress(machine, Prefilling(ONE, 0, 50), 2.0) == []
    assert machine.stale == 4
