"""Block drafters: DFlash and DFlash2 (z-lab), DSpark (SpecForge, DeepSpec), DFlash of DeepSpec, all in speculators'.

They name the target's outputs in `target_layer_ids`, counted from 0 (hidden_states[id + 1]). z-lab and SpecForge state
this and other options inside `dflash_config`. speculators (vllm-project/speculators: models/dflash/config.py) nests the
sizes of the layers in `transformer_layer_config`, counts outputs from 1 in `aux_hidden_state_layer_ids`
(convert/dflash/converter.py), and has windows that are causal in a block unless `sliding_window_non_causal`.
"""

from typing import Any

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter, DrafterKind
from protocol.json_values import is_list, is_object

_MAX_BLOCK, _MAX_LAYERS = 64, 128
_FOREIGN = ("attention_sink_bias", "add_swa_attention_sink_bias", "log_snr_conditioning")
"""Options of variants whose forward differs from those of the formats above."""
_PROJECTORS = (None, "dflash", "dspark")
SPECULATORS = "speculators_model_type"
_LAYER = "transformer_layer_config"
UNUSED = ("verifier_lm_head", "verifier_norm", "t2d", "rotary_emb")
"""What speculators keeps of the target for training, or what follows from other tensors."""


def options(config: dict[str, Any]) -> dict[str, Any]:
    """All options of a config.json on one level, as z-lab names them. Those in `dflash_config` prevail."""
    if config.get(SPECULATORS) is not None:
        return _unpacked(config)
    inner = config.get("dflash_config")
    return config | inner if isinstance(inner, dict) else config


def _unpacked(config: dict[str, Any]) -> dict[str, Any]:
    """From speculators' packaging."""
    layer = config.get(_LAYER)
    stated = {name: value for name, value in config.items() if value is not None and name != _LAYER}
    if is_object(layer):
        stated |= {name: value for name, value in layer.items() if value is not None and name != "architectures"}
    numbers = stated.pop("aux_hidden_state_layer_ids", None)
    if numbers is not None:
        good = is_list(numbers) and all(type(number) is int for number in numbers)
        stated["target_layer_ids"] = [number - 1 for number in numbers] if good else numbers
    if stated.get("sliding_window_non_causal", True):
        # vLLM too takes older files, which do not state it, for bidirectional ones.
        stated = {"causal": False} | stated
    stated.setdefault("sample_from_anchor", config[SPECULATORS] == "dspark")
    if config[SPECULATORS] != "dspark":
        stated.pop("markov_rank", None)
    return stated


def foreign(stated: dict[str, Any]) -> str:
    """The option of `options` that makes the drafter a variant which can't be run; empty if there is none."""
    if stated.get("projector_type") not in _PROJECTORS:
        return f"projector_type {stated['projector_type']!r:.40}"
    return next((name for name in _FOREIGN if stated.get(name)), "")


