"""Laws of attention to latents: few queries attend to the latents themselves, with the bits that each has alone."""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.inference.language_model import LanguageModel
from protocol.inference.latent_attention import NARROW, is_absorbed
from protocol.inference.slots import PREFIX
from tests.support.models.architecture_sizes import VOCABULARY
from tests.support.models.architectures import UNSTABLE, tiny
from tests.support.models.tiny_models import ELEMENT, alike

LATENTS = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_linear", "kimi_k3", "longcat_flash"),
    *("bailing_hybrid", "bailing_moe_v3"),
)
"""Architectures whose layers expand latents."""
TOKENS = (3, 5, 7, 11, 2, 9)


@cache
def model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(VOCABULARY, size=length).tolist()


@pytest.fixture
def key_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The heads of the keys of each attention: one, if it reads latents."""
    heads: list[int] = []
    stock = mx.fast.scaled_dot_product_attention

    def seen(q: mx.array, k: mx.array, v: mx.array, **others: Any) -> mx.array:
        heads.append(k.shape[1])
        return stock(q, k, v, **others)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", seen)
    # Not the attention of a Linux processor, which would replace this one.
    monkeypatch.setattr("protocol.inference.processor_attention.sys.platform", "other")
    return heads


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LATENTS)
def test_a_narrow_forward_reads_latents_and_gives_mlx_lms_logits(name: str, key_heads: list[int]):
    context = prompt(24)
    stock = make_prompt_cache(reference := tiny(name))
    reference(mx.array([context]), cache=stock)
    expected = reference(mx.array([[3, 5, 7]]), cache=stock)[0]
    sequence = model(name).sequence()
    sequence.prefill(context)
    key_heads.clear()
    found = sequence.evaluate([3, 5, 7], [PREFIX, sequence.next_row, sequence.next_row + 1])
    assert key_heads
    assert set(key_heads) == {1}
    # Rounding alone decides which tokens its indexer takes.
    assert alike(found, expected, 1e-4) or (name in UNSTABLE and ELEMENT.size < 4)


def test_a_long_chunk_of_a_prompt_expands(key_heads: list[int]):
    model("deepseek_v3").sequence().prefill(prompt(4 * NARROW))
    assert 1 not in key_heads


@pytest.mark.parametrize("length", [1, 40, 1021])
def test_a_row_has_the_bits_that_it_has_alone(length: int):
    """On both sides of where numpy takes over on a Linux processor, and across it."""
    network = model("deepseek_v3")
    sequence, alone = network.sequence(), network.sequence()
    for each in (sequence, alone):
        each.prefill(prompt(length))
    rows = range(sequence.next_row, sequence.next_row + len(TOKENS))
    chain = sequence.evaluate(TOKENS, [PREFIX, *rows[:-1]])
    for token, row in zip(TOKENS, chain, strict=True):
        logits = alone.evaluate([token], [PREFIX])[0]
        alone.keep([alone.next_row - 1], ())
        assert mx.array_equal(logits, row)


def test_the_form_follows_the_products_beyond_narrow_forwards():
    # DeepSeek V3: latents of 512 numbers, keys and values of 128. Absorbed below r s / (2 r - s) = 171 queries.
    long = 1 << 20
    assert is_absorbed(170, long, 512, 256)
    assert not is_absorbed(171, long, 512, 256)
    # With an empty context both forms multiply by the same matrices, and the absorbed one has longer rows.
    assert not is_absorbed(NARROW + 1, NARROW + 1, 512, 256)
    assert is_absorbed(NARROW, NARROW, 512, 256)
