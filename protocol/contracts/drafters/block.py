"""Block drafters: DFlash (z-lab), DSpark (SpecForge, DeepSpec) and DFlash of DeepSpec.

They name the target's outputs in `target_layer_ids`, counted from 0 (hidden_states[id + 1]). z-lab and SpecForge state
this and other options inside `dflash_config`.
"""

from typing import Any

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter

_MAX_BLOCK, _MAX_LAYERS = 64, 128
_FOREIGN = ("attention_sink_bias", "add_swa_attention_sink_bias", "log_snr_conditioning", "speculators_model_type")
"""Options of variants whose forward differs from those of the formats above."""
_PROJECTORS = (None, "dflash", "dspark")


def options(config: dict[str, Any]) -> dict[str, Any]:
    """All options of a config.json on one level. Those in `dflash_config` prevail."""
    inner = config.get("dflash_config")
    return config | inner if isinstance(inner, dict) else config


def foreign(stated: dict[str, Any]) -> str:
    """The option of `options` that makes the drafter a variant which can't be run; empty if there is none."""
    if stated.get("projector_type") not in _PROJECTORS:
        return f"projector_type {stated['projector_type']!r:.40}"
    return next((name for name in _FOREIGN if stated.get(name)), "")


def has_markov_head(stated: dict[str, Any]) -> bool:
    """Whether `options` are those of a DSpark; otherwise, of a DFlash."""
    return bool(stated.get("markov_rank"))


def anchor_predicts(stated: dict[str, Any]) -> bool:
    """Whether the anchor's row guesses too, by `options`: in DSpark, and in DeepSpec's DFlash."""
    explicit = stated.get("sample_from_anchor")
    if isinstance(explicit, bool):
        return explicit
    return not stated.get("dflash_config") or stated.get("projector_type") == "dspark" or has_markov_head(stated)


def block(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    nested, found = "dflash_config" in found.config, found.with_config(options(found.config))
    if variant := foreign(found.config):
        raise found.wrong(f"its config.json states {variant}, a variant that can't be run yet")
    width, layers, size = found.number("hidden_size"), found.number("num_hidden_layers"), found.number("block_size")
    target_width = found.number_or("target_hidden_size", width) or width
    vocabulary = found.number("vocab_size")
    if layers > _MAX_LAYERS:
        raise found.wrong(f"its config.json states {layers:,} layers, of {_MAX_LAYERS} at most")
    if size > _MAX_BLOCK:
        raise found.wrong(f"its config.json states blocks of {size} tokens, of {_MAX_BLOCK} at most")
    outputs = _outputs(found)
    found.require("fc.weight", (width, len(outputs) * target_width))
    found.require("hidden_norm.weight", (width,))
    found.need("norm.weight", *(f"layers.{layer}.self_attn.k_proj.weight" for layer in range(layers)))
    rank = found.number_or("markov_rank", 0, least=0) or 0
    drafted = found.head_tokens() or found.number_or("draft_vocab_size", vocabulary) or vocabulary
    if rank:
        found.require("markov_head.markov_w1.weight", (vocabulary, rank))
    head = found.has("lm_head.weight")
    return Drafter(
        kind="dspark" if has_markov_head(found.config) else "dflash",
        format=("SpecForge" if rank else "z-lab") if nested else "DeepSpec",
        width=target_width,
        count=len(outputs),
        stated_outputs=outputs,
        target_layers=found.number_or("num_target_layers", None),
        target_vocabulary=vocabulary,
        drafted=None if drafted == vocabulary else drafted,
        layers=layers,
        block=size if anchor_predicts(found.config) else size - 1,
        parameters=found.parameters(),
        read=found.parameters(
            ("embed_tokens", "fc.", "markov_w1"), by_token=("lm_head", "markov_w2"), tokens=min(drafted, vocabulary)
        ),
        own_head=head,
    )


def _outputs(found: DrafterCheckpoint) -> tuple[int, ...]:
    outputs = found.numbers("target_layer_ids")
    if outputs is None:
        raise found.wrong("its config.json does not say which layers of the target it reads")
    return outputs


def is_block(config: dict[str, Any], architectures: tuple[str, ...]) -> bool:
    return "dflash_config" in config or any("DSpark" in name or "DFlash" in name for name in architectures)
