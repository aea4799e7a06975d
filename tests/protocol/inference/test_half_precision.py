"""What Linux computes in float32 and a Mac in float16 or bfloat16: the same laws hold in the model's own type."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from protocol.inference import quantized_kv
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.quantized_kv import deviation
from protocol.inference.slots import PREFIX
from protocol.messages.base import MAX_DEVIATION
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores
from tests.conftest import HALF
from tests.support.element_types import let_experts_run_in_half, types_of, watch
from tests.support.models.architectures import IMPOSSIBLE, modules, tiny, tiny_with_wide_heads
from tests.support.models.tiny_models import ROUNDING, network, stock_logits
from tests.support.paths import ROOT
from tests.support.processing import processed

VOCABULARY = 32_000
"""Sums over so many logits leave float16."""
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_5", "granitemoehybrid", "bailing_hybrid")
"""Attention, windows, and each recurrence that runs over trees."""
PROMPT = (5, 9, 2, 33, 41, 7, 11, 3)
TREE = (1, 2, 3, 4, 5, 6, 7)
PARENTS = (-1, 0, 0, 1, -1, 3, 4)
PATHS = {(1, 2, 4, 6): (0, 1, 3, 5), (1, 3): (0, 2), (5, 7): (4, 6)}
"""The paths to the leaves, with the rows on each."""

LAWS = [
    f"tests/{folder}/test_{name}.py"
    for folder, names in {
        "draft_worker": ("engines", "logits_processors", "prefix_sharing", "short_head"),
        "draft_worker/prefill": ("prefill_worker",),
        "protocol/inference": (
            *("architecture_levels", "language_model", "latent_attention", "layer_cache", "quantized_kv"),
            *("replaced_tokens", "tap", "tree_sequence"),
        ),
        "target_worker": (
            *("begun_forwards", "failed_calls", "feature_rings", "kv", "logits_processors", "prefix_sharing"),
            *("prompt_logprobs", "recorded", "worker"),
        ),
        "target_worker/disk_cache": ("cache",),
    }.items()
    for name in names
]
"""Tests of networks whose type `TEST_ELEMENT` sets: of forwards, caches, workers, and the draft's engine."""


@pytest.fixture(autouse=True)
def experts(monkeypatch: pytest.MonkeyPatch) -> None:
    let_experts_run_in_half(monkeypatch)


both_kinds = pytest.mark.parametrize("kind", HALF)


def wide(kind: mx.Dtype) -> Any:
    """A network with a vocabulary of a usual width."""
    made = network(vocab_size=VOCABULARY)
    made.set_dtype(kind)
    return made


def halved(name: str, kind: mx.Dtype) -> Any:
    made = tiny(name)
    made.set_dtype(kind)
    return made


