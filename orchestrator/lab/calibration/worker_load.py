"""Synthetic load for workers that are measured: random tokens. Pure."""

from itertools import count

import numpy as np

from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Hello, Start, Stop, Verdict, Verify
from protocol.speculation.token_tree import node_id

PROMPT_TOKENS = 64
"""Prompt length of the sequences whose steps are measured."""
_MAX_GROWN = 256
"""Tree nodes after which a new sequence starts: a draft stops growing a large tree."""
_FAN = 8
"""Gives wide steps early, with room for one of them below that number of nodes."""


class RandomSequences:
    """Sequences of random tokens for one worker."""

    def __init__(self, hello: Hello, seed: int = 0) -> None:
        self.context = hello.context
        self._vocabulary = hello.vocabulary
        self._random = np.random.default_rng(seed)
        self._ids = map(SequenceId, count(1))

    def start(self, tokens: int, plan: BestFirst | None = None) -> Start:
        """A new sequence of `tokens` tokens, the root included."""
        return Start(
            sequence=next(self._ids),
            round=0,
            tokens=self.tokens(tokens),
            root=NodeId(int(self._random.integers(1 << 62))),
            sampling=Sampling(),
            plan=plan,
        )

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(self._vocabulary, size=count).tolist())


class VerifyLoad:
    """One sequence at a target that verifies chains of random tokens."""

    def __init__(self, sequences: RandomSequences, tokens: int = PROMPT_TOKENS) -> None:
        """`tokens`: of the prompt."""
        self._questions = sequences
        self.start = sequences.start(tokens)
        self._root, self._last = self.start.root, self.start.tokens[-1]
        self._round, self._position = 0, tokens - 1
        self._asked: Verify | None = None

    def has_room(self, width: int) -> bool:
        return self._position + width < self._questions.context

    def ask(self, width: int) -> Verify:
        """A chain of `width` tokens, root included."""
        tokens = (self._last, *self._questions.tokens(width - 1))
        parents = tuple(range(-1, width - 1))
        self._asked = Verify(self.start.sequence, self._round, self._root, self._position, tokens, parents)
        return self._asked

    def heard(self, verdict: Verdict) -> None:
        assert self._asked is not None
        accepted = self._asked.tokens[1 : 1 + len(verdict.path)]
        self._root = node_id((self._root, *verdict.path)[-1], verdict.bonus)
        self._last = verdict.bonus
        self._round += 1
        self._position += len(accepted) + 1


class GrowthLoad:
    """Sequences at a draft that grows `width` nodes a step, each until its tree is full."""

    def __init__(self, sequences: RandomSequences, width: int) -> None:
        self._questions = sequences
        self._plan = BestFirst(width=width, fan=_FAN)
        self._sequence: SequenceId | None = None
        self._grown = 0

    def begin(self) -> list[Stop | Start]:
        """End the current sequence and start another."""
        old = self.end()
        start = self._questions.start(PROMPT_TOKENS, self._plan)
        self._sequence, self._grown = start.sequence, 0
        return [*old, start]

    def end(self) -> list[Stop]:
        """End the current sequence."""
        return [] if self._sequence is None else [Stop(self._sequence)]

    def heard(self, sequence: SequenceId, nodes: int) -> bool:
        """Count new nodes of the current sequence; returns whether a new sequence must start."""
        if sequence == self._sequence:
            self._grown += nodes
        return self._grown >= _MAX_GROWN
