"""A target divided among ranks by mlx-lm's tensor parallelism: all of them run the same forwards together.

Rank 0 is the target worker. Before it runs a method of one of its sequences, it commands the other ranks to run the
same method. Tokens, trees and accepted paths all come from rank 0: no other rank samples, so no rank can choose other
tokens. Knows no messages of the pipeline.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.path_sequence import PathSequence
from protocol.inference.quantized_kv import Encodings
from protocol.inference.tap import LayerTap
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level
from protocol.messages.features import Outputs
from target_worker.tensor_parallel.rank_commands import (
    CloseCommand,
    EvaluateCommand,
    EvaluateTogetherCommand,
    KeepCommand,
    PrefillCommand,
    RankCommand,
    RecordCommand,
    TruncateCommand,
    encoded,
)
from target_worker.tensor_parallel.rendezvous import Peer

SendCommand = Callable[[RankCommand], None]


class LeadingModel(LanguageModel):
    """Rank 0's model. After `lead`, its sequences send commands; before, every rank runs the same forwards."""

    _send: SendCommand | None = None

    def lead(self, peers: Sequence[Peer]) -> None:
        self._send = lambda command: send_all(peers, command)
        # The other ranks do not compute the logits of a prefill, which may take collectives.
        self.prompt_logits = False
        self.numbers = itertools.count(1)

    def sequence(self) -> TreeSequence:
        if self._send is None:
            return super().sequence()
        return LeadingSequence(self.network, self.level, self._encodings, self.tap, self._send, next(self.numbers))

    def record(self, outputs: Outputs) -> None:
        # The other ranks record too: so all of them evaluate the same, and run the same collectives.
        if self._send is not None:
            self._send(RecordCommand(outputs))
        super().record(outputs)

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        if self._send is None or len(parts) == 1 or not self.joins:
            return super().evaluate_together(parts)
        self._send(
            EvaluateTogetherCommand(tuple(_evaluate(part.sequence, part.tokens, part.parents) for part in parts))
        )
        logits = super().evaluate_together(parts)
        mx.eval(logits)
        return logits


class LeadingSequence(TreeSequence):
    """Every rank evaluates its share. Its KV is never exported, adopted or copied: each rank has a slice of it."""

    copyable = False

    def __init__(
        self,
        network: Any,
        level: Level,
        encodings: Encodings,
        tap: LayerTap | None,
        send: SendCommand,
        number: int,
    ) -> None:
        super().__init__(network, level, encodings, tap)
        self._send = send
        self.number = number
        """Number of this sequence on all ranks."""
        # The engine that drops a sequence does not know that other ranks hold it too.
        weakref.finalize(self, send, CloseCommand(number)).atexit = False

    def prefill(self, tokens: Sequence[int]) -> None:
        """Without logits: the other ranks do not compute them."""
        self._send(PrefillCommand(self.number, tuple(tokens)))
        super().prefill(tokens)

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int], first: int | None = None) -> mx.array:
        assert first is None, "a target replaces no committed tokens"
        self._send(_evaluate(self, tokens, parents))
        logits = super().evaluate(tokens, parents)
        # The ranks stay in step only if all collectives of one forward run before those of the next.
        mx.eval(logits)
        return logits

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        assert not tuple(surviving), "a target keeps no rows beside the path"
        self._send(KeepCommand(self.number, tuple(path)))
        super().keep(path, ())

    def truncate(self, length: int) -> None:
        self._send(TruncateCommand(self.number, length))
        super().truncate(length)


def follow(model: LanguageModel, commands: Iterable[RankCommand]) -> None:
    """For another rank: run the commands of rank 0 in their order."""
    sequences: dict[int, TreeSequence] = {}
    for command in commands:
        if isinstance(command, CloseCommand):
            sequences.pop(command.sequence, None)
            continue
        if isinstance(command, RecordCommand):
            model.record(command.outputs)
            continue
        if isinstance(command, EvaluateTogetherCommand):
            parts = [ForwardPart(sequences[part.sequence], part.tokens, part.parents) for part in command.parts]
            mx.eval(model.evaluate_together(parts))
            continue
        sequence = sequences.setdefault(command.sequence, model.sequence())
        match command:
            case PrefillCommand(tokens=tokens):
                sequence.prefill(tokens)
            case EvaluateCommand(tokens=tokens, parents=parents):
                mx.eval(sequence.evaluate(tokens, parents))
            case KeepCommand(path=path):
                sequence.keep(path, ())
            case TruncateCommand(length=length):
                sequence.truncate(length)


def _evaluate(sequence: TreeSequence | PathSequence, tokens: Sequence[int], parents: Sequence[int]) -> EvaluateCommand:
    assert isinstance(sequence, LeadingSequence)
    return EvaluateCommand(sequence.number, tuple(tokens), tuple(parents))


def send_all(peers: Sequence[Peer], command: RankCommand) -> None:
    """Send a command to all other ranks."""
    frame = encoded(command)
    for peer in peers:
        peer.commands.sendall(frame)
