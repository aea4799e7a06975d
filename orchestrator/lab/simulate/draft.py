"""A draft worker without a model: the real growth rules, a modelled language, times from a device's pace. Pure."""

from collections import deque
from collections.abc import Iterator, Sequence

from orchestrator.lab.simulate.language import Language
from orchestrator.lab.simulate.modelled_worker import CHUNK, CONTEXT, Work, modelled_hello
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Extend, Fault, Grow, Hello, Ping, Pong, Reroot, Start, Stop, ToWorker
from protocol.speculation.calibration import Calibration
from protocol.speculation.candidates import Candidates
from protocol.speculation.growth import TreeGrowth
from protocol.speculation.publication import StepCost, growth_messages
from protocol.speculation.rolling_context import RollingContext
from protocol.speculation.token_tree import Node, TokenTree, node_id
from protocol.worker.pacing import DevicePace

_CATCH_UP = 16
"""Up to this number, committed tokens without KV are evaluated in a growth step; more of them are prefilled."""


_ROWS_SECONDS = 0.0001
"""Of a step that takes candidates from the rows of an earlier forward."""


class ModelledDraft:
    """Serves its sequences in turns, one growth step or prefill chunk at a time."""

    def __init__(self, language: Language, pace: DevicePace, context: int = CONTEXT, block: int = 1) -> None:
        """`block`: tokens that one forward guesses behind one another, as a block drafter's does."""
        self._block = block
        self.hello: Hello = modelled_hello("draft", context, pace)
        self._language = language
        self._pace = pace
        self._calibrations = {"greedy": Calibration(), "sampled": Calibration()}
        self._sequences: dict[SequenceId, _DraftedSequence] = {}
        self._turns: deque[SequenceId] = deque()

    def handle(self, message: ToWorker) -> Work:
        match message:
            case Start():
                self._start(message)
            case Reroot():
                return self._reroot(message)
            case Extend(sequence) if sequence in self._sequences:
                self._sequences[sequence].extend(message)
            case Stop(sequence):
                self._forget(sequence)
            case Ping(sent):
                return Work((Pong(sent),))
        return Work()

    def work(self) -> Work | None:
        for _ in range(len(self._turns)):
            sequence = self._sequences[self._turns[0]]
            self._turns.rotate(-1)
            work = sequence.work(self._pace)
            if work is not None:
                return work
        return None

    def _start(self, message: Start) -> None:
        sequence = self._sequences.get(message.sequence)
        if sequence is None or sequence.sampling != message.sampling:
            self._forget(message.sequence)
            self._sequences[message.sequence] = self._open(message)
            self._turns.append(message.sequence)
        elif (sequence.round, sequence.root.depth) != (message.round, len(message.tokens) - 1):
            sequence.restart(message)

    def _open(self, start: Start) -> "_DraftedSequence":
        kind = "greedy" if start.sampling.temperature == 0 else "sampled"
        rolling = RollingContext(self.hello.context)
        return _DraftedSequence(start, self._language, rolling, self._calibrations[kind], self._block)

    def _reroot(self, message: Reroot) -> Work:
        sequence = self._sequences.get(message.sequence)
        if sequence is None:
            return Work((Fault("lost", "This sequence is unknown here.", message.sequence),))
        if message.round <= sequence.round:
            return Work()
        if not sequence.follows(message):
            return Work((Fault("lost", "The draft is out of step.", message.sequence),))
        return Work(tuple(sequence.reroot(message)))

    def _forget(self, sequence: SequenceId) -> None:
        if self._sequences.pop(sequence, None) is not None:
            self._turns.remove(sequence)


