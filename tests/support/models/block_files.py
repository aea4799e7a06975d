"""Writes block drafters in their published formats, and computes their Markov heads over whole blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from draft_worker.drafters.block import BlockDrafter, MarkovHead
from draft_worker.drafters.files import parameters, save
from draft_worker.drafters.token_ends import TokenEnds
from protocol.contracts.drafters.description import BlockForm


def write_block(folder: Path, network: BlockDrafter, ends: TokenEnds, target: Mapping[str, Any]) -> None:
    """Write a drafter in z-lab's format, or in DeepSpec's if its anchor guesses too, whose readers expect copies of
    the target's `ends`. `target`: the target's config.json, whose special tokens go on into the drafter's."""
    form = network.form
    tensors = parameters(network)
    if form.anchor_predicts:
        tensors.append(("embed_tokens.weight", ends.embed(mx.arange(form.vocabulary))))
        # A head is linear: its weight is what it makes of unit vectors.
        tensors.append(("lm_head.weight", ends.head(mx.eye(form.width)).T))
    element = str(network.fc.weight.dtype).removeprefix("mlx.core.")
    save(folder, _config(form, target) | {"dtype": element}, tensors)


def _config(form: BlockForm, target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a drafter, from that of its target."""
    kept = {name: target[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in target}
    sliding = [window for window in form.windows if window is not None]
    shared = (
        kept
        | _decoder_config(form)
        | {
            "model_type": "qwen3",
            "attention_bias": form.bias,
            "attention_dropout": 0.0,
            "layer_types": [
                "sliding_attention" if window else "full_attention" for window in form.windows or (None,) * form.layers
            ],
            "use_sliding_window": bool(sliding),
            **({"sliding_window": sliding[0]} if sliding else {}),
            **({} if form.causal == "windows" else {"is_causal": form.causal == "all"}),
            "num_target_layers": form.target_layers,
            "block_size": form.block,
        }
    )
    asked = {"mask_token_id": form.mask_token, "target_layer_ids": list(form.outputs)}
    if not form.anchor_predicts:
        if form.taps:
            asked |= {"conv_kernel_size": form.taps, "conv_group_size": form.tap_group}
        if form.choices:
            asked |= {"selector_rank": form.rank, "selector_top_k": form.choices}
        scales = {"input_embedding_scale": form.input_scale, "output_multiplier": form.logit_scale}
        asked |= {name: scale for name, scale in scales.items() if scale != 1.0}
        if form.soft_cap is not None:
            asked["final_logit_softcapping"] = form.soft_cap
        architecture = "DFlash2DraftModel" if form.kind == "dflash2" else "DFlashDraftModel"
        own = {"architectures": [architecture], "tie_word_embeddings": True, "dflash_config": asked}
        return shared | own
    deepspec = {
        "architectures": ["Qwen3DSparkModel"],
        "tie_word_embeddings": False,
        "num_anchors": 1,
        "markov_rank": form.rank,
        "enable_confidence_head": False,
    }
    kind = {"markov_head_type": form.markov} if form.markov else {}
    return shared | asked | deepspec | kind


def latents(head: MarkovHead, tokens: mx.array, hidden: mx.array) -> mx.array:
    """(..., rows, rank) latents of blocks whose tokens are known.

    `tokens` (..., rows): the token before each row. `hidden` (..., rows, width).
    """
    state, rows = mx.zeros((*tokens.shape[:-1], head.initial(1).shape[-1]), hidden.dtype), []
    for row in range(tokens.shape[-1]):
        state, latent = head.step(state, tokens[..., row], hidden[..., row, :])
        rows.append(latent)
    return mx.stack(rows, axis=-2)


def _decoder_config(form: BlockForm) -> dict[str, Any]:
    """The fields of config.json about decoder layers."""
    return {
        "hidden_size": form.width,
        "intermediate_size": form.inner,
        "num_hidden_layers": form.layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_width,
        "vocab_size": form.vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": form.norm_epsilon,
        "rope_theta": form.rope_base,
        "rope_scaling": form.rope_scaling,
        "max_position_embeddings": form.positions,
    }
