"""Laws of prompt lookup: the longest matching run of last tokens decides, and probabilities are measured."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocol.speculation.prompt_lookup import PromptLookup

texts = some.lists(some.integers(0, 3), max_size=40)


def read(*tokens: int) -> PromptLookup:
    lookup = PromptLookup()
    lookup.extend(tokens)
    return lookup


def tokens_of(found: list[tuple[int, float]]) -> list[int]:
    return [token for token, _ in found]


@pytest.mark.parametrize(
    ("text", "suffix", "guesses"),
    [
        ([], [1, 2, 3], []),
        ([1, 2, 3], [8, 9], []),
        ([1, 2, 3, 4], [1, 2, 3], [4]),
        ([1, 2, 3, 7, 9, 3, 8, 3, 8], [1, 2, 3], [7]),
        ([5, 3, 8], [1, 2, 3], [8]),
        ([1, 5, 1, 5, 1, 6], [1], [5, 6]),
        ([1, 5, 1, 6], [1], [6, 5]),
        ([1, 2, 1, 3, 1, 4, 1, 5, 1, 6], [1], [6, 5, 4, 3]),
        ([0, 1, 2, 3, 4, 5, 7, 9, 2, 3, 4, 5, 8], [0, 1, 2, 3, 4, 5], [7]),
    ],
    ids=[
        *(
            "nothing read",
            "never seen",
            "what followed",
            "the longest run",
            "a shorter run where no longer one matches",
        ),
        *("more frequent first", "the latest first", "no more than the limit"),
        "a run longer than those of the index",
    ],
)
def test_the_tokens_that_followed_the_longest_run_are_guessed(text: list[int], suffix: list[int], guesses: list[int]):
    assert tokens_of(read(*text).continuations(suffix, 4)) == guesses


def test_confidence_is_add_one_smoothed():
    assert read(1, 2).continuations([1], 1) == [(2, pytest.approx(1 / 2))]


def test_a_repeating_text_is_guessed_with_growing_confidence():
    short, long = read(*[1, 2, 3, 4] * 5), read(*[1, 2, 3, 4] * 20)
    (_, early), (_, late) = short.continuations(short.last(16), 1)[0], long.continuations(long.last(16), 1)[0]

    assert early < late
    assert late > 0.95


def test_a_long_piece_of_text_is_believed_by_its_end():
    """Its beginning repeats itself, its last 300 tokens do not."""
    lookup = read(*[1, 2, 3, 4] * 200, *range(10, 310))
    found = lookup.continuations([1, 2, 3, 4] * 4, 2)

    assert tokens_of(found) == [1, 10]
    assert sum(chance for _, chance in found) == pytest.approx(1 / 2)


def test_a_random_text_is_guessed_with_little_confidence():
    source = random.Random(5)
    lookup = read(*(source.randrange(50) for _ in range(400)))
    seen = lookup.continuations([7], 50)

    assert sum(chance for _, chance in seen) < 0.3


@given(texts, some.lists(some.integers(0, 3), max_size=5))
def test_guesses_are_ordered_and_their_mass_is_below_one(text: list[int], suffix: list[int]):
    chances = [chance for _, chance in read(*text).continuations(suffix, 10)]

    assert chances == sorted(chances, reverse=True)
    assert sum(chances) < 1


@given(texts, texts)
def test_reading_in_parts_is_reading_at_once(first: list[int], second: list[int]):
    parts = read(*first)
    parts.extend(second)

    assert parts.continuations([0, 1, 2], 9) == read(*first, *second).continuations([0, 1, 2], 9)


@given(texts, some.integers(0, 40))
def test_a_truncated_text_gives_the_guesses_of_the_shorter_text(text: list[int], length: int):
    lookup = read(*text)
    lookup.truncate(length)

    assert len(lookup) == min(length, len(text))
    assert lookup.continuations([1, 2], 9) == read(*text[:length]).continuations([1, 2], 9)


def test_a_chain_continues_its_own_guesses():
    lookup = read(1, 2, 3, 4, 9, 1)

    assert tokens_of(list(lookup.chain([1], 3))) == [2, 3, 4]
    assert list(lookup.chain([1], 1)) == lookup.continuations([1], 1)
    assert list(lookup.chain([8], 3)) == []
