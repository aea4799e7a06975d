"""Prompt lookup: guesses the token that followed the last few tokens earlier in the text. Pure; knows no tree."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

Gram: TypeAlias = tuple[int, ...]


class PromptLookup:
    """An incremental index of which token followed each run of at most `max_ngram` tokens.

    Saxena 2023, "Prompt lookup decoding", with more than one continuation and with confidences that are
    measured while the text is read.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        assert max_ngram >= 1
        self._max_ngram = max_ngram
        self._clear()

    def __len__(self) -> int:
        """Tokens in the index."""
        return len(self._tokens)

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of the index, or all of them if there are fewer."""
        return self._tokens[-count:] if count else []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Each is compared with the guesses for it, then indexed."""
        for token in tokens:
            self._score(token)
            for gram in _suffixes(self._tokens, self._max_ngram):
                followers = self._followers.setdefault(gram, {})
                followers[token] = followers.pop(token, 0) + 1
            self._tokens.append(token)

    def truncate(self, length: int) -> None:
        """Remove the tokens behind `length`. Indexes the rest again: O(length)."""
        if length < len(self._tokens):
            tokens = self._tokens[:length]
            self._clear()
            self.extend(tokens)

    def continuations(self, suffix: Sequence[int], limit: int) -> list[tuple[int, float]]:
        """At most `limit` (token, probability) that may follow `suffix`, by falling probability.

        Uses the longest run of last tokens that occurred before. Its followers are ranked by frequency, then by
        recency. A follower's share is scaled by how often the followers of a run of that length contained the next
        token, add-one smoothed: (right + 1) / (tried + 2).
        """
        found = self._match(suffix)
        if found is None:
            return []
        length, followers = found
        confidence = (self._right[length] + 1) / (self._tried[length] + 2)
        total = sum(followers.values())
        # A follower moves to the end whenever it occurs, and sorting is stable.
        latest_first = list(followers.items())[::-1]
        ranked = sorted(latest_first, key=lambda follower: -follower[1])
        return [(token, confidence * count / total) for token, count in ranked[:limit]]

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[Gram, dict[int, int]] = {}
        self._right = [0] * (self._max_ngram + 1)
        self._tried = [0] * (self._max_ngram + 1)

    def _match(self, suffix: Sequence[int]) -> tuple[int, dict[int, int]] | None:
        for gram in _suffixes(suffix, self._max_ngram):
            followers = self._followers.get(gram)
            if followers:
                return len(gram), followers
        return None

    def _score(self, token: int) -> None:
        found = self._match(self._tokens)
        if found is not None:
            length, followers = found
            self._tried[length] += 1
            self._right[length] += token in followers


def _suffixes(tokens: Sequence[int], longest: int) -> Iterator[Gram]:
    """The last `longest` tokens, one fewer, and so on to the last one."""
    for length in range(min(longest, len(tokens)), 0, -1):
        yield tuple(tokens[len(tokens) - length :])
