"""Prompt lookup: guesses the token that followed the last few tokens earlier in the text, or follows them in what the
target writes. Pure; knows no tree."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from protocol.speculation.successors import Successors

Gram: TypeAlias = tuple[int, ...]

LONGEST = 16
"""Tokens of the longest run that is compared."""
_INDEXED = 3
"""Runs of up to so many tokens are found by an index; a longer one is compared token by token."""
_COMPARED = 8
"""Places, the latest ones, where a run is compared and its followers are counted."""
_SCORED = 256
"""Tokens at the end of a long piece of text that are compared with the guesses for them. Earlier ones hardly count."""
_REMEMBERED = 0.98
"""Weight of a trial at each later one of its length. About the last fifty count, so a long prompt that repeats itself
does not decide what is believed of the answer."""


class PromptLookup:
    """An incremental index of which token followed each run of at most `LONGEST` tokens.

    Saxena 2023, "Prompt lookup decoding", with more than one continuation and with confidences that are
    measured while the text is read.
    """

    def __init__(self, successors: Successors | None = None) -> None:
        """`successors`: what the target writes, for `chain`."""
        self._successors = successors
        self._classes = [_class(length) for length in range(LONGEST + 1)]
        self._clear()

    def __len__(self) -> int:
        """Tokens in the index."""
        return len(self._tokens)

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of the index, or all of them if there are fewer."""
        return self._tokens[-count:] if count else []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. The last ones are compared with the guesses for them, and each is indexed."""
        scored = len(tokens) - _SCORED
        for number, token in enumerate(tokens):
            recent = self._tokens[-LONGEST:]
            if number >= scored:
                self._score(recent, token)
            self._index(tuple(recent[-_INDEXED:]))
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
        recency. A follower's share is scaled by how often the followers of a run of about that length contained the
        next token of late, add-one smoothed: (right + 1) / (tried + 2).
        """
        found = self._match(suffix)
        if found is None:
            return []
        length, followers = found
        kind = self._classes[length]
        confidence = (self._right[kind] + 1) / (self._tried[kind] + 2)
        total = sum(followers.values())
        # Sorting is stable, and the latest came first.
        ranked = sorted(followers.items(), key=itemgetter(1), reverse=True)
        return [(token, confidence * count / total) for token, count in ranked[:limit]]

    def chain(self, suffix: Sequence[int], limit: int) -> Iterator[tuple[int, float]]:
        """At most `limit` (token, probability), each the best continuation of `suffix` and the tokens before it, by the
        text or by the target's successors."""
        text = list(suffix)
        for _ in range(limit):
            found = self.continuations(text, 1)
            known = self._successors.after(*text[-2:]) if self._successors and len(text) > 1 else None
            best = max(found if known is None else [*found, known], key=itemgetter(1), default=None)
            if best is None:
                break
            yield best
            text.append(best[0])

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[Gram, list[int]] = {}
        """Where the token behind each short run is, in ascending order."""
        self._right = [0.0] * (self._classes[-1] + 1)
        self._tried = [0.0] * (self._classes[-1] + 1)

    def _match(self, suffix: Sequence[int]) -> tuple[int, dict[int, int]] | None:
        """The length of the longest run that occurred before, and how often each token followed it."""
        recent = suffix[-LONGEST:]
        for indexed in range(min(_INDEXED, len(recent)), 0, -1):
            places = self._places.get(tuple(recent[-indexed:]))
            if places:
                return self._compared(recent[::-1], indexed, places[: -_COMPARED - 1 : -1])
        return None

    def _compared(self, reverse: Sequence[int], indexed: int, places: Sequence[int]) -> tuple[int, dict[int, int]]:
        """As `_match`, of `places` where a run of `indexed` tokens occurred, the latest first."""
        tokens, longest = self._tokens, 0
        followers: dict[int, int] = {}
        for place in places:
            length, most = indexed, min(len(reverse), place)
            while length < most and tokens[place - 1 - length] == reverse[length]:
                length += 1
            if length > longest:
                longest, followers = length, {}
            if length == longest:
                token = tokens[place]
                followers[token] = followers.get(token, 0) + 1
        return longest, followers

    def _score(self, recent: Sequence[int], token: int) -> None:
        """`token` has followed `recent`."""
        found = self._match(recent)
        if found is not None:
            kind = self._classes[found[0]]
            self._tried[kind] = _REMEMBERED * self._tried[kind] + 1
            self._right[kind] = _REMEMBERED * self._right[kind] + (token in found[1])

    def _index(self, gram: Gram) -> None:
        """The next token follows `gram` and each of its suffixes."""
        while gram:
            places = self._places.get(gram)
            if places is None:
                self._places[gram] = [len(self._tokens)]
            else:
                places.append(len(self._tokens))
            gram = gram[1:]


def _class(length: int) -> int:
    """Runs of about the same length are measured together: 1, 2, 3, 4 and 5, 6 to 8, more."""
    return min(length, 4) + (length > 5) + (length > 8)
