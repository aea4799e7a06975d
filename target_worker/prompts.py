"""The prompts that a target evaluates, a chunk at a time, in turns. Does not know when."""

from collections.abc import Callable, Iterator, Sequence

from protocol.kv.prefix_sharing import Found, PrefixSharing
from protocol.messages.base import MAX_NODES, SequenceId
from protocol.messages.worker import Prefilling, PromptLikelihoods
from protocol.worker.pacing import PacedPart, Pacer
from target_worker.engine import TargetSequence
from target_worker.kv import TargetKv


class Prompts:
    """Evaluates no token whose KV another sequence has."""

    def __init__(
        self,
        sequences: dict[SequenceId, TargetSequence],
        sharing: PrefixSharing[TargetKv],
        pacer: Pacer,
        clock: Callable[[], float],
    ) -> None:
        """`sequences`: the worker's table, in the order of their turns."""
        self._sequences = sequences
        self._sharing = sharing
        self._pacer = pacer
        self._clock = clock

    def next(self, waiting: Sequence[SequenceId]) -> tuple[TargetSequence, Found[TargetKv] | None]:
        """The sequence whose turn it is, and the KV that it waited for, if it waited."""
        id, found = self._turn(waiting)
        sequence = self._sequences[id] = self._sequences.pop(id)
        return sequence, found

    def evaluate(
        self, sequence: TargetSequence, found: Found[TargetKv] | None
    ) -> Iterator[PromptLikelihoods | Prefilling]:
        """One chunk, behind what was `found`. The last chunk is not told as Prefilling."""
        began = self._clock()
        if found is not None:
            sequence.take_over(found)
        before, context = sequence.evaluated, sequence.prefilled
        sequence.prefill()
        self._pacer.prefill(began, PacedPart(sequence.evaluated - before, context))
        sequence.seconds += self._clock() - began
        yield from _likelihoods(sequence, before)
        if sequence.prefilling:
            yield Prefilling(sequence.start.sequence, sequence.round, sequence.prefilled)

    def _turn(self, waiting: Sequence[SequenceId]) -> tuple[SequenceId, Found[TargetKv] | None]:
        """As of `PrefixSharing`. A sequence that tells of its whole prompt takes no other's KV."""
        telling = [id for id in waiting if self._sequences[id].sampling.prompt_logprobs]
        if waiting[0] in telling:
            return waiting[0], None
        return self._sharing.next_prefill([id for id in waiting if id not in telling])


def _likelihoods(sequence: TargetSequence, first: int) -> Iterator[PromptLikelihoods]:
    """Tell what the last chunk found, from the prompt's token `first` + 1 on."""
    told, sequence.told = sequence.told, []
    for begin in range(0, len(told), MAX_NODES):
        some = tuple(told[begin : begin + MAX_NODES])
        yield PromptLikelihoods(sequence.start.sequence, sequence.round, first + begin, some)
