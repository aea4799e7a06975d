"""A target divided among ranks by mlx-lm's tensor parallelism: all of them run the same forwards together.

Rank 0 is the target worker that everybody else knows. Before it runs a method of one of its sequences it tells the
other ranks to run the same one; the tokens, the tree and the path that was kept all come from it, so that nobody
else samples and no rank can come to another conclusion. Knows no messages of the pipeline.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from protocol.inference.joint_forward import ForwardPart
from protocol.inference.tree_model import TreeModel
from protocol.inference.tree_sequence import TreeSequence
from target_worker.tensor_parallel.rank_commands import (
    CloseCommand,
    EvaluateCommand,
    EvaluateTogetherCommand,
    KeepCommand,
    PrefillCommand,
    RankCommand,
    TruncateCommand,
    encoded,
)
from target_worker.tensor_parallel.rendezvous import Peer

SendCommand = Callable[[RankCommand], None]


class LeadingModel(TreeModel):
    """Rank 0's model. Its sequences are led once `lead` was called; what comes before, every rank does by itself."""

    _tell: SendCommand | None = None

    def lead(self, peers: Sequence[Peer]) -> None:
        self._tell = lambda call: tell(peers, call)
        self.numbers = itertools.count(1)

    def sequence(self) -> TreeSequence:
        if self._tell is None:
            return super().sequence()
        return LeadingSequence(self.network, self._tell, next(self.numbers))

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        if self._tell is None or len(parts) == 1 or not self.joins:
            return super().evaluate_together(parts)
        self._tell(EvaluateTogetherCommand(tuple(_evaluate(*part) for part in parts)))
        logits = super().evaluate_together(parts)
        mx.eval(logits)
        return logits


class LeadingSequence(TreeSequence):
    """Every rank evaluates its part of it. KV is not exported, adopted or copied: it lies in slices everywhere."""

    copyable = False

    def __init__(self, network: Any, tell: SendCommand, number: int) -> None:
        super().__init__(network)
        self._tell = tell
        self.number = number
        """What all ranks know it by."""
        # Whoever lets go of a sequence need not know that it is one of these.
        weakref.finalize(self, tell, CloseCommand(number)).atexit = False

    def prefill(self, tokens: Sequence[int]) -> None:
        self._tell(PrefillCommand(self.number, tuple(tokens)))
        super().prefill(tokens)

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        self._tell(_evaluate(self, tokens, parents))
        logits = super().evaluate(tokens, parents)
        # The ranks stay in step only if all of one forward's collectives run before those of the next.
        mx.eval(logits)
        return logits

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        assert not tuple(surviving), "a target keeps no rows beside the path"
        self._tell(KeepCommand(self.number, tuple(path)))
        super().keep(path, ())

    def truncate(self, length: int) -> None:
        self._tell(TruncateCommand(self.number, length))
        super().truncate(length)


def follow(model: TreeModel, calls: Iterable[RankCommand]) -> None:
    """Another rank's work: what rank 0 tells, in its order."""
    sequences: dict[int, TreeSequence] = {}
    for call in calls:
        if isinstance(call, CloseCommand):
            sequences.pop(call.sequence, None)
            continue
        if isinstance(call, EvaluateTogetherCommand):
            parts = [ForwardPart(sequences[part.sequence], part.tokens, part.parents) for part in call.parts]
            mx.eval(model.evaluate_together(parts))
            continue
        sequence = sequences.setdefault(call.sequence, model.sequence())
        match call:
            case PrefillCommand(tokens=tokens):
                sequence.prefill(tokens)
            case EvaluateCommand(tokens=tokens, parents=parents):
                mx.eval(sequence.evaluate(tokens, parents))
            case KeepCommand(path=path):
                sequence.keep(path, ())
            case TruncateCommand(length=length):
                sequence.truncate(length)


def _evaluate(sequence: TreeSequence, tokens: Sequence[int], parents: Sequence[int]) -> EvaluateCommand:
    assert isinstance(sequence, LeadingSequence)
    return EvaluateCommand(sequence.number, tuple(tokens), tuple(parents))


def tell(peers: Sequence[Peer], call: RankCommand) -> None:
    """Let all other ranks run the same call."""
    frame = encoded(call)
    for peer in peers:
        peer.calls.sendall(frame)