class _DraftedSequence:
    """One sequence: of the committed tokens that the draft sees, the number with KV, and the token tree."""

    def __init__(
        self, start: Start, language: Language, rolling: RollingContext, calibration: Calibration, block: int
    ) -> None:
        self._block = block
        self._calibration = calibration
        self.sampling = start.sampling
        self._id = start.sequence
        self._language = language
        self._rolling = rolling
        self._held = self._skipped = 0
        self._rows: dict[NodeId, int] = {}
        """By node: the rows of guesses that a forward over an ancestor has left for it."""
        self.restart(start)

    def restart(self, start: Start) -> None:
        self._plan = start.plan or BestFirst(8, 4)
        self._begin(start.root, start.tokens[-1], len(start.tokens) - 1)
        self.round = start.round
        self._asked: Extend | None = None
        """The last request for growth, which may precede the Reroot to its root."""

    def _begin(self, root: NodeId, token: int, length: int) -> None:
        """Grow a new tree behind `length` tokens. KV stays of the tokens that the draft sees where it saw them."""
        # Committed tokens never change. Once another part of them is left out, only the sinks are where they were.
        skipped = self._rolling.skipped(length)
        seen = length - skipped
        self._held = min(self._held, seen if skipped == self._skipped else self._rolling.sinks)
        self._backlog = seen - self._held
        self._skipped = skipped
        tree, horizon = TokenTree(root, token, length), self._rolling.horizon(length)
        self._growth = TreeGrowth(tree, self._plan, horizon, self._calibration)

    @property
    def root(self) -> Node:
        return self._growth.tree.root

    def follows(self, message: Reroot) -> bool:
        root = self.root.id
        for token in message.tokens:
            root = node_id(root, token)
        return message.position == self.root.depth and message.root == root

    def reroot(self, message: Reroot) -> Iterator[Grow]:
        evaluated = set(self._growth.candidates)
        self._plan = message.plan or self._plan
        committed = self._growth.advance(message.tokens, self._plan)
        known = 0 if self._backlog else sum(node.id in evaluated for node in committed)
        self._held += known
        self._backlog += len(committed) - known
        if message.anew or self._rolling.skipped(self.root.depth) != self._skipped:
            self._begin(self.root.id, self.root.token, self.root.depth)
        if self._asked is not None and self._asked.round == message.round:
            self._growth.extend(self._asked.steps)
        self.round = message.round
        survivors = list(self._growth.surviving()) if message.missed else []
        fresh = survivors + self._growth.publish()
        if fresh:
            yield from self._messages(fresh, StepCost())

    def extend(self, message: Extend) -> None:
        self._asked = message
        if message.round == self.round:
            self._growth.extend(message.steps)

    def work(self, pace: DevicePace) -> Work | None:
        """A prefill chunk or a growth step; None if there is no work."""
        step = self._growth.next_step()
        if step is None:
            return None
        if self._backlog > _CATCH_UP:
            tokens = min(CHUNK, self._backlog)
            seconds = pace.prefill(tokens, self._held)
            self._held += tokens
            self._backlog -= tokens
            return Work((), seconds)
        evaluated = self._backlog + sum(not self._rows.get(node.id) for node in step.nodes)
        seconds = pace.forward(evaluated, self._held) if evaluated else _ROWS_SECONDS
        self._held += self._backlog
        self._backlog = 0
        fresh = self._growth.expand(step, [self._candidates(node, step.limit) for node in step.nodes])
        for node in fresh:
            assert node.parent is not None
            self._rows[node.id] = (self._rows.get(node.parent.id) or self._block) - 1
        return Work(tuple(self._messages(fresh, StepCost(evaluated, seconds))), seconds)

    def _candidates(self, node: Node, limit: int) -> Candidates:
        return self._language.candidates(self.sampling.seed, node.id, node.depth + 1, self._on_target_path(node), limit)

    def _on_target_path(self, node: Node) -> bool:
        """Whether the path to the node consists of the target's tokens; for the root it always does."""
        while node.parent is not None:
            if node.token != self._language.token(self.sampling.seed, node.depth):
                return False
            node = node.parent
        return True

    def _messages(self, nodes: Sequence[Node], cost: StepCost) -> Iterator[Grow]:
        return growth_messages(self._id, self.round, nodes, self._growth.candidates, cost)
