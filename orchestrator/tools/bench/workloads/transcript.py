"""An agent's conversation of a given length: every turn resends all before it, with something new. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from protocol.errors import InputError

_LONGEST_FIRST = 2048
_LONGEST_NEWS = 512
_LEAST_NEWS = 8
_LONGEST_ANSWER = 64


@dataclass(frozen=True, slots=True)
class TranscriptShape:
    """In tokens."""

    turns: int
    first: int
    """What an agent is told before anything happens: its instructions and its tools."""
    news: int
    """What each later turn adds to the answer before it: what a tool said."""
    answer: int

    @property
    def longest(self) -> int:
        """The last turn's prompt and answer."""
        return self.first + (self.turns - 1) * (self.answer + self.news) + self.answer


def shape(context: int, turns: int, answer: int) -> TranscriptShape:
    """So many turns, as long as a context has room for; answers of `answer` tokens, less where it has not.

    Raises InputError where it has no room for them.
    """
    first = min(_LONGEST_FIRST, context // 8)
    step = (context - first) // turns
    answer = min(answer, _LONGEST_ANSWER, step // 4)
    news = min(_LONGEST_NEWS, step - answer)
    if answer < 1 or news < _LEAST_NEWS:
        most = (context - first) // (2 * _LEAST_NEWS)
        raise InputError(f"The target's context of {context:,} has no room for {turns} turns: at most {most} fit.")
    return TranscriptShape(turns, first, news, answer)


class Transcript:
    """One conversation, from a text's tokens; another one for every `number`."""

    def __init__(self, tokens: Sequence[int], shape: TranscriptShape, number: int) -> None:
        self._news = islice(cycle(tokens), number * 997 % len(tokens), None)
        self._shape = shape
        self.prompt = list(islice(self._news, shape.first))

    def answered(self, answer: Sequence[int]) -> None:
        """The next turn's prompt."""
        self.prompt += [*answer, *islice(self._news, self._shape.news)]
