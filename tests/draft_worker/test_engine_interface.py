"""Laws of the engine interface: its defaults."""

from collections.abc import Iterable, Sequence

import pytest

from draft_worker.engine_interface import Batch, Engine, EngineSequence
from draft_worker.worker import DraftWorker
from protocol.messages.kv import KvReference
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Prefilled
from protocol.speculation.token_tree import Candidates
from tests.support.draft_conversation import Conversation
from tests.support.fake_draft import VOCABULARY

SAMPLING = Sampling()
REFERENCE = KvReference("segment", 2)


class Plain(EngineSequence):
    """Implements only the abstract methods; guesses the next number."""

    def __init__(self) -> None:
        self.text: list[int] = []

    @property
    def committed(self) -> int:
        return len(self.text)

    @property
    def next_row(self) -> int:
        return 0

    def prefill(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def evaluate(self, batch: Batch) -> list[Candidates]:
        return [Candidates([token + 1], [0.5]) for token in batch.tokens]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None: ...

    def truncate(self, length: int) -> None:
        del self.text[length:]


class PlainEngine(Engine):
    name = architecture = "plain"

    def open(self, sampling: Sampling, vocabulary: int) -> Plain:
        return Plain()


def batch(*tokens: int) -> Batch:
    return Batch([], tokens, [-1] * len(tokens), 1)


def test_a_sequence_without_shared_kv_returns_a_warning():
    sequence = Plain()

    assert (sequence.memory, sequence.size, sequence.copyable, sequence.save()) == (0, 0, False, None)
    assert sequence.adopt(REFERENCE, []) == "This draft shares no KV: prefill again."


def test_a_sequence_of_an_ended_request_serves_another_and_is_not_copied():
    sequence = Plain()
    sequence.prefill([1, 2, 3])

    assert sequence.reopen(2, SAMPLING, VOCABULARY, exclusive=True) is sequence
    assert sequence.text == [1, 2]
    with pytest.raises(AssertionError, match="one request at a time"):
        sequence.reopen(0, SAMPLING, VOCABULARY, exclusive=False)


def test_without_a_joint_forward_sequences_are_evaluated_in_turns():
    engine = PlainEngine()
    asked = [(engine.open(SAMPLING, VOCABULARY), batch(*tokens)) for tokens in ((1, 2), (3,))]

    found = engine.evaluate_together(asked)

    assert not engine.joint
    assert [[each.tokens for each in candidates] for candidates in found] == [[[2], [3]], [[4]]]


def test_an_engine_without_a_model_works_with_any_tokens():
    hello = DraftWorker(PlainEngine(), float).hello()

    assert (hello.engine, hello.model, hello.tokenizer_fingerprint, hello.device) == ("plain", "", "", "cpu")
    assert hello.vocabulary >= 1 << 20


def test_a_draft_without_shared_kv_prefills_the_offered_tokens():
    talk = Conversation(PlainEngine(), (1, 2, 3, 4), adopt=REFERENCE)
    told = [*talk.start(), *talk.work()][0]

    assert isinstance(told, Prefilled)
    assert (told.adopted, told.warning) == (0, "This draft shares no KV: prefill again.")
