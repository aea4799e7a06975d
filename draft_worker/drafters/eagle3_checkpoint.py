"""Reads the published families of EAGLE-3 checkpoints into one form, and writes SafeAILab's.

A target's outputs have different numbers in each family, and different keys (`_stated_outputs`). Knows no engine.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import Meta

from draft_worker.drafters.eagle3 import Eagle3, Eagle3Form
from draft_worker.drafters.files import DrafterFolder, Quantization, parameters, save
from draft_worker.head_tokens import read_head_tokens
from protocol.contracts.drafters.eagle3 import drafted_depths

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NESTED = "transformer_layer_config"
"""speculators' part with the sizes of the layer."""
_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYERS = ("llama", "qwen2", "qwen3")
"""Model types whose decoder layer is that of `Eagle3Layer`."""
_UNUSED = ("verifier_norm.", "verifier_lm_head.", "t2d", "rotary_emb.")
"""What training kept of the target, or what follows from other tensors."""

Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
Tensors: TypeAlias = dict[str, mx.array]


class _Layer(msgspec.Struct):
    """Sizes of the decoder layer, in config.json itself or nested."""

    hidden_size: Annotated[int, Meta(ge=1, le=1 << 15)]
    intermediate_size: Size
    num_attention_heads: Annotated[int, Meta(ge=1, le=1024)]
    vocab_size: Size
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    head_dim: Annotated[int, Meta(ge=2, le=1024)] | None = None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=64)] = 1
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=2)] = 131072
    hidden_act: str = "silu"
    model_type: str = "llama"


class _Drafter(msgspec.Struct):
    """What stands in config.json itself in every family."""

    target_hidden_size: Annotated[int, Meta(ge=1, le=1 << 15)] | None = None
    num_target_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: Annotated[int, Meta(ge=0)] | None = None
    quantization: Quantization | None = None


class _Ids(msgspec.Struct):
    """Outputs of the target as the families name them."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: dict[str, Any] | None = None
    target_layer_ids: list[int] | None = None


def read_eagle3(folder: Path, target_layers: int | None = None) -> Eagle3:
    """The network in `folder`, for a target of so many layers: its default outputs depend on them.

    Raises InputError for files that are missing, damaged or of another form.
    """
    found = DrafterFolder(folder, "an EAGLE-3 drafter")
    config = found.raw_config()
    drafter = found.decoded(config, _Drafter)
    layer = found.decoded(config.get(_NESTED, config), _Layer)
    given = found.tensors()
    tensors = _renamed(given)
    head_tokens = found.head_tokens(tensors, layer.vocab_size)
    borrowed = layer.vocab_size
    if head_tokens is None and "lm_head.weight" not in tensors:
        head_tokens = read_head_tokens(folder, layer.vocab_size)
        borrowed = layer.vocab_size if head_tokens is None else len(head_tokens)
    outputs = _outputs(found, config, drafter.num_target_layers or target_layers)
    try:
        form = _form(found, layer, drafter, outputs, tensors, borrowed)
        if form.mask_token is not None:
            form = msgspec.structs.replace(form, depths=drafted_depths(config))
        network = Eagle3(form, head_tokens)
    except (ValueError, KeyError, TypeError, ArithmeticError, AssertionError) as error:
        raise found.wrong(f"its config.json states rotary positions that can't be computed ({error!r})") from error
    named = form.vocabulary if head_tokens is None else len(head_tokens)
    if form.head_size != named:
        raise found.wrong(f"its head has {form.head_size} tokens, and d2t or the vocabulary names {named}")
    found.fill(network, tensors, drafter.quantization, _stated if any(map(_LAYER_NAME.match, given)) else str)
    return network


def write_eagle3(folder: Path, network: Eagle3, element: mx.Dtype = mx.float16) -> None:
    """Write SafeAILab's form, weights in `element`."""
    form = network.form
    assert form.layers == 1, "SafeAILab's form has one layer"
    tensors = {name: values.astype(element) for name, values in parameters(network)}
    if network.head_tokens is not None:
        chosen = np.zeros(form.vocabulary, dtype=bool)
        chosen[network.head_tokens] = True
        tensors["d2t"] = mx.array(network.head_tokens - np.arange(form.head_size), dtype=mx.int64)
        tensors["t2d"] = mx.array(chosen)
    save(folder, _config(form), tensors.items())


def _config(form: Eagle3Form) -> dict[str, Any]:
    """Without variants that the form does not use: other programs refuse keys that they don't know."""
    sizes = {
        "architectures": [_ARCHITECTURE],
        "model_type": "qwen3" if form.norm_heads else "llama",
        "hidden_size": form.hidden_size,
        "intermediate_size": form.intermediate_size,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": form.vocabulary,
        "draft_vocab_size": form.head_size,
        "target_hidden_size": form.target_width,
        "rms_norm_eps": form.rms_norm_eps,
        "rope_theta": form.rope_theta,
        "rope_scaling": None if form.rope_scaling is None else dict(form.rope_scaling),
        "max_position_embeddings": form.context,
        "hidden_act": "silu",
        "attention_bias": "midlayer.self_attn.q_proj" in form.biases,
        "mlp_bias": "midlayer.mlp.up_proj" in form.biases,
        "bias": "fc" in form.biases,
        "tie_word_embeddings": False,
        "eagle_config": {_IDS: list(form.outputs), "use_aux_hidden_state": True},
    }
    variants = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return sizes | {name: True for name in variants if getattr(form, name)}


