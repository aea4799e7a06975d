"""A recorded run as a language: the target says again what it said, the draft guesses what it guessed. Pure."""

from collections.abc import Sequence
from functools import cached_property

from orchestrator.tools.simulate.language import Guess, made_up, uniform
from orchestrator.tools.simulate.trace import Recorded, TracedPosition
from protocol.messages.base import NodeId

_STAND_IN, _OTHER, _BEYOND = range(5, 8)
"""Streams of noise, apart from those of invented languages."""


class ReplayedLanguage:
    """Request i is the i-th recorded one. Tokens, prompts and guesses on the target's path are the recorded ones.

    Off that path, and where the draft's guesses were not recorded, the shape of another position stands
    in, chosen by seed, with made-up tokens in place of those that were not the target's.
    """

    def __init__(self, recorded: Sequence[Recorded], seed: int = 0) -> None:
        self._recorded = recorded
        self._seed = seed

    def __len__(self) -> int:
        """Requests."""
        return len(self._recorded)

    def length(self, request: int) -> int:
        """Tokens that the request generated."""
        return len(self._recorded[request].positions)

    def prompt(self, request: int) -> tuple[int, ...]:
        return self._recorded[request].prompt

    def token(self, request: int, position: int) -> int:
        known = self._position(request, position)
        return made_up(self._seed, request, _BEYOND, position) if known is None else known.token

    def guesses(self, request: int, node: NodeId, position: int, on_truth: bool, limit: int) -> Sequence[Guess]:
        known = self._position(request, position) if on_truth else None
        if known is not None and known.guesses is not None:
            return known.guesses[:limit]
        stand_in = self._known[int(uniform(self._seed, node, _STAND_IN) * len(self._known))]
        right = stand_in.rank if on_truth else None
        return [
            Guess(self.token(request, position) if rank == right else made_up(node, _OTHER, rank), guess.claim)
            for rank, guess in enumerate((stand_in.guesses or ())[:limit], start=1)
        ]

    def _position(self, request: int, position: int) -> TracedPosition | None:
        """None beyond the end of what was recorded."""
        one = self._recorded[request]
        index = position - len(one.prompt)
        return one.positions[index] if 0 <= index < len(one.positions) else None

    @cached_property
    def _known(self) -> list[TracedPosition]:
        return [position for one in self._recorded for position in one.positions if position.guesses is not None]