def block_kind(stated: dict[str, Any]) -> DrafterKind:
    """By `options`."""
    if has_markov_head(stated):
        return "dspark"
    return "dflash2" if stated.get("selector_top_k") or stated.get("conv_kernel_size") else "dflash"


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
    if not is_object(found.config.get("dflash_config", {})):
        raise found.wrong("the dflash_config in its config.json is no object")
    form, found = _format(found.config), found.with_config(options(found.config))
    if variant := foreign(found.config):
        raise found.wrong(f"its config.json states {variant}, a variant that can't be run yet")
    width, layers, size = found.number("hidden_size"), found.number("num_hidden_layers"), found.number("block_size")
    target_width = found.number_or("target_hidden_size", width) or width
    target_layers = found.number_or("num_target_layers", None)
    vocabulary = found.number("vocab_size")
    if layers > _MAX_LAYERS:
        raise found.wrong(f"its config.json states {layers:,} layers, of {_MAX_LAYERS} at most")
    if size > _MAX_BLOCK:
        raise found.wrong(f"its config.json states blocks of {size} tokens, of {_MAX_BLOCK} at most")
    outputs = _outputs(found)
    if target_layers is not None and outputs[-1] >= target_layers:
        raise found.wrong(
            f"its config.json states target_layer_ids {outputs}, counted from 0, for a target of {target_layers} layers"
        )
    found.require("fc.weight", (width, len(outputs) * target_width))
    found.require("hidden_norm.weight", (width,))
    found.need("norm.weight", *(f"layers.{layer}.self_attn.k_proj.weight" for layer in range(layers)))
    drafted = found.head_tokens() or found.number_or("draft_vocab_size", vocabulary) or vocabulary
    if drafted > vocabulary:
        raise found.wrong(f"its config.json says that it drafts {drafted:,} of {vocabulary:,} tokens")
    _require_heads(found, width, vocabulary)
    _require_convolutions(found, width, layers, size)
    head = found.has("lm_head.weight")
    return Drafter(
        kind=block_kind(found.config),
        format=form,
        width=target_width,
        count=len(outputs),
        stated_outputs=outputs,
        target_layers=target_layers,
        target_vocabulary=vocabulary,
        drafted=None if drafted == vocabulary else drafted,
        layers=layers,
        block=size if anchor_predicts(found.config) else size - 1,
        parameters=found.parameters(UNUSED),
        read=found.parameters(
            (*UNUSED, "embed_tokens", "fc.", "markov_w1", "codebook"),
            by_token=("lm_head", "markov_w2"),
            tokens=min(drafted, vocabulary),
        ),
        own_head=head,
    )


def _format(config: dict[str, Any]) -> str:
    if config.get(SPECULATORS) is not None:
        return "speculators"
    if "dflash_config" not in config:
        return "DeepSpec"
    return "SpecForge" if has_markov_head(options(config)) else "z-lab"


def _require_heads(found: DrafterCheckpoint, width: int, vocabulary: int) -> None:
    """What corrects a row's guess by the token before it, and the drafter's own ends."""
    own = found.number_or("draft_vocab_size", vocabulary) or vocabulary
    if found.has("lm_head.weight"):
        found.require("lm_head.weight", (own, width))
    if own != vocabulary:
        found.need("lm_head.weight")
        found.require("d2t", (own,))
    if rank := found.number_or("markov_rank", 0, least=0) or 0:
        found.require("markov_head.markov_w1.weight", (vocabulary, rank))
        found.require("markov_head.markov_w2.weight", (own, rank))
    if not (found.number_or("selector_top_k", 0, least=0) or 0):
        return
    if own != vocabulary:
        raise found.wrong(f"its selector would choose among {own:,} of {vocabulary:,} tokens, unlike the formats")
    rank = found.number("selector_rank")
    for name in ("predecessor_codebook", "successor_codebook"):
        found.require(f"candidate_selector.{name}", (vocabulary, rank))
    found.require("candidate_selector.hidden_projection.weight", (rank, width))


def _require_convolutions(found: DrafterCheckpoint, width: int, layers: int, size: int) -> None:
    taps = found.number_or("conv_kernel_size", 0, least=0) or 0
    if not taps:
        return
    group = found.number("conv_group_size")
    if taps > size or width % group:
        raise found.wrong(
            f"its config.json states conv_kernel_size {taps} and conv_group_size {group}, which don't fit blocks of "
            f"{size} tokens and a width of {width:,}"
        )
    for layer in range(layers):
        for place in ("attention_conv", "mlp_conv"):
            found.require(f"layers.{layer}.{place}.base_kernel", (2, taps, width))
            found.require(f"layers.{layer}.{place}.kernel_projection.weight", (2 * taps * width // group, width))


def _outputs(found: DrafterCheckpoint) -> tuple[int, ...]:
    outputs = found.numbers("target_layer_ids")
    if outputs is None:
        raise found.wrong("its config.json does not say which layers of the target it reads")
    return outputs


def is_block(config: dict[str, Any], architectures: tuple[str, ...]) -> bool:
    return "dflash_config" in config or any("DSpark" in name or "DFlash" in name for name in architectures)
