"""KV from another machine goes into an arena of our own making, or nowhere. Real arenas, tiny models, lying senders."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from draft_worker.prefill.worker import PrefillWorker, RemoteSink, layout_of
from orchestrator.runtime.workers.intake import KvIntake
from protocol.kv.exchange import kv_form, shipments
from protocol.kv.segments import SegmentError, open_segment
from protocol.messages.base import RequestId
from protocol.messages.kv import KvForm, KvOffer, KvReference
from protocol.messages.remote import MAX_PAYLOAD, KvBlock, Shipment
from protocol.messages.worker import Fault, Hello, Prefill
from tests.support.target_requests import LONG_PROMPT, Request
from tests.target_worker.test_kv import begin, exchange, expected, model, sharing

pytestmark = pytest.mark.usefixtures("registry")
ONE = RequestId(1)
FORM = exchange().form
TARGET = Hello("target", "mlx", "tiny", "llama", 64, 512, "none", "cpu", 1, FORM, "m")


def new_intake(limit: int = 1 << 26, target: Hello = TARGET) -> KvIntake:
    intake = KvIntake(7, limit)
    intake.target = target
    return intake


def asked(intake: KvIntake, tokens: Sequence[int] = LONG_PROMPT[:-1]) -> Prefill:
    attempt = intake.open(Prefill(ONE, tuple(tokens)))
    assert isinstance(attempt, Prefill)
    return attempt


def sent(attempt: Prefill) -> list[Shipment]:
    """By an honest worker, which reads 32 tokens at a time."""
    ticks = count()
    worker = PrefillWorker(model(), RemoteSink, lambda: float(next(ticks)), 32, "m")
    replies = list(worker.handle(attempt))
    while worker.has_work:
        replies += worker.work()
    assert all(isinstance(reply, Shipment) for reply in replies)
    return [reply for reply in replies if isinstance(reply, Shipment)]


def segments(registry: Any) -> list[str]:
    return [entry.name for entry in registry.glob("lp-*")]


def test_the_target_adopts_what_another_machine_prefilled():
    intake = new_intake()
    *partial, offer = [intake.add(*shipment) for shipment in sent(asked(intake))]

    assert partial == [None] * len(partial)
    assert isinstance(offer, KvOffer)
    talk = Request(sharing(), begin(adopt=KvReference(offer.name, offer.tokens)))
    assert (talk.prefilled.adopted, talk.prefilled.tokens) == (89, 0)
    assert talk.decode(40) == list(expected(40))


@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 700))
@settings(max_examples=25)
def test_blocks_together_are_all_rows_and_none_is_too_large(rows: int, heads: int, size: int):
    noise = np.random.default_rng(rows)
    layers = [noise.random((heads, rows, size), np.float32) for _ in range(4)]
    read = [np.zeros_like(layer) for layer in layers]
    for block, payload in shipments(ONE, 0, 10, layers[:2], layers[2:]):
        assert len(payload) <= MAX_PAYLOAD
        shape = heads, block.rows, size
        begin = block.begin - 10
        read[block.layer][:, begin : begin + block.rows] = np.frombuffer(payload, np.float32).reshape(shape)

    assert all(np.array_equal(one, other) for one, other in zip(layers, read, strict=True))


LIES: dict[str, Callable[[KvBlock, bytes], tuple[KvBlock, bytes]]] = {
    "beyond the end": lambda block, payload: (structs.replace(block, begin=1 << 20), payload),
    "further on": lambda block, payload: (structs.replace(block, begin=block.begin + 1), payload),
    "before": lambda block, payload: (structs.replace(block, begin=0), payload),
    "another layer": lambda block, payload: (structs.replace(block, layer=block.layer + 1), payload),
    "a layer that is not there": lambda block, payload: (structs.replace(block, layer=2047), payload),
    "more rows than asked for": lambda block, payload: (structs.replace(block, rows=64), payload * 2),
    "more rows than bytes": lambda block, payload: (structs.replace(block, rows=1 << 20), payload),
    "no bytes": lambda block, payload: (block, b""),
    "a byte too many": lambda block, payload: (block, payload + b"\0"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("place", [4, 5])
def test_a_block_that_does_not_fit_ends_its_prompt_and_leaves_nothing(lie: Any, place: int, registry: Any):
    """Block 4 is the first of its rows, block 5 is not."""
    intake = new_intake()
    blocks = sent(asked(intake))
    for shipment in blocks[:place]:
        assert intake.add(*shipment) is None

    answer = intake.add(*lie(*blocks[place]))

    assert isinstance(answer, Fault)
    assert (answer.kind, answer.request) == ("refused", ONE)
    assert segments(registry) == []
    assert [intake.add(*shipment) for shipment in blocks] == [None] * len(blocks)
    assert intake.dropped == 1 + len(blocks)


def test_a_block_that_was_not_requested_is_dropped():
    intake = new_intake()
    blocks = sent(asked(intake))
    for block, payload in blocks:
        for other in (structs.replace(block, request=RequestId(2)), structs.replace(block, attempt=99)):
            assert intake.add(other, payload) is None
    answers = [intake.add(*shipment) for shipment in blocks]
    again = [intake.add(*shipment) for shipment in blocks]

    assert isinstance(answers[-1], KvOffer)
    assert again == [None] * len(blocks)
    assert intake.dropped == 3 * len(blocks)


def test_blocks_of_a_former_question_are_not_taken_for_the_present_one():
    """A target that died is asked anew while blocks are still on their way."""
    intake = new_intake()
    former = sent(asked(intake, LONG_PROMPT[:-2]))
    intake.add(*former[0])
    present = sent(asked(intake))
    mixed = [intake.add(*shipment) for pair in zip(former, present, strict=True) for shipment in pair]

    assert isinstance(mixed[-1], KvOffer)
    assert mixed[-1].tokens == 89


@pytest.mark.parametrize("end", ["ended", "gone"])
def test_unfinished_arenas_go_with_their_request_or_their_guest(end: str, registry: Any):
    intake = new_intake()
    blocks = sent(asked(intake))
    intake.add(*blocks[0])
    (name,) = segments(registry)
    if end == "ended":
        intake.discard(ONE)
    else:
        intake.clear()

    assert segments(registry) == []
    with pytest.raises(SegmentError):
        open_segment(name)
    assert intake.add(*blocks[1]) is None


def test_unfinished_arenas_respect_the_memory_limit(registry: Any):
    intake = new_intake(limit=1 << 16)

    assert isinstance(intake.open(Prefill(ONE, (1,) * 2000)), Fault)
    assert segments(registry) == []
    assert isinstance(intake.open(Prefill(ONE, (1,) * 20)), Prefill)


HUGE = structs.replace(TARGET, kv=KvForm(1, 1024, 4096, 3))
WRONG: dict[str, tuple[Hello, Hello]] = {
    "is not the target's": (TARGET, structs.replace(TARGET, model_fingerprint="other")),
    "another form": (TARGET, structs.replace(TARGET, kv=structs.replace(FORM, element=2))),
    "can't adopt keys": (structs.replace(TARGET, kv=None), TARGET),
    "than a block may hold": (HUGE, HUGE),
}


@pytest.mark.parametrize(("sentence", "hellos"), WRONG.items(), ids=WRONG)
def test_a_mismatch_with_the_target_has_a_reason(sentence: str, hellos: tuple[Hello, Hello]):
    ours, theirs = hellos

    assert sentence in (new_intake(target=ours).mismatch(theirs) or "")
    assert new_intake().mismatch(TARGET) is None


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_offer_holds_only_requested_rows_in_order(data: st.DataObject, registry: Any):
    """Any blocks in any order, lies among them: no exception, and an offer only when every row has come."""
    before = set(segments(registry))
    intake = new_intake()
    attempt = asked(intake, LONG_PROMPT[:6])
    layers = 2 * kv_form(layout_of(model())).layers
    row = FORM.kv_heads * FORM.head_size * 4
    written: list[tuple[int, int]] = []
    for _ in range(40):
        begin, rows, layer = data.draw(st.tuples(st.integers(0, 7), st.integers(1, 6), st.integers(0, layers)))
        if data.draw(st.booleans()):
            begin, rows, layer = len(written) // layers * 3, 3, len(written) % layers
        answer = intake.add(KvBlock(ONE, attempt.attempt, begin, rows, layer), bytes(rows * row))
        if isinstance(answer, KvOffer):
            return
        if isinstance(answer, Fault):
            assert set(segments(registry)) <= before
            return
        written.append((begin, layer))
    assert len(set(segments(registry)) - before) <= 1
