"""EAGLE-3 drafters of three families, and P-EAGLE.

EAGLE-3 checkpoints are SafeAILab's (also SpecForge, AngelSlim), speculators' or DeepSpec's, which number the layers
that they read in three ways. SafeAILab's `eagle_config` names outputs, as SGLang reads it
(python/sglang/srt/models/llama_eagle3.py adds 1 for the next layer's input). `eagle_aux_hidden_state_layer_ids` beside
the other fields, which speculators writes and vLLM reads, names inputs, one more (speculators/models/utils.py:
[2, L / 2, L - 3]). DeepSpec's `target_layer_ids` names outputs (deepspec/modeling/dspark/common.py), -1 the embedding.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.contracts.drafters.checkpoint import (
    SPECULATORS,
    Count,
    DecoderConfig,
    DrafterCheckpoint,
    LayerIds,
    Size,
)
from protocol.contracts.drafters.description import Drafter, Eagle3Form
from protocol.json_values import is_list, is_object

_DEFAULT_COUNT = 3
_DEPTHS, _MAX_DEPTHS = 8, 64
"""Of a P-EAGLE: speculators' default, and the most."""
_LAYER_NAME = re.compile(r"layers\.(\d+)(?=\.)")


class _Layer(DecoderConfig, kw_only=True):
    """In config.json itself, or nested in speculators' part of it."""

    model_type: Literal["llama", "qwen2", "qwen3"] = "llama"
    num_hidden_layers: Annotated[int, Meta(ge=1, le=64)] = 1
    max_position_embeddings: Annotated[int, Meta(ge=2)] = 131072


class _Ids(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: LayerIds | None = None


class _Config(_Ids, kw_only=True):
    transformer_layer_config: dict[str, Any] | None = None
    target_hidden_size: Size | None = None
    num_target_layers: Count | None = None
    draft_vocab_size: Size | None = None
    eagle_config: _Ids | None = None
    target_layer_ids: LayerIds | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: Annotated[int, Meta(ge=0)] | None = None
    speculators_config: Any = None


def eagle3(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    found = found.plainly_named
    config = found.decoded(_Config)
    layer = found.decoded(_Layer, config.transformer_layer_config)
    width, vocabulary, outputs = layer.hidden_size, layer.vocab_size, _outputs(found, config)
    target_width = config.target_hidden_size or width
    count = _DEFAULT_COUNT if outputs is None else len(outputs)
    if (shape := found.shape("fc.weight")) != (width, count * target_width):
        named = "does not say which outputs it reads, so that they are 3" if outputs is None else f"says {count}"
        raise found.wrong(
            f"its fc.weight has the shape {shape}, and its config.json {named} outputs of {target_width:,} numbers "
            f"for a width of {width:,}"
        )
    if config.norm_before_fc and config.fc_norm:
        raise found.wrong("its config.json sets both norm_before_fc and fc_norm, which exclude each other")
    decoder = found.decoder(layer, layer.num_hidden_layers, outputs or (), target_width)
    first = "midlayer" if found.has("midlayer.self_attn.q_proj.weight") else "layers.0"
    rows = layer.num_attention_heads * layer.head_width
    for number in range(layer.num_hidden_layers):
        name = f"layers.{number}" if number else first
        found.require(f"{name}.self_attn.q_proj.weight", (rows, width if number else 2 * width))
    found.need(f"{first}.hidden_norm.weight", f"{first}.input_layernorm.weight", "norm.weight")
    head = found.has("lm_head.weight")
    drafted = found.drafted(config.draft_vocab_size, width, vocabulary)
    if drafted is None and not head:
        drafted = found.head_tokens()
    kind = "peagle" if found.config.get(SPECULATORS) == "peagle" else "eagle3"
    masked = kind == "peagle" or found.has("mask_hidden")
    if masked:
        found.require("mask_hidden", (1, 1, count * target_width))
        if config.mask_token_id is None or config.mask_token_id >= vocabulary:
            raise found.wrong(f"its mask_token_id {config.mask_token_id} is beyond its {vocabulary:,} tokens")
    named = [network_name(name) for name in found.tensors]
    form = Eagle3Form(
        **decoder,
        head_size=drafted or vocabulary,
        biases=tuple(name.removesuffix(".bias") for name in named if name.endswith("proj.bias") or name == "fc.bias"),
        own_embedding=found.has("embed_tokens.weight"),
        own_head=head,
        norm_heads="midlayer.self_attn.q_norm.weight" in named,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        mask_token=config.mask_token_id if masked else None,
        depths=_depths(config.speculators_config) if masked else 1,
    )
    nested, deepspec = config.transformer_layer_config is not None, config.target_layer_ids is not None
    return Drafter(
        kind=kind,
        format="speculators" if nested else "DeepSpec" if deepspec else "SafeAILab",
        form=form,
        width=target_width,
        stated_outputs=outputs,
        target_layers=config.num_target_layers,
        target_vocabulary=vocabulary,
        layers=layer.num_hidden_layers,
    )


def network_name(name: str) -> str:
    """What the network calls a tensor: SafeAILab's name in the first layer; the others are counted from 0."""
    return _LAYER_NAME.sub(lambda found: f"layers.{int(found[1]) - 1}" if int(found[1]) else "midlayer", name)


def published_name(name: str, first: str) -> str:
    """What a file whose first layer is called `first` calls the network's tensor."""
    shifted = _LAYER_NAME.sub(lambda found: f"layers.{int(found[1]) + 1}", name)
    return f"{first}{name.removeprefix('midlayer')}" if name.startswith("midlayer.") else shifted


def _depths(stated: object) -> int:
    """Tokens that one forward of a P-EAGLE guesses, as speculators states them."""
    methods = stated.get("proposal_methods") if is_object(stated) else None
    found = (each.get("speculative_tokens") for each in (methods if is_list(methods) else ()) if is_object(each))
    return next((depths for depths in found if type(depths) is int and 1 <= depths <= _MAX_DEPTHS), _DEPTHS)


def _outputs(found: DrafterCheckpoint, config: _Config) -> tuple[int, ...] | None:
    """Counted from 0, the output of layer 0; None: the config names none."""
    outputs, inputs = config.target_layer_ids, config.eagle_aux_hidden_state_layer_ids
    if outputs is None and inputs is not None:
        outputs = tuple(number - 1 for number in inputs)
    if outputs is None and config.eagle_config is not None:
        outputs = config.eagle_config.eagle_aux_hidden_state_layer_ids
    return None if outputs is None else found.recordable(outputs, config.num_target_layers)