class _Unmasked(type(network().layers[0].self_attn)):
    """Shows every token the later ones."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, None, cache)


class _RoundedByWidth(type(network().layers[0].self_attn)):
    """Takes another kernel for many tokens, as a GPU does."""

    error = 0.0

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        found = super().__call__(x, mask, cache)
        return found * (1 + self.error) if x.shape[1] > 12 else found


@pytest.mark.parametrize("kind", [*HALF, mx.float32])
def test_a_model_that_ignores_the_mask_evaluates_one_token_at_a_time(kind: mx.Dtype):
    network = wide(kind)
    network.layers[0].self_attn.__class__ = _Unmasked
    made = LanguageModel(network)

    told = re.fullmatch(
        "a tree gives other logits than its tokens one by one, by (.*) standard deviations, and rounding explains 0.1",
        made.level_reason,
    )

    assert made.level == "plain"
    assert told is not None
    assert 0.1 < float(told[1]) < 2
    assert made.deviation < ROUNDING


def _joint(made: LanguageModel) -> tuple[bool, bool]:
    assert made.level == "tree"
    return made.joins, made.batch_dependent


@pytest.mark.parametrize("kind", [*HALF, mx.float32])
def test_rows_that_a_mask_changes_as_on_an_m5_depend_on_their_batch(kind: mx.Dtype, monkeypatch: pytest.MonkeyPatch):
    """There attention with a mask multiplies float32 with 10 bits (mlx issue 3897), which other types have anyway."""

    def attention(*inputs: mx.array, mask: Any = None, **others: Any) -> mx.array:
        queries, keys, values = inputs if mask is None else (each.astype(mx.float16).astype(kind) for each in inputs)
        return scaled_dot_product_attention(queries, keys, values, mask=mask, **others)

    sound = LanguageModel(wide(kind))
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention)
    made = LanguageModel(wide(kind))

    assert (_joint(sound), sound.joint_deviation) == ((True, False), 0.0)
    assert _joint(made) == (True, kind == mx.float32)
    assert kind != mx.float32 or 2e-4 < (made.joint_deviation or 0) < 1e-3


@pytest.mark.parametrize("kind", [*HALF, mx.float32])
@pytest.mark.parametrize(
    ("error", "joins", "dependent"),
    [
        (0.005, True, (mx.float32,)),
        (0.1, True, (mx.float32, mx.float16)),
        (0.3, False, ()),
        (float("nan"), False, ()),
    ],
)
def test_rows_of_a_joint_forward_are_compared_by_the_rounding_of_their_type(
    error: float, joins: bool, dependent: Sequence[mx.Dtype], kind: mx.Dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_RoundedByWidth, "error", error)
    made = wide(kind)
    made.lm_head.weight = made.lm_head.weight * 6
    for layer in made.layers:
        layer.self_attn.__class__ = _RoundedByWidth
    found = LanguageModel(made)

    assert _joint(found) == (joins, kind in dependent)
    assert found.joint_deviation is not None
    assert (0.1 < found.joint_deviation <= MAX_DEVIATION) is not joins


@both_kinds
@pytest.mark.parametrize(("scale", "error", "fused"), [(1.0, 0.6, False), (12.0, 0.08, True)])
def test_attention_to_quantized_rows_is_compared_in_float32(
    kind: mx.Dtype, scale: float, error: float, fused: bool, monkeypatch: pytest.MonkeyPatch
):
    """`scale`: standard deviation of the logits; `error`: that of such attention, in these."""
    logits = mx.random.normal((3, VOCABULARY), key=mx.random.key(1)) * scale
    noise = mx.random.normal(logits.shape, key=mx.random.key(2)) * scale * error
    monkeypatch.setattr(quantized_kv, "unpacking_is_faster", lambda: False)
    monkeypatch.setattr(
        quantized_kv,
        "_logits",
        lambda sequence, _: (logits + noise if sequence[0].fused else logits).astype(kind),
    )
    model = LanguageModel(tiny_with_wide_heads("llama"))
    encodings = quantized_kv.proved_encodings(lambda forms: forms or model.sequence(), model.level, 8)

    assert [encoding.fused for encoding in encodings] == [fused] * len(encodings)


@pytest.mark.sampled(4)
@both_kinds
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trees_give_what_mlx_lm_gives_for_their_paths(name: str, kind: mx.Dtype):
    made = LanguageModel(halved(name, kind))
    # Bailing's latent keys are in no joint forward, in float32 neither.
    assert (made.level, made.joins) == ("tree", name != "bailing_hybrid"), made.level_reason
    alone = _tree(made)
    together = made.evaluate_together([_part(made), _part(made)])

    assert alone.dtype == kind
    for path, rows in PATHS.items():
        stock = made.network(mx.array([[*PROMPT, *path]]), cache=make_prompt_cache(made.network))
        assert deviation(alone[mx.array(rows)], stock[0, len(PROMPT) :]) < ROUNDING, path
    assert all(deviation(each, alone) < ROUNDING for each in together)


@pytest.mark.sampled(3)
@both_kinds
@pytest.mark.parametrize("name", sorted(set(modules()) - set(IMPOSSIBLE)))
def test_no_float32_enters_a_network_that_has_none_in_mlx_lm(
    name: str, kind: mx.Dtype, monkeypatch: pytest.MonkeyPatch
):
    stock = halved(name, kind)
    seen, caches = watch(monkeypatch), make_prompt_cache(stock)
    for tokens in (PROMPT, TREE[:1]):
        mx.eval(stock(mx.array([tokens]), cache=caches))
    expected, kept = set(seen), types_of([cache.state for cache in caches])
    made = LanguageModel(stock)
    seen.clear()
    sequences = [made.sequence() for _ in range(2)]
    tree = (TREE, PARENTS) if made.level == "tree" else (TREE[:1], PARENTS[:1])
    for sequence in sequences:
        sequence.prefill(PROMPT)
    sequences.append(sequences[0].copy(len(PROMPT)))
    if made.layout:
        sequences.append(made.sequence())
        sequences[-1].adopt(*sequences[0].export(0, len(PROMPT)), len(PROMPT), made.layout.dtype)
    for tokens, parents in (tree, (TREE[:1], PARENTS[:1])):
        parts = [ForwardPart(each, tokens, _behind(each.next_row, parents)) for each in sequences]
        mx.eval(made.evaluate_together(parts))
        for each in sequences:
            each.keep([each.next_row - len(tokens)], ())

    assert seen
    assert seen <= expected
    assert types_of([cache.arrays for each in sequences for cache in each.caches]) <= kept


@both_kinds
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "granitemoehybrid", "bailing_hybrid"])
def test_a_path_that_was_accepted_in_part_leaves_what_its_tokens_leave(name: str, kind: mx.Dtype):
    made = LanguageModel(halved(name, kind))
    part = _part(made)
    first = part.sequence.next_row
    mx.eval(part.evaluate())
    part.sequence.keep([first, first + 1], ())
    got = part.sequence.evaluate([8], [PREFIX])

    assert deviation(got[0], stock_logits(made.network, (*PROMPT, 1, 2, 8))) < ROUNDING


def _tree(made: LanguageModel) -> mx.array:
    return _part(made).evaluate()


def _part(made: LanguageModel) -> ForwardPart:
    sequence = made.sequence()
    sequence.prefill(PROMPT)
    return ForwardPart(sequence, TREE, _behind(sequence.next_row, PARENTS))


def _behind(first: int, parents: Sequence[int]) -> list[int]:
    return [row if row < 0 else first + row for row in parents]


@both_kinds
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, seed=3),
        Sampling(temperature=0.7, seed=3, top_k=20, top_p=0.9, min_p=0.05),
        Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((4, 2.0),)),
    ],
)
def test_a_token_is_that_of_the_same_logits_in_float32(sampling: Sampling, kind: mx.Dtype):
    logits = (mx.random.normal((6, VOCABULARY), key=mx.random.key(4)) * 3).astype(kind)

    assert _picks(logits, sampling) == _picks(logits.astype(mx.float32), sampling)


def _picks(logits: mx.array, sampling: Sampling) -> Sequence[int]:
    given = processed(logits, sampling, tokens=(1, 4, 4, 9))
    picks: Any = mx.argmax(scores(given, range(len(given)), sampling, Noise(VOCABULARY)), axis=-1).tolist()
    return picks


@pytest.mark.sampled(1)
@pytest.mark.timeout(900)
@both_kinds
@pytest.mark.parametrize("law", LAWS)
def test_what_holds_of_networks_in_float32_holds_of_them_in_half_precision(law: str, kind: mx.Dtype):
    element = str(kind).removeprefix("mlx.core.")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "600", law]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "TEST_ELEMENT": element}, capture_output=True, text=True)

    assert run.returncode == 0, run.stdout
