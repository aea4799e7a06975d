"""What decides which tokens may follow: rules of any text, and of a thought before a grammar's text, which may be any
text up to its end, and no end of the answer.

Knows no model and no grammar library. The allowed tokens are a function of the generated tokens alone.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protocol.messages.grammar import Thought

TokenMask = npt.NDArray[np.bool_]
"""(V,), true for the tokens that may follow."""


class TokenRules(Protocol):
    """The position of one sequence in its rules. Looks ahead along paths without moving."""

    vocabulary: int
    """Length of the masks."""

    @property
    def failure(self) -> str:
        """The reason why the generated tokens broke the rules; empty if they did not."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Move behind these generated tokens. Sets `failure` if they are not allowed."""
        ...

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """The mask of tokens that may follow each path from this position; None if the path has ended or is not
        allowed. The position does not change. Raises GrammarError."""
        ...


class AnyText:
    """All tokens may follow, up to the end."""

    failure = ""

    def __init__(self, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self._mask = np.ones(vocabulary, dtype=np.bool_)
        self._ends = ends
        self._ended = False

    def advance(self, tokens: Sequence[int]) -> None:
        self._ended = self._ended or not self._ends.isdisjoint(tokens)

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """As TokenRules has it."""
        return [self._mask if not self._ended and self._ends.isdisjoint(path) else None for path in paths]


class ThoughtPhase(Enum):
    UNDECIDED = "undecided"
    """Nothing but the first tokens of the start marker: the answer may begin with a thought or without."""
    THINKING = "thinking"
    BEHIND = "behind"
    """In the answer, behind a thought."""
    WITHOUT = "without"
    """In an answer without a thought."""


class ThoughtPosition(NamedTuple):
    """Where a path is. Tokens behind the thought do not change it, unless further thoughts may follow."""

    phase: ThoughtPhase
    tokens: int = 0
    """Of the thoughts so far, up to the budget and what closes them."""
    recent: tuple[int, ...] = ()
    """The beginning of a start marker, or the last tokens of the thought or the text: as many as a marker has, less
    one."""


class ThoughtState:
    """The position of one sequence in its thought and in the answer behind it. Looks ahead without moving."""

    def __init__(
        self, thought: Thought, behind: TokenRules, without: TokenRules, vocabulary: int, ends: frozenset[int]
    ) -> None:
        """`behind`, `without`: of the answer behind a thought and of one without, at their beginning. `ends`: tokens
        that end an answer."""
        self._thought = thought
        self._answers = {ThoughtPhase.BEHIND: behind, ThoughtPhase.WITHOUT: without, ThoughtPhase.UNDECIDED: without}
        self.vocabulary = vocabulary
        """Length of the masks."""
        self._position = free_position(thought, ())
        self._again = thought.again
        self._undecided: tuple[int, ...] = ()
        """Tokens that may belong to a start marker or to the answer."""
        self._ends = ends
        self._open = np.ones(vocabulary, dtype=np.bool_)
        self._open[list(ends)] = False
        self._left = ""

    @property
    def failure(self) -> str:
        """The reason why the generated tokens are not allowed; empty if they are."""
        answer = self._answers.get(self._position.phase)
        return self._left or ("" if answer is None else answer.failure)

    def advance(self, tokens: Sequence[int]) -> None:
        """Move behind these generated tokens."""
        found = self._walk(tokens)
        # The tokens behind an end are none of the answer's.
        self._again = self._again and self._ends.isdisjoint(tokens)
        if found is None:
            self._left = "The grammar can't be followed: the answer ends inside its thought, or beyond its budget."
            return
        self._position, answer = found
        if self._position.phase in (ThoughtPhase.BEHIND, ThoughtPhase.WITHOUT):
            self._answers[self._position.phase].advance(answer)
            answer = ()
        self._undecided = tuple(answer)

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """As TokenRules has it."""
        walked = [self._walk(path) for path in paths]
        masks: list[TokenMask | None] = [None] * len(paths)
        for phase, rules in self._answers.items():
            places = [place for place, found in enumerate(walked) if found is not None and found[0].phase is phase]
            answers = [found[1] for place in places if (found := walked[place]) is not None]
            for place, mask in zip(places, rules.allowed(answers) if answers else (), strict=True):
                masks[place] = mask
        return [None if found is None else self._mask(found[0], masks[place]) for place, found in enumerate(walked)]

    def _mask(self, position: ThoughtPosition, answer: TokenMask | None) -> TokenMask | None:
        """`answer`: what the answer allows, unless the position is in the thought."""
        if position.phase in (ThoughtPhase.BEHIND, ThoughtPhase.WITHOUT):
            return answer
        if position.phase is ThoughtPhase.UNDECIDED:
            only = _begun(self._thought, position.recent)
        elif (forced := _forced(self._thought, position)) is not None:
            only = [forced]
        else:
            return self._open
        mask = np.zeros(self.vocabulary, dtype=np.bool_) if answer is None else answer.copy()
        mask[only] = True
        return mask

    def _walk(self, path: Sequence[int]) -> tuple[ThoughtPosition, Sequence[int]] | None:
        """The position behind `path`, and the tokens of the answer that its state does not have yet; None if the
        thought does not allow the path."""
        position = self._position
        answer = list(self._undecided)
        for place, token in enumerate(path):
            answering = position.phase in (ThoughtPhase.BEHIND, ThoughtPhase.WITHOUT)
            if answering and (token in self._ends or not self._again):
                return position, [*answer, *path[place:]]
            following = step(self._thought, position, token, self._ends)
            if following is None:
                return None
            said = answering or following.phase in (ThoughtPhase.UNDECIDED, ThoughtPhase.WITHOUT)
            # A call that ends the thought is the answer's.
            said = said or token in self._thought.calls
            answer = [*answer, token] if said and following.phase is not ThoughtPhase.THINKING else []
            position = following
        return position, answer


def step(
    thought: Thought, position: ThoughtPosition, token: int, ends: frozenset[int] = frozenset()
) -> ThoughtPosition | None:
    """The position behind `token`; None if it is not allowed there."""
    if position.phase is ThoughtPhase.UNDECIDED:
        begun = (*position.recent, token)
        if begun in thought.starts:
            return ThoughtPosition(ThoughtPhase.THINKING)
        if _begun(thought, begun):
            return ThoughtPosition(ThoughtPhase.UNDECIDED, recent=begun)
        return ThoughtPosition(ThoughtPhase.WITHOUT)
    if position.phase is not ThoughtPhase.THINKING:
        return _said(thought, position, token)
    forced = _forced(thought, position)
    if token in ends if forced is None else token != forced:
        return None
    return _thinking(thought, position, token)


def free_position(thought: Thought, tokens: Sequence[int], position: ThoughtPosition | None = None) -> ThoughtPosition:
    """Behind `tokens` on which nothing was enforced, from `position` or the beginning on."""
    position = position or ThoughtPosition(ThoughtPhase.THINKING if thought.opened else ThoughtPhase.UNDECIDED)
    for token in tokens:
        inside = position.phase is ThoughtPhase.THINKING
        position = (_thinking if inside else step)(thought, position, token) or position
    return position


def closing_token(thought: Thought, position: ThoughtPosition) -> int | None:
    """The next token of the mark that ends the thought; None where none is open."""
    if position.phase is not ThoughtPhase.THINKING:
        return None
    begun = range(len(position.recent), 0, -1)
    return thought.end[next((count for count in begun if position.recent[-count:] == thought.end[:count]), 0)]


def _thinking(thought: Thought, position: ThoughtPosition, token: int) -> ThoughtPosition:
    recent = (*position.recent, token)[-len(thought.end) :]
    if recent == thought.end or token in thought.calls:
        spent = position.tokens if thought.budget is None else min(position.tokens, thought.budget)
        return ThoughtPosition(ThoughtPhase.BEHIND, spent)
    kept = len(thought.end) - 1
    return ThoughtPosition(ThoughtPhase.THINKING, position.tokens + 1, recent[-kept:] if kept else ())


def _said(thought: Thought, position: ThoughtPosition, token: int) -> ThoughtPosition:
    """The position behind a token of the text."""
    if not thought.again:
        return position
    recent = (*position.recent, token)
    if any(recent[-len(start) :] == start for start in thought.starts):
        return ThoughtPosition(ThoughtPhase.THINKING, position.tokens)
    kept = max(map(len, thought.starts)) - 1
    return ThoughtPosition(position.phase, position.tokens, recent[-kept:] if kept else ())


def _begun(thought: Thought, begun: tuple[int, ...]) -> list[int]:
    """The tokens that continue a start marker."""
    return [start[len(begun)] for start in thought.starts if start[: len(begun)] == begun and start != begun]


def _forced(thought: Thought, position: ThoughtPosition) -> int | None:
    """The only token that may follow in the thought; None if others may too."""
    closing = thought.closing or thought.end
    if thought.budget is not None and position.tokens >= thought.budget:
        return closing[position.tokens - thought.budget]
    head = thought.end[:-1]
    # What follows the head of a longer marker could only be another form of the same marker.
    return thought.end[-1] if head and position.recent == head else None