def _renamed(tensors: Tensors) -> Tensors:
    """By the network's names: SafeAILab's of the first layer, and the others counted from 0."""
    kept = {name: values for name, values in tensors.items() if not name.startswith(_UNUSED)}
    return {_LAYER_NAME.sub(_layer_name, name): kept[name] for name in kept}


def _stated(name: str) -> str:
    """What files whose layers are numbered from 0 call the network's tensor."""
    if name.startswith("midlayer."):
        return name.replace("midlayer", "layers.0", 1)
    return _LAYER_NAME.sub(lambda found: f"layers.{int(found[1]) + 1}", name)


_LAYER_NAME = re.compile(r"layers\.(\d+)(?=\.)")


def _layer_name(found: re.Match[str]) -> str:
    return f"layers.{int(found[1]) - 1}" if int(found[1]) else "midlayer"


def _outputs(found: DrafterFolder, config: Mapping[str, Any], layers: int | None) -> tuple[int, ...]:
    outputs = _stated_outputs(found, config)
    if outputs is None:
        if layers is None:
            raise found.wrong("its config.json names no layers of the target, and neither does a target say how many")
        # Inputs of layers 2, L/2 and L-3 (SafeAILab/EAGLE: eagle/model/modeling_llama_kv.py; vLLM has the same).
        outputs = [1, layers // 2 - 1, layers - 4]
    most = 1 << 10 if layers is None else layers
    ascending = all(later > earlier for earlier, later in pairwise(outputs))
    if not outputs or not ascending or outputs[0] < 0 or outputs[-1] >= most:
        raise found.wrong(f"the target's outputs that it reads, {outputs}, must ascend from 0 to below {most}")
    return tuple(outputs)


def _stated_outputs(found: DrafterFolder, config: Mapping[str, Any]) -> list[int] | None:
    """In our numbering, from 0 behind layer 0; None: the config names none.

    DeepSpec and SafeAILab number outputs as we do (DeepSpec: deepspec/modeling/eagle3/common.py reads
    hidden_states[id + 1]; SGLang adds 1 to make inputs of them). speculators numbers the inputs of layers, as vLLM.
    """
    ids = found.decoded(config, _Ids)
    if ids.target_layer_ids is not None:
        return ids.target_layer_ids
    if ids.eagle_aux_hidden_state_layer_ids is not None:
        # Beside the other fields the numbers are those of inputs, as vLLM reads them; protocol.contracts.drafters says
        # more.
        return [each - 1 for each in ids.eagle_aux_hidden_state_layer_ids]
    nested = found.decoded(ids.eagle_config or {}, _Ids)
    return nested.eagle_aux_hidden_state_layer_ids


def _form(
    found: DrafterFolder, layer: _Layer, drafter: _Drafter, outputs: tuple[int, ...], tensors: Tensors, borrowed: int
) -> Eagle3Form:
    """`borrowed`: tokens of the target's head that it uses if it has none."""
    if layer.model_type not in _LAYERS or layer.hidden_act != "silu":
        raise found.wrong(f"its decoder layer is of an unknown kind ({layer.model_type}, {layer.hidden_act})")
    if drafter.norm_before_fc and drafter.fc_norm:
        raise found.wrong("its config.json sets both norm_before_fc and fc_norm, which exclude each other")
    if layer.num_attention_heads % (layer.num_key_value_heads or layer.num_attention_heads):
        raise found.wrong(f"{layer.num_attention_heads} heads don't share {layer.num_key_value_heads} keys evenly")
    if "mask_hidden" in tensors and (drafter.mask_token_id is None or drafter.mask_token_id >= layer.vocab_size):
        raise found.wrong(f"it has the tensor mask_hidden, and its mask_token_id is {drafter.mask_token_id}")
    theta, scaling = _rope(layer)
    head = tensors.get("lm_head.weight")
    return Eagle3Form(
        outputs=outputs,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        heads=layer.num_attention_heads,
        kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
        head_dim=layer.head_dim or max(2, layer.hidden_size // layer.num_attention_heads),
        layers=layer.num_hidden_layers,
        vocabulary=layer.vocab_size,
        head_size=borrowed if head is None or head.ndim == 0 else len(head),
        target_width=drafter.target_hidden_size or layer.hidden_size,
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        context=layer.max_position_embeddings,
        biases=tuple(name.removesuffix(".bias") for name in tensors if name.endswith("proj.bias") or name == "fc.bias"),
        own_embedding="embed_tokens.weight" in tensors,
        own_head=head is not None,
        norm_heads="midlayer.self_attn.q_norm.weight" in tensors,
        norm_before_residual=drafter.norm_before_residual,
        norm_before_fc=drafter.norm_before_fc,
        fc_norm=drafter.fc_norm,
        norm_output=drafter.norm_output,
        mask_token=drafter.mask_token_id if "mask_hidden" in tensors else None,
    )


def _rope(layer: _Layer) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling. Newer files have both in `rope_parameters`; positions in three parts are one part for text."""
    scaling = layer.rope_parameters or layer.rope_scaling or {}
    theta = scaling.get("rope_theta", layer.rope_theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = kind == "default" or "mrope_section" in scaling
    return float(theta), None if plain else {name: each for name, each in scaling.items() if name != "rope_theta"}
