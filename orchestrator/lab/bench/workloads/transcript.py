"""A synthetic conversation of an agent: every turn resends all earlier turns and adds tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from protocol.errors import InputError

_MAX_FIRST = 2048
_MAX_ADDED = 512
_MIN_ADDED = 8
_MAX_ANSWER = 64


@dataclass(frozen=True, slots=True)
class TranscriptShape:
    """Lengths in tokens."""

    turns: int
    first: int
    """The first prompt: instructions and tool descriptions."""
    added: int
    """What each later turn adds after the answer: the output of a tool."""
    answer: int

    @property
    def longest(self) -> int:
        """The last turn's prompt and answer."""
        return self.first + (self.turns - 1) * (self.answer + self.added) + self.answer


def transcript_shape(context: int, turns: int, answer: int) -> TranscriptShape:
    """A shape of `turns` turns that fills the context, with answers of at most `answer` tokens.

    Raises InputError if the context has no room for so many turns.
    """
    first = min(_MAX_FIRST, context // 8)
    step = (context - first) // turns
    answer = min(answer, _MAX_ANSWER, step // 4)
    added = min(_MAX_ADDED, step - answer)
    if answer < 1 or added < _MIN_ADDED:
        most = (context - first) // (2 * _MIN_ADDED)
        raise InputError(f"The target's context of {context:,} has no room for {turns} turns: at most {most} fit.")
    return TranscriptShape(turns, first, added, answer)


class Transcript:
    """One conversation made of a text's tokens; every `number` gives another one."""

    def __init__(self, tokens: Sequence[int], shape: TranscriptShape, number: int) -> None:
        self._text = islice(cycle(tokens), number * 997 % len(tokens), None)
        self._shape = shape
        self.prompt = list(islice(self._text, shape.first))

    def add_turn(self, answer: Sequence[int]) -> None:
        """Extend `prompt` to the next turn's prompt."""
        self.prompt += [*answer, *islice(self._text, self._shape.added)]
