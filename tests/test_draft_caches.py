"""Laws of what a draft leaves behind: the next life finds it once, and nothing else stays."""

from orchestrator.core.commands import Release
from orchestrator.core.draft_caches import DraftCaches
from protocol.messages import KvOffer, KvReference, Prefilled, SequenceId

ONE, TWO = SequenceId(1), SequenceId(2)
A, B = "lp-" + "a" * 20, "lp-" + "b" * 20


def offer(sequence: SequenceId, name: str, tokens: int = 40) -> KvOffer:
    return KvOffer(sequence, name, tokens, size=1000, seconds=0.0)


def test_the_next_life_finds_what_the_last_offered():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=True)
    caches.offered(offer(ONE, A, 72), live=True)

    assert caches.left() == []
    assert caches.find(ONE) == KvReference(A, 72)


def test_the_present_life_is_not_told_of_its_own_arenas():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=True)

    assert caches.find(ONE) is None


def test_a_life_that_ends_before_it_offers_anything_leaves_what_it_took_over():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=True)
    caches.left()
    caches.find(ONE)

    assert caches.left() == []
    assert caches.find(ONE) == KvReference(A, 40)


def test_arenas_of_sequences_that_are_over_go_with_the_draft():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=True)
    caches.offered(offer(TWO, B), live=True)
    caches.ended(ONE)

    assert caches.left() == [Release(A)]
    assert caches.find(ONE) is None
    assert caches.find(TWO) == KvReference(B, 40)


def test_an_arena_that_serves_another_sequence_is_that_ones():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=True)
    caches.ended(ONE)
    caches.offered(offer(TWO, A, 33), live=True)

    assert caches.left() == []
    assert caches.find(TWO) == KvReference(A, 33)


def test_an_offer_that_comes_after_the_end_of_its_sequence_is_not_forgotten():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=False)

    assert caches.left() == [Release(A)]


def test_an_arena_that_was_refused_is_counted_and_given_up():
    caches = DraftCaches()
    caches.offered(offer(ONE, A), live=True)
    caches.left()
    caches.find(ONE)
    caches.adopted(Prefilled(ONE, 3, 40, 0.0, 0, "torn"))

    assert caches.warnings == 1
    assert caches.left() == [Release(A)]


def test_an_arena_that_was_taken_over_is_no_warning():
    caches = DraftCaches()
    caches.adopted(Prefilled(ONE, 3, 2, 0.0, 38, ""))

    assert caches.warnings == 0
