"""Laws of recurrences over all rows at once: outputs and states are those of mlx-lm's own functions."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5
from mlx_lm.models.gated_delta import gated_delta_update

from protocol.inference.language_model import LanguageModel
from protocol.inference.recurrences.ancestry import Ancestry
from protocol.inference.recurrences.tree_recurrences import gated_delta_path, gated_delta_tree, state_behind
from protocol.inference.slots import PREFIX
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


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("others", [{}, {"allow_neg_eigval": True}, {"lower_bound": -0.3}])
@pytest.mark.parametrize("state", [True, False])
def test_a_chain_has_the_outputs_and_the_state_of_mlx_lms_own_function(
    by_channel: bool, others: dict[str, Any], state: bool
):
    arguments = call(state, by_channel, **others)
    outputs, behind = gated_delta_update(**arguments)
    chain = Ancestry(range(-1, TOKENS - 1))

    unrolled = gated_delta_tree(arguments, chain)
    assert mx.allclose(unrolled.outputs, outputs, atol=1e-5).item()
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "granitemoehybrid", "bailing_hybrid"])
def test_a_kept_part_of_a_chain_is_folded_into_the_state(name: str, kept: int):
    model, text = LanguageModel(tiny(name)), [1, 2, 3, 4, 5, 6, 7]
    expected = model.sequence().evaluate(text, range(-1, len(text) - 1))
    sequence = model.sequence()
    sequence.prefill(text[:3])
    mx.eval(sequence.evaluate([*text[3 : 3 + kept], *[9] * (3 - kept)], [PREFIX, 0, 1]))
    sequence.keep(range(kept), ())
    next_row = sequence.next_row
    rest = text[3 + kept :]
    got = sequence.evaluate(rest, [PREFIX, *range(next_row, next_row + len(rest) - 1)])

    assert mx.allclose(got, expected[3 + kept :], atol=1e-4).item()
