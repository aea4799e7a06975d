"""Laws of recurrences over all rows at once: outputs and states are those of mlx-lm's own functions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import granitemoehybrid, qwen3_5
from mlx_lm.models.bailing_moe_linear import recurrent_gla
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import compute_dt

from protocol.inference.language_model import LanguageModel
from protocol.inference.recurrence import (
    Ancestry,
    gated_delta_path,
    gated_delta_tree,
    let_recurrences_record,
    linear_attention_tree,
    state_behind,
    state_space_tree,
)
from protocol.inference.slots import PREFIX
from tests.support.graphs import primitives
from tests.support.models.architectures import tiny

HEADS, GROUPS, SIZE, TOKENS = 4, 2, 8, 6


def call(state: bool, by_channel: bool, tokens: int = TOKENS, **others: Any) -> dict[str, Any]:
    """Arguments of `gated_delta_update` over a chain."""
    mx.random.seed(5)
    keys, values = (1, tokens, GROUPS, SIZE), (1, tokens, HEADS, SIZE)
    gates = values if by_channel else values[:3]
    return {
        "q": mx.random.normal(keys) / SIZE**0.5,
        "k": mx.random.normal(keys) / SIZE**0.5,
        "v": mx.random.normal(values),
        "a": mx.random.normal(gates),
        "b": mx.random.normal(values[:3]),
        "A_log": mx.random.normal((HEADS, 1) if by_channel else (HEADS,)),
        "dt_bias": mx.random.normal(gates[2:]),
        "state": mx.random.normal((1, HEADS, SIZE, SIZE)) if state else None,
        **others,
    }


FORMS = [
    *(
        (by_channel, others, state, mx.float32)
        for by_channel in (False, True)
        for others in ({}, {"allow_neg_eigval": True}, {"lower_bound": -0.3})
        for state in (True, False)
    ),
    *((False, others, True, kind) for others in ({}, {"allow_neg_eigval": True}) for kind in (mx.float16, mx.bfloat16)),
]


@pytest.mark.parametrize(("by_channel", "others", "state", "kind"), FORMS)
def test_a_chain_has_the_outputs_and_the_state_of_mlx_lms_own_function(
    by_channel: bool, others: dict[str, Any], state: bool, kind: mx.Dtype
):
    """Also where the strength is rounded to half precision."""
    arguments = rounded(call(state, by_channel, **others), kind, ["q", "k", "v", "a", "b", "dt_bias"])
    outputs, behind = gated_delta_update(**arguments)

    unrolled = gated_delta_tree(arguments, Ancestry(range(-1, TOKENS - 1)))
    assert mx.allclose(unrolled.outputs, outputs, atol=1e-5, rtol=2 * mx.finfo(kind).eps).item()
    assert mx.allclose(state_behind(unrolled, mx.arange(TOKENS), arguments["state"]), behind, atol=1e-5).item()


@pytest.mark.parametrize("tokens", [3, 17, 64, 150])
@pytest.mark.parametrize("alike", [False, True])
def test_a_prompt_in_blocks_has_the_outputs_and_the_state_of_mlx_lms_own_function(tokens: int, alike: bool):
    """Also where all keys are alike and nothing decays, so that each token corrects all before it."""
    arguments = call(True, False, tokens)
    if alike:
        arguments["k"] = mx.ones_like(arguments["k"]) / SIZE**0.5
        arguments |= {"A_log": mx.full((HEADS,), -20.0), "b": mx.full((1, tokens, HEADS), 9.0)}
    outputs, behind = gated_delta_update(**arguments)
    found, state = gated_delta_path(arguments)

    assert mx.allclose(found, outputs, atol=1e-4).item()
    assert mx.allclose(state, behind, atol=1e-4).item()


def test_without_a_gpu_no_forward_over_several_tokens_goes_token_by_token(monkeypatch: pytest.MonkeyPatch):
    model = LanguageModel(tiny("qwen3_5"))
    sequence = model.sequence()
    sequence.prefill([1, 2, 3])
    steps: list[int] = []
    recurrence: Any = vars(qwen3_5)["gated_delta_update"]
    monkeypatch.setattr(recurrence, "inner", lambda *arguments, **_: steps.append(1))
    mx.eval(sequence.evaluate([4, 5, 6], [PREFIX, 0, 1]))
    sequence.keep([0, 1], ())
    mx.eval([cache.arrays for cache in sequence.caches])

    assert steps == []


def rounded(arguments: dict[str, Any], kind: mx.Dtype, names: Sequence[str]) -> dict[str, Any]:
    return {**arguments, **{name: arguments[name].astype(kind) for name in names}}


HALF = pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])


@HALF
def test_linear_attentions_decay_is_rounded_as_mlx_lm_rounds_it(kind: mx.Dtype):
    """Its states have the model's own type too, so they equal mlx-lm's on average."""
    keys, size = (1, HEADS, TOKENS, SIZE), (1, HEADS, SIZE, 64)
    mx.random.seed(5)
    arguments = {
        "q": mx.random.normal(keys),
        "k": mx.zeros(keys),
        "v": mx.random.normal((*keys[:3], 64)),
        "h": 1.0 + mx.random.uniform(shape=size),
    }
    arguments = rounded(arguments, kind, list(arguments)) | {"g": mx.array([-0.1, -0.2, -0.3, -0.7]), "scale": 0.3}
    outputs, behind = recurrent_gla(**arguments)
    unrolled = linear_attention_tree(arguments, Ancestry(range(-1, TOKENS - 1)))
    found = state_behind(unrolled, mx.arange(TOKENS), arguments["h"])

    ratios = (found.astype(mx.float32) / behind.astype(mx.float32)).mean(axis=(0, 2, 3))
    assert (mx.abs(ratios - 1.0).max() < mx.finfo(kind).eps / 4).item()
    difference = mx.abs((unrolled.outputs - outputs).astype(mx.float32)).mean()
    assert (difference < mx.finfo(kind).eps * mx.abs(outputs).astype(mx.float32).mean()).item()
    first = linear_attention_tree({**arguments, "h": None}, Ancestry(range(-1, TOKENS - 1)))
    assert state_behind(first, mx.arange(TOKENS), None).dtype == kind == behind.dtype


@HALF
def test_a_state_space_is_computed_as_by_mlx_lms_kernel_for_one_token(kind: mx.Dtype):
    """The kernel, `make_ssm_kernel` in mlx_lm/models/ssm.py, needs Metal; its lines are written out here."""
    mx.random.seed(5)
    arguments = {
        "hidden_states": mx.random.normal((1, TOKENS, HEADS, SIZE)),
        "B": mx.random.normal((1, TOKENS, GROUPS, SIZE)),
        "C": mx.random.normal((1, TOKENS, GROUPS, SIZE)),
        "dt": mx.random.normal((1, TOKENS, HEADS)),
        "A_log": mx.random.normal((HEADS,)),
        "D": mx.random.normal((HEADS,)),
        "dt_bias": mx.random.normal((HEADS,)),
    }
    arguments = rounded(arguments, kind, list(arguments)) | {"state": mx.random.normal((1, HEADS, SIZE, SIZE))}
    unrolled = state_space_tree(arguments, Ancestry(range(-1, TOKENS - 1)))
    state, outputs = arguments["state"], []
    float32 = {name: array.astype(mx.float32) for name, array in arguments.items()}
    dt = compute_dt(arguments["dt"], arguments["dt_bias"], (0.001, 100.0))
    for token in range(TOKENS):
        x, dt_ = float32["hidden_states"][0, token], dt[0, token][:, None]
        write, read = (mx.repeat(float32[name][0, token], HEADS // GROUPS, axis=0) for name in ("B", "C"))
        decay = mx.exp(-mx.exp(float32["A_log"])[:, None] * dt_)
        state = decay[..., None] * state + (x * dt_)[..., None] * write[:, None]
        acc = (state * read[:, None]).sum(axis=-1)
        outputs.append((acc + x * float32["D"][:, None]).astype(kind))

    assert mx.allclose(unrolled.outputs, mx.stack(outputs, axis=1), rtol=2 * mx.finfo(kind).eps, atol=1e-4).item()
    assert mx.allclose(state_behind(unrolled, mx.arange(TOKENS), arguments["state"]), state, atol=1e-4).item()


def test_a_gpu_takes_that_form_for_several_tokens_too(monkeypatch: pytest.MonkeyPatch):
    """mlx-lm's other form for several tokens (`ssm_attn`) multiplies in the model's own type."""
    let_recurrences_record(tiny("granitemoehybrid"))
    let_recurrences_record(tiny("qwen3_5"))
    state_space: Any = vars(granitemoehybrid)["ssm_update"]
    delta_rule: Any = vars(qwen3_5)["gated_delta_update"]
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))

    assert [state_space.is_unrolled(tokens) for tokens in (1, 2)] == [False, True]
    assert not delta_rule.is_unrolled(2), "mlx-lm's kernel computes several tokens as it does one"


def test_no_state_and_no_output_is_copied_by_an_index(tmp_path: Path):
    """`x[0]` is a gather, which copies (MLX, python/src/indexing.cpp, mlx_get_item_int); a squeeze is none."""
    unrolled = gated_delta_tree(call(True, False), Ancestry([-1, 0, 0, 1, 2, 2]))

    assert "Gather" not in primitives(unrolled.outputs, tmp_path)
