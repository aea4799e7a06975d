"""What a draft holds of earlier conversations."""

from orchestrator.core.drafts.draft import Conversations
from protocol.messages.base import RequestId

ONE, TWO = RequestId(1), RequestId(2)
FIRST = list(range(100))
SECOND = [*FIRST, 7, 8, 9]


def test_the_longest_held_beginning_counts():
    conversations = Conversations()
    conversations.ended(ONE, FIRST, 100)
    conversations.ended(TWO, [*range(40), *range(500, 600)], 140)

    assert conversations.earlier(SECOND).held == 100
    assert conversations.earlier([*range(40), 1]).held == 40
    assert conversations.earlier([5]).held == 0


def test_a_prompt_continues_what_it_has_most_tokens_of():
    conversations = Conversations()
    conversations.ended(ONE, FIRST, 0)

    assert conversations.earlier(SECOND).continues
    assert conversations.earlier([*FIRST[:60], 1]).continues, "the answer came back in other tokens"
    assert not conversations.earlier([*FIRST[:40], 1]).continues


def test_a_draft_that_did_not_hold_what_was_expected_is_doubted_until_it_does():
    conversations = Conversations()
    conversations.ended(ONE, FIRST, 100)
    conversations.begun(ONE, 100)
    conversations.grown(ONE)
    assert conversations.earlier(SECOND).held == 0

    conversations.begun(TWO, 0)
    conversations.held(TWO, 90)
    assert conversations.earlier(SECOND).held == 100


def test_a_first_prompt_says_nothing_about_the_draft():
    conversations = Conversations()
    conversations.begun(ONE, 0)
    conversations.grown(ONE)
    conversations.ended(ONE, FIRST, 100)

    assert conversations.earlier(SECOND).held == 100


def test_only_the_last_conversations_are_known():
    conversations = Conversations()
    for number in range(20):
        conversations.ended(ONE, [number, 1, 2], 3)

    assert [conversations.earlier([number, 1, 2]).held for number in (0, 19)] == [0, 3]
