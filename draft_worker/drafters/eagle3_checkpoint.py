"""Reads the published families of EAGLE-3 checkpoints into one network, and writes SafeAILab's. Knows no engine."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from draft_worker.drafters.eagle3 import Eagle3
from draft_worker.drafters.files import DrafterFolder, decoder_config, parameters, save
from draft_worker.drafters.token_ends import TokenEnds, drafter_ends
from draft_worker.head_tokens import read_head_tokens
from protocol.contracts.drafters.description import Eagle3Form
from protocol.contracts.drafters.eagle3 import network_name, published_name

_ARCHITECTURE = "LlamaForCausalLMEagle3"


def read_eagle3(folder: Path, target: Path | None = None) -> Eagle3:
    """The network in `folder`. `target`: the folder of its target, on whose depth default outputs depend.

    Raises InputError for files that are missing, damaged or of another form, and for another target.
    """
    found = DrafterFolder(folder, Eagle3Form)
    form, given = found.form, found.tensors()
    if target is not None:
        outputs = found.drafter.outputs(found.drafter.fitting(folder, target))
        form = msgspec.structs.replace(form, outputs=outputs)
    if not form.outputs:
        raise found.wrong("its config.json names no layers of the target, and neither does a target say how many")
    tensors = {network_name(name): values for name, values in given.items()}
    head_tokens = found.head_tokens(tensors, form.vocabulary)
    if head_tokens is None and not form.own_head:
        head_tokens = read_head_tokens(folder, form.vocabulary)
    named = form.vocabulary if head_tokens is None else len(head_tokens)
    if form.head_size != named:
        raise found.wrong(f"its head has {form.head_size} tokens, and d2t or the vocabulary names {named}")
    try:
        network = Eagle3(form, head_tokens)
    except (ValueError, KeyError, TypeError, ArithmeticError, AssertionError) as error:
        raise found.wrong(f"its config.json states rotary positions that can't be computed ({error!r})") from error
    first = "midlayer" if "midlayer.self_attn.q_proj.weight" in given else "layers.0"
    found.fill(network, tensors, lambda name: published_name(name, first))
    return network


def borrow_ends(network: Eagle3, folder: Path, target: Path | None) -> TokenEnds | None:
    """Let the network use the target's embedding and head where it has none; None: it has both.

    Raises InputError if `target` is wanted and None, or another model.
    """
    form = network.form
    if form.own_embedding and form.own_head:
        return None
    tokens, width, vocabulary = None if form.own_head else network.head_tokens, form.width, form.vocabulary
    ends = drafter_ends(folder, None, target, width, vocabulary, head=not form.own_head, head_tokens=tokens)
    network.borrow(ends.embed, ends.head)
    return ends


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
        "draft_vocab_size": form.head_size,
        "target_hidden_size": form.output_width,
        "attention_bias": "midlayer.self_attn.q_proj" in form.biases,
        "mlp_bias": "midlayer.mlp.up_proj" in form.biases,
        "bias": "fc" in form.biases,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(form.outputs), "use_aux_hidden_state": True},
    }
    variants = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return decoder_config(form) | sizes | {name: True for name in variants if getattr(form, name)}
