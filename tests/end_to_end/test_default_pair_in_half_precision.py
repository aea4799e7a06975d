"""The default pair in the element types of a Mac: levels, joint forwards, and how often rounding decides a token."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model

from orchestrator.lab.bench.ties import TIE
from orchestrator.text.tokenizer import TextCodec
from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX
from protocol.inference.stored_model import load_network
from tests.support.default_pair import default_pair
from tests.support.paths import ROOT

PROMPT, PLACES = 32, 120
WIDTHS = (2, 5, 8, 12)


class Counted(NamedTuple):
    """Of the places of a text."""

    equal: int
    """The two best logits are equal."""
    near: int
    """They differ by one unit of the last place at most, equal ones included."""
    equal_float32: int
    """The two best are equal if the head multiplies the same states in float32."""
    flips: dict[int, tuple[int, int]]
    """By width, the places whose favourite is another one than at width 1, with the model's own head and with one in
    float32."""
    widest: float
    """The widest gap at a flip of the model's own head, in standard deviations."""


class _Float32Head:
    """Keeps the states before the head."""

    def __init__(self, network: Any) -> None:
        self.states: list[mx.array] = []
        embedding = network.model.embed_tokens
        self.weight = embedding.weight.astype(mx.float32)
        outer = self

        class Embedding(type(embedding)):
            def as_linear(self, x: mx.array) -> mx.array:
                outer.states.append(x)
                return super().as_linear(x)

        embedding.__class__ = Embedding

    def logits(self) -> np.ndarray:
        states = mx.concatenate(self.states, axis=1).squeeze(0).astype(mx.float32)
        self.states = []
        return np.array(states @ self.weight.T)


def _rows(model: LanguageModel, head: _Float32Head, tokens: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(PLACES, V) logits behind the prompt, `width` tokens at a time: by the own head, and by one in float32."""
    sequence = model.sequence()
    mx.eval(sequence.prefill(tokens[:PROMPT]))
    head.states, own = [], []
    for begin in range(PROMPT, PROMPT + PLACES, width):
        first = sequence.next_row
        own.append(sequence.evaluate(tokens[begin : begin + width], [PREFIX, *range(first, first + width - 1)]))
        mx.eval(own[-1])
        sequence.keep(range(first, first + width), ())
    return np.array(mx.concatenate(own).astype(mx.float32)), head.logits()


def counted(folder: Path, kind: mx.Dtype, tokens: list[int]) -> Counted:
    network, config = load_network(folder)
    network: Any = dequantize_model(network)
    network.set_dtype(kind)
    model = LanguageModel(network, folder, config)
    assert (model.level, model.joins) == ("tree", True), model.level_reason
    head = _Float32Head(network)
    own, float32 = _rows(model, head, tokens, 1)
    below, best = np.sort(np.partition(own, -2, axis=-1)[:, -2:], axis=-1).T
    unit = 2.0 ** np.floor(np.log2(np.abs(best))) * mx.finfo(kind).eps
    below32, best32 = np.sort(np.partition(float32, -2, axis=-1)[:, -2:], axis=-1).T
    flips, widest = {}, 0.0
    for width in WIDTHS:
        found = _rows(model, head, tokens, width)
        flipped = own.argmax(-1) != found[0].argmax(-1)
        flips[width] = int(flipped.sum()), int((float32.argmax(-1) != found[1].argmax(-1)).sum())
        widest = max(widest, *((best - below) / own.std(-1))[flipped], 0.0)
    ties = int((best == below).sum()), int((best - below <= unit).sum()), int((best32 == below32).sum())
    return Counted(*ties, flips, float(widest))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_rounding_decides_between_nearly_tied_tokens_alone(role: str, kind: mx.Dtype):
    """`-s` prints what was counted; docs/log/2026.md has figures."""
    with default_pair() as pair:
        folder: Path = getattr(pair, role)
        tokens = TextCodec(pair.target).encode((ROOT / "README.md").read_text())[: PROMPT + PLACES]
        found = counted(folder, kind, tokens)

    print(f"\n{role}, {kind}, {PLACES} places: {found}")
    assert found.widest < TIE
    assert found.equal_float32 == 0
