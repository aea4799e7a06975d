"""One conversation as its tokens come: which are given, who writes the others, and where it ends. Knows no model.

An aligned model that is given only the beginning of a user's turn writes a message as people send them (Xu et al. 2024,
"Magpie", arXiv 2406.08464). So the target writes both sides, or answers messages that are given.
"""

import random
from collections import Counter
from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

LONGEST_MESSAGE, LONGEST_ANSWER = 160, 384
"""Tokens. A message that is longer ends its conversation, an answer is cut and ends it too."""
LOOP = 5
"""Tokens of the runs that are counted to find loops."""
LOOP_REPEATS = 3
MORE_TURNS = 0.4
"""Of the answers that end by themselves, after how many the target writes another message."""
WRITTEN_MESSAGES = (0.7, 1.0)
"""Temperatures of messages, one of them a conversation."""


class Writer(IntEnum):
    """Who wrote a token."""

    GIVEN = 0
    MESSAGE = 1
    """The target, in the user's place."""
    ANSWER = 2


class Step(NamedTuple):
    """The next token of a text."""

    token: int
    writer: Writer
    temperature: float | None
    """At which the token behind it is sampled; None: it is given."""


class Frame(NamedTuple):
    """Tokens between what the two sides write."""

    system: Sequence[int]
    user: Sequence[int]
    """In front of a message."""
    assistant: Sequence[int]
    """Behind a message, in front of its answer."""
    again: Sequence[int]
    """Behind an answer, in front of the next message."""
    end: int
    """Ends a message or an answer."""


Writing: TypeAlias = Generator[Step, int, None]
"""The steps of a text, to which the token sampled behind each is sent; it ends where the text does."""


def answered(turns: Sequence[Sequence[int]], frame: Frame, temperature: float) -> Writing:
    """The target answers the messages `turns`."""
    given = list(frame.system)
    for number, turn in enumerate(turns):
        given += [*(frame.again if number else frame.user), *turn, frame.end, *frame.assistant]
        if not (yield from _written(given, Writer.ANSWER, temperature, LONGEST_ANSWER, frame.end)):
            return
        given = []


def both_sides(opening: Sequence[int], frame: Frame, temperature: float, rng: random.Random) -> Writing:
    """The target writes a message that begins with `opening`, answers it, and so on."""
    of_messages = rng.choice(WRITTEN_MESSAGES)
    given = [*frame.system, *frame.user, *opening]
    while True:
        if not (yield from _written(given, Writer.MESSAGE, of_messages, LONGEST_MESSAGE, frame.end)):
            return
        if not (yield from _written(frame.assistant, Writer.ANSWER, temperature, LONGEST_ANSWER, frame.end)):
            return
        if rng.random() > MORE_TURNS:
            return
        given = list(frame.again)


def _written(
    given: Sequence[int], writer: Writer, temperature: float, longest: int, end: int
) -> Generator[Step, int, bool]:
    """Give tokens, let the target write up to `end`; whether it came there without a loop."""
    for token in given[:-1]:
        yield Step(token, Writer.GIVEN, None)
    token, by = given[-1], Writer.GIVEN
    recent: list[int] = []
    runs: Counter[tuple[int, ...]] = Counter()
    while True:
        sampled = yield Step(token, by, temperature)
        recent.append(sampled)
        token, by = sampled, writer
        run = tuple(recent[-LOOP:])
        runs[run] += len(run) == LOOP
        if sampled == end:
            # The caller gives what follows, whose first token is behind this one.
            yield Step(sampled, writer, None)
            return len(recent) > 1
        if len(recent) >= longest or runs[run] > LOOP_REPEATS:
            yield Step(sampled, writer, None)
            return False
