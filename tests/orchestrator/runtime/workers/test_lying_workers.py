"""Workers that lie within the bounds of every message, with replays and at odd times: no lie brings the state machine
down, keeps a request from ending, or moves a root; and of a draft none changes a token."""

import random
from collections import deque
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from orchestrator.core.commands import Emit, Finish, Reject, Replace, SendMessage
from orchestrator.core.events import Arrived, Event, Submitted, Task, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import VOCABULARY
from orchestrator.lab.simulate.workers import ModelledTarget, modelled_hello
from protocol.messages.base import MAX_CONTEXT, NodeId, RequestId, Role
from protocol.messages.kv import KvOffer
from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import (
    Extend,
    Fault,
    Forest,
    FromWorker,
    Grow,
    Lowered,
    Pong,
    Prefilled,
    Prefilling,
    PromptLogprobs,
    Reroot,
    Start,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.speculation.token_tree import node_id
from tests.support.scripted_simulation import LANGUAGE, TARGET

PROMPT = (1, 2, 3)
SOME_LIES = (20, 100, 400)


class Deceived:
    """A target and two drafts, of which one role lies, and one to three requests."""

    def __init__(self, seed: int, liar: Role) -> None:
        self.random = random.Random(seed)
        self.liar: Role = liar
        pick = self.random.choice
        options = Options(
            strategy=pick(["adaptive", "adaptive", "ssd", "sd"]),
            concurrent=pick([1, 2, 8]),
            placement=pick(["auto", "shared", "apart"]),
        )
        self.machine = Machine(options)
        self.now, self.targets = 0.0, 0
        self.asked: deque[ToWorker] = deque()
        self.rounds, self.nodes, self.said = [0], [NodeId(0)], list[FromWorker]()
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, Finish | Reject] = {}
        self.target_up()
        for incarnation in (1, 2):
            costs = tuple((width, pick([1e-6, 0.01, 1e4])) for width in (1, 8) if liar == "draft")
            hello = replace(modelled_hello("draft"), costs=costs, context=pick([5, 512, MAX_CONTEXT]))
            self.step(WorkerUp(incarnation, hello, remote=True))
        for number in range(pick([1, 1, 2, 3])):
            sampling = Sampling(verification=pick(["coupled", "rejection"]))
            self.tokens[RequestId(number)] = []
            self.step(Submitted(RequestId(number), Task(PROMPT, sampling, pick([1, 5, 30]))))

    def target_up(self) -> None:
        self.target, self.targets = ModelledTarget(LANGUAGE, TARGET), self.targets + 1
        self.asked.clear()
        self.step(WorkerUp(10 + self.targets, modelled_hello("target"), remote=True))

    def step(self, event: Event) -> None:
        self.now += self.random.choice([0.0, 1e-6, 1e-3, 0.05])
        for command in self.machine.step(event, self.now).all():
            match command:
                case SendMessage(message=message):
                    self.note(command, message)
                case Emit(request=sequence, tokens=tokens):
                    self.tokens[sequence] += tokens
                case Finish() | Reject():
                    self.ends[command.request] = command
                case Replace():
                    self.target_up()
        for sequence in self.machine.requests.values():
            assert len(sequence.tree) <= 1 << 13
            assert sequence.tree.root.token == sequence.tokens[-1]

    def note(self, command: SendMessage, message: ToWorker) -> None:
        if command.role == "target":
            self.asked.append(message)
        for tree in message.trees if isinstance(message, Forest) else (message,):
            if isinstance(tree, Verify):
                nodes = [tree.root]
                for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
                    nodes.append(node_id(nodes[parent], token))
                self.nodes = [*self.nodes, *nodes][-12:]
            if isinstance(tree, Start | Reroot | Verify):
                self.rounds = [max(0, tree.round - 1), tree.round, tree.round + 1]

    def lie(self) -> FromWorker:
        pick = self.random.choice
        sequence, round = RequestId(pick([0, 0, 1, 2, 9])), pick([*self.rounds, 0, (1 << 53) - 1])
        seconds, count, token = pick([0.0, 0.01, 1e6]), pick([0, 1, 3, MAX_CONTEXT]), pick([1, 4, VOCABULARY - 1])
        node = pick([*self.nodes, NodeId(self.random.getrandbits(63))])
        if self.liar == "draft":
            length, parents, last = pick([0, 1, 8, 40]), list[NodeId](), node
            for _ in range(length):
                parents.append(last)
                last = pick([last, node_id(last, token)])
            distributions = tuple(Distribution(parent, (1, 2), (0.5, 0.5)) for parent in parents[: pick([0, 2])])
            grow = Grow(
                sequence, round, tuple(parents), (token,) * length, (pick([0.0, 0.5, 1.0]),) * length, count, seconds
            )
            lies: list[FromWorker] = [grow, replace(grow, distributions=distributions, staleness=count)] * 3
            lies += [Prefilled(sequence, round, count, seconds, count)]
        else:
            path = pick([(), (node,), (node, node_id(node, token))])
            token_logprobs = (TokenLogprob(pick([0.0, -9999.0])),) * pick([0, 1, 3])
            lies = [Verdict(sequence, round, path, token, seconds)] * 3
            lies += [
                Verdict(sequence, round, path, token, seconds, None, token_logprobs),
                Prefilled(sequence, round, count, seconds, count),
                Prefilling(sequence, round, count),
                PromptLogprobs(sequence, round, count, token_logprobs),
                Lowered(pick(["tree", "chain", "plain"]), "no reason"),
            ]
        lies += [
            Fault(pick(["lost", "refused"]), "no reason", sequence, pick([None, 0, 5])),
            KvOffer(sequence, "lp-0123456789abcdef0123", max(1, count), 1 << 44, seconds),
            Pong(1e12, (1 << 63) - 1),
        ]
        return pick(lies)

    def deceive(self, lies: int) -> None:
        for _ in range(lies):
            chance = self.random.random()
            if chance < 0.1:
                self.wait()
                # An honest target is not silent for minutes.
                while self.liar == "draft" and self.answer():
                    pass
            elif chance < 0.35:
                self.answer()
            else:
                message = self.random.choice(self.said) if self.said and chance < 0.5 else self.lie()
                self.said = [*self.said, message][-50:]
                incarnation = 10 + self.targets if self.liar == "target" else self.random.choice([1, 2])
                self.step(Arrived(self.liar, incarnation, message))

    def wait(self) -> None:
        self.now = max(self.now, self.machine.deadline() or self.now + 1) + self.random.choice([0.0, 3600.0])
        self.step(Tick())

    def answer(self) -> bool:
        """The honest target answers one message."""
        if not self.asked:
            return False
        message = self.asked.popleft()
        if not isinstance(message, Extend):
            # Unlike the modelled target's own, which takes a refused tree for a fault of the orchestrator.
            replies = list(super(ModelledTarget, self.target).handle(message).replies)
            while (work := self.target.work()) is not None:
                replies += work.replies
            for reply in replies:
                self.step(Arrived("target", 10 + self.targets, reply))
        return True

    def all_end(self) -> bool:
        for _ in range(2000):
            if not self.machine.requests:
                return True
            if not self.answer():
                self.wait()
        return False


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.slow)])
def test_no_lie_of_a_draft_changes_a_token_or_keeps_a_request_from_ending(seeds: range):
    for seed in seeds:
        deceived = Deceived(seed, "draft")
        deceived.deceive(deceived.random.choice(SOME_LIES))

        assert deceived.all_end(), seed
        for sequence, tokens in deceived.tokens.items():
            assert isinstance(deceived.ends[sequence], Finish), seed
            assert tokens == [LANGUAGE.token(0, len(PROMPT) + place) for place in range(len(tokens))], seed


@pytest.mark.parametrize("seeds", [[*range(100), 508, 653], pytest.param(range(100, 3000), marks=pytest.mark.slow)])
def test_after_a_lying_target_an_honest_one_ends_all_requests(seeds: Iterable[int]):
    for seed in seeds:
        deceived = Deceived(seed, "target")
        deceived.deceive(deceived.random.choice(SOME_LIES))
        deceived.step(WorkerDown("target", 10 + deceived.targets))
        deceived.target_up()

        assert deceived.all_end(), seed


def test_a_target_verifies_less_and_less_and_never_more():
    machine = Machine(Options())
    machine.step(WorkerUp(1, modelled_hello("target")), 0.0)
    for level in ("chain", "chain", "tree", "plain", "plain", "chain"):
        machine.step(Arrived("target", 1, Lowered(level, "no reason")), 0.1)

    assert machine.stale == 4
