"""A target and a draft without models: they follow the protocol's rules on an invented language."""

from dataclasses import dataclass, field

from protocol.messages.base import NodeId, Role, SequenceId
from protocol.messages.plans import Chain, FanOut, GrowthPlan
from protocol.messages.worker import (
    Fault,
    Forest,
    FromWorker,
    Grow,
    Hello,
    Prefilled,
    Reroot,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.speculation.token_tree import node_id

VOCABULARY = 50
CONTEXT = 400


def hello(role: Role, tokenizer: str = "same") -> Hello:
    return Hello(
        role=role,
        engine="simulated",
        model=f"simulated-{role}",
        architecture="none",
        vocabulary=VOCABULARY,
        context=CONTEXT,
        tokenizer=tokenizer,
        device="none",
        pid=1,
    )


def next_token(tokens: list[int], seed: int) -> int:
    """What the invented target says after `tokens`: depends on the last three, the position and the seed."""
    mixed = node_id(NodeId(seed), len(tokens) % 7)
    for token in tokens[-3:]:
        mixed = node_id(mixed, token)
    return mixed % VOCABULARY


def reference(prompt: tuple[int, ...], count: int, seed: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """Target-only decoding."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + count, CONTEXT):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


@dataclass
class SimulatedTarget:
    """Answers Start and Verify as a target worker does; repeats the last verdict when asked again."""

    sequences: dict[SequenceId, tuple[list[int], int]] = field(default_factory=dict)
    seeds: dict[SequenceId, int] = field(default_factory=dict)
    answered: dict[SequenceId, Verdict] = field(default_factory=dict)

    def handle(self, message: ToWorker) -> list[FromWorker]:
        match message:
            case Start():
                self.sequences[message.sequence] = (list(message.tokens), message.round)
                self.seeds[message.sequence] = message.sampling.seed
                self.answered.pop(message.sequence, None)
                return [Prefilled(message.sequence, message.round, len(message.tokens) - 1, 0.001)]
            case Verify():
                return self._verify(message)
            case Forest(trees):
                return [reply for verify in trees for reply in self._verify(verify)]
            case Stop():
                self.sequences.pop(message.sequence, None)
        return []

    def _verify(self, message: Verify) -> list[FromWorker]:
        if message.sequence not in self.sequences:
            return [Fault("lost", "unknown", message.sequence)]
        tokens, round = self.sequences[message.sequence]
        if message.round == round - 1 and message.sequence in self.answered:
            return [self.answered[message.sequence]]
        if message.round < round:
            return []
        if message.round > round or message.position != len(tokens) - 1:
            return [Fault("lost", "out of step", message.sequence)]
        verdict = self._walk(message, tokens)
        self.answered[message.sequence] = verdict
        return [verdict]

    def _walk(self, message: Verify, tokens: list[int]) -> Verdict:
        seed = self.seeds[message.sequence]
        at, id, path = 0, message.root, []
        while True:
            choice = next_token(tokens, seed)
            tokens.append(choice)
            children = [
                index
                for index, parent in enumerate(message.parents)
                if parent == at and message.tokens[index] == choice
            ]
            if not children:
                break
            at, id = children[0], node_id(id, choice)
            path.append(id)
        self.sequences[message.sequence] = (tokens, message.round + 1)
        return Verdict(message.sequence, message.round, tuple(path), choice, 0.01 + 0.001 * len(message.tokens))


@dataclass
class SimulatedDraft:
    """Its main child is right whenever the position is not a multiple of `errs_every`; the second one is right then."""

    errs_every: int = 3
    states: dict[SequenceId, tuple[Start, int, list[int], NodeId, GrowthPlan]] = field(default_factory=dict)

    def handle(self, message: ToWorker) -> list[FromWorker]:
        match message:
            case Start():
                assert message.plan is not None
                self.states[message.sequence] = (
                    message,
                    message.round,
                    list(message.tokens),
                    message.root,
                    message.plan,
                )
                return [self._grow(message.sequence)]
            case Reroot():
                return self._reroot(message)
            case Stop():
                self.states.pop(message.sequence, None)
        return []

    def _reroot(self, message: Reroot) -> list[FromWorker]:
        if message.sequence not in self.states:
            return [Fault("lost", "unknown", message.sequence)]
        start, round, tokens, _, plan = self.states[message.sequence]
        if message.round <= round:
            return []
        if message.position != len(tokens) - 1:
            return [Fault("lost", "skipped", message.sequence)]
        tokens += message.tokens
        self.states[message.sequence] = (start, message.round, tokens, message.root, message.plan or plan)
        return [self._grow(message.sequence)]

    def _grow(self, sequence: SequenceId) -> Grow:
        start, round, tokens, root, plan = self.states[sequence]
        depth = plan.depth if isinstance(plan, Chain | FanOut) else 6
        parents, children, probabilities = [], [], []
        id, path = root, list(tokens)
        for _ in range(depth):
            right = next_token(path, start.sampling.seed)
            other = (right + 1) % VOCABULARY
            main, second = (right, other) if len(path) % self.errs_every else (other, right)
            parents += [id, id]
            children += [main, second]
            probabilities += [0.7, 0.2]
            path.append(main if isinstance(plan, Chain | FanOut) else right)
            id = node_id(id, path[-1])
        return Grow(sequence, round, tuple(parents), tuple(children), tuple(probabilities), depth, 0.004)
