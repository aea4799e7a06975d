"""Laws of the engine interface: its defaults."""

from collections.abc import Iterable, Sequence

import pytest

from draft_worker.engine_interface import Batch, Engine, EngineSequence
from draft_worker.worker import DraftWorker
from protocol.messages.kv import KvReference
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
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
