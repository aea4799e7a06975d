"""What features of a target on another machine cost at the sizes of real models: bytes a token on the link, and the
target's processor time behind a verdict. `python -m tests.support.far_features`; states and weights are random."""

import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx import nn

from draft_worker.projection import ProjectionMatrix
from protocol.inference.tap import Recorded
from protocol.kv.arena_header import ElementType
from protocol.messages.base import SequenceId
from protocol.messages.features import FeatureForm, FeatureShipment, Outputs, Tap, Taps
from protocol.transport import Stamp, encode
from target_worker.feature_rings import FeatureRings

SIZES = {
    "EAGLE-3, three outputs of 4,096": FeatureForm((1, 15, 28), 4096),
    "DFlash, five outputs of 5,120": FeatureForm((1, 16, 31, 46, 61), 5120),
}
ROUND, CHUNK, ROUNDS = 5, 512, 12
"""Tokens that a round commits, and tokens of a chunk of a prompt."""


class _Record:
    """Records what it is told to, of a target whose states are bfloat16."""

    element = ElementType.BFLOAT16

    def __init__(self, width: int) -> None:
        self.taps = Taps(64, width)
        self.outputs: Outputs = ()

    def record(self, outputs: Outputs) -> None:
        self.outputs = outputs


def sent(rings: FeatureRings, form: FeatureForm, tokens: int, rounds: int) -> tuple[float, float, float]:
    """Of rounds over so many tokens: bytes a token, envelopes included, and the least and the median of the processor
    milliseconds of one."""
    sequence: Any = SimpleNamespace(
        start=SimpleNamespace(sequence=SequenceId(1)), round=0, cache=SimpleNamespace(recorded=None)
    )
    states = mx.random.normal((tokens, form.joined)).astype(mx.bfloat16).view(mx.uint16)
    mx.eval(states)
    sizes, times = 0, []
    for place in range(rounds):
        sequence.cache.recorded = Recorded(form.outputs, states)
        before = time.process_time()
        blocks = [each for each in rings.written(sequence, place * tokens) if isinstance(each, FeatureShipment)]
        frames = [(encode(block, Stamp(1, 2)), payload) for block, payload in blocks]
        times.append(1e3 * (time.process_time() - before))
        while blocks:
            sizes += sum(len(head) + len(payload) for head, payload in frames)
            blocks = list(rings.taken(blocks[-1].block.number))
            frames = [(encode(block, Stamp(1, 2)), payload) for block, payload in blocks]
    rings.end(SequenceId(1))
    return sizes / rounds / tokens, min(times), median(times)


def main() -> None:
    for name, form in SIZES.items():
        layer = nn.Linear(form.joined, form.width, bias=False)
        layer.set_dtype(mx.bfloat16)
        mx.eval(layer.parameters())
        began = time.process_time()
        matrix = ProjectionMatrix.of(layer, form)
        hashing = time.process_time() - began
        assert matrix is not None
        for projection in (None, matrix.form.projection):
            record = _Record(form.width)
            rings = FeatureRings(record, record.record, fingerprint="a" * 64, epoch=1, remote=True)
            asked, blocks, began = list(rings.record(Tap(form.outputs, projection))), 0, time.process_time()
            while asked:
                answer = matrix.answer(asked[0])
                assert answer is not None
                blocks, asked = blocks + 1, list(rings.take(answer))
            if projection is not None:
                taken = time.process_time() - began
                print(f"{name}: matrix {blocks} blocks, hashed in {hashing:.2f} s, cut and taken in {taken:.2f} s")
            for what, tokens, rounds in (("round", ROUND, ROUNDS), ("chunk", CHUNK, 1)):
                size, least, middle = sent(rings, form, tokens, rounds)
                kind = "as they are" if projection is None else "projected"
                print(f"  {kind}, {what} of {tokens}: {size:,.0f} bytes a token, {least:.2f} to {middle:.2f} ms")


if __name__ == "__main__":
    main()
