"""Prompt lookup: guesses the token that followed the last few tokens earlier in the text. Pure; knows no tree."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

Gram: TypeAlias = tuple[int, ...]
_REMEMBERED = 0.98
"""Weight of a trial at each later one of its length: about the last fifty count, so a long prompt that repeats itself
does not decide what is believed of the answer."""


class PromptLookup:
    """An incremental index of which token followed each run of at most `max_ngram` tokens.

    Saxena 2023, "Prompt lookup decoding", with more than one continuation and with confidences that are
    measured while the text is read.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        assert max_ngram >= 1
        self.max_ngram = max_ngram
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
            self._index(tuple(self._tokens[-self.max_ngram :]), token)
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
        token of late, add-one smoothed: (right + 1) / (tried + 2).
        """
        found = self._match(suffix)
        if found is None:
            return []
        length, followers = found
        confidence = (self._right[length] + 1) / (self._tried[length] + 2)
        total = sum(followers.values())
        # A follower moves to the end whenever it occurs, and sorting is stable.
        latest_first = list(followers.items())[::-1]
        ranked = sorted(latest_first, key=itemgetter(1), reverse=True)
        return [(token, confidence * count / total) for token, count in ranked[:limit]]

    def chain(self, suffix: Sequence[int], limit: int) -> Iterator[tuple[int, float]]:
        """At most `limit` (token, probability), each the best continuation of `suffix` and the tokens before it."""
        text = list(suffix)
        for _ in range(limit):
            best = self.continuations(text, 1)
            if not best:
                break
            yield best[0]
            text.append(best[0][0])

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[Gram, dict[int, int]] = {}
        self._right = [0.0] * (self.max_ngram + 1)
        self._tried = [0.0] * (self.max_ngram + 1)

    def _match(self, suffix: Sequence[int]) -> tuple[int, dict[int, int]] | None:
        recent = tuple(suffix[-self.max_ngram :])
        while recent:
            followers = self._followers.get(recent)
            if followers:
                return len(recent), followers
            recent = recent[1:]
        return None

    def _index(self, gram: Gram, token: int) -> None:
        """`token` follows `gram` and each of its suffixes; the longest one that occurred before is scored."""
        scored = False
        while gram:
            followers = self._followers.get(gram)
            if followers is None:
                followers = self._followers[gram] = {}
            elif not scored:
                self._tried[len(gram)] = _REMEMBERED * self._tried[len(gram)] + 1
                self._right[len(gram)] = _REMEMBERED * self._right[len(gram)] + (token in followers)
                scored = True
            followers[token] = followers.pop(token, 0) + 1
            gram = gram[1:]
