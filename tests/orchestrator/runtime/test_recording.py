"""What the orchestrator's recording keeps: waits on purpose, messages with their times."""

from pathlib import Path

import pytest

from orchestrator.runtime.recording import Recording, load_record
from protocol.messages.base import Message, NodeId, RequestId
from protocol.messages.worker import Grow, Prefilled, Verdict, Verify
from protocol.worker.spans import SpanKind, load_spans

ONE = RequestId(1)
PREFILLED = Prefilled(ONE, 0, 4, 0.0)
VERDICT = Verdict(ONE, 0, (), 3, 0.0)


def verify(round: int) -> Verify:
    return Verify(ONE, round, NodeId(9), 0, (3,), (-1,))


def grow(*tokens: int) -> Grow:
    return Grow(ONE, 0, (NodeId(1 << 62),) * len(tokens), tokens, (0.5,) * len(tokens), 1, 0.1)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path)


def step(recording: Recording, arrived: Message, *told: Message) -> None:
    """One event, and what the orchestrator says to the target in answer."""
    role = "draft" if isinstance(arrived, Grow) else "target"
    recording.arrived(role, 2 if role == "draft" else 1, arrived)
    began = recording.now()
    for message in told:
        recording.sent("target", 1, message, recording.now())
    recording.stepped(began)


def waits(recording: Recording, folder: Path) -> list[int]:
    recording.save()
    spans, _ = load_spans(folder / "orchestrator.spans")
    return spans[spans["kind"] == SpanKind.WAIT]["round"].tolist()


def test_an_answer_that_is_followed_at_once_is_no_wait(recording: Recording, tmp_path: Path):
    step(recording, PREFILLED, verify(0))
    step(recording, VERDICT, verify(1))

    assert waits(recording, tmp_path) == []


def test_growth_that_is_awaited_is_a_wait(recording: Recording, tmp_path: Path):
    step(recording, PREFILLED)
    step(recording, grow(5))
    step(recording, grow(6), verify(0))
    step(recording, VERDICT, verify(1))

    assert waits(recording, tmp_path) == [0]


def test_messages_come_back_in_order_with_their_serials(recording: Recording, tmp_path: Path):
    step(recording, grow(5, 6))
    step(recording, PREFILLED, verify(0))
    step(recording, grow())
    recording.save()

    record = load_record(tmp_path)
    assert [(type(seen.message).__name__, seen.serial) for seen in record.seen] == [
        ("Grow", 1),
        ("Prefilled", 0),
        ("Verify", 0),
        ("Grow", 2),
    ]
    first = record.seen[0].message
    assert isinstance(first, Grow)
    assert (first.parents, first.tokens, first.evaluated) == ((1 << 62, 1 << 62), (5, 6), 1)
    assert [seen.at for seen in record.seen] == sorted(seen.at for seen in record.seen)
