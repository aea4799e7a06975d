"""What the level of a target means, in words for the user."""

from collections.abc import Mapping

from protocol.messages.base import Level

MEANINGS: Mapping[Level, str] = {
    "tree": "one forward verifies any tree of guesses",
    "chain": "one forward verifies one path of guesses, without alternatives beside it",
    "plain": "one forward evaluates one token, so nothing is guessed and no draft is used; all else works",
}


def level_note(level: Level) -> str:
    """A sentence about a target below the highest level; empty for that level."""
    return "" if level == "tree" else f"The target is a {level} model: {MEANINGS[level]}."
