"""Reads and writes the published files of the block drafters DFlash, DSpark and DFlash2. Knows no engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from draft_worker.drafters.block import BlockDrafter, markov_head
from draft_worker.drafters.files import DrafterFolder, decoder_config, parameters, save
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from draft_worker.short_head import keep_rows
from protocol.contracts.drafters.description import BlockForm

_ENDS = ("embed_tokens", "lm_head")
_CONFIDENCE = "confidence_head"


class BlockCheckpoint(NamedTuple):
    """A drafter from its files."""

    network: BlockDrafter
    ends: TokenEnds | None
    """Its own copies of the target's embedding and head; None: the target's."""
    head_tokens: HeadTokens | None
    """Those of the columns of head and Markov head; None: column c is token c."""


def read_block(folder: Path) -> BlockCheckpoint:
    """Raises InputError for files that are missing, damaged or of another form."""
    found = DrafterFolder(folder, BlockForm)
    form, tensors = found.form, found.tensors()
    named = found.head_tokens(tensors, form.vocabulary, ("lm_head.", "markov_head.markov_w2."))
    count = form.vocabulary if named is None else len(named)
    own = {name: values for name, values in tensors.items() if name.split(".")[0] in _ENDS}
    # Our trees rank by probability, so the confidence head that some have is not read.
    tensors = {name: values for name, values in tensors.items() if name.split(".")[0] not in (*_ENDS, _CONFIDENCE)}
    try:
        network = BlockDrafter(form)
        if form.markov and named is not None:
            network.markov_head = markov_head(form, len(named))
        found.fill(network, tensors)
        # Some ropes read their options when they are called.
        mx.eval(network.layers[0].self_attn.keys_values(mx.zeros((1, 1, form.width)), mx.zeros((1, 1), mx.int32)))
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise found.wrong(f"its config.json states a rotary embedding that is not known ({error})") from error
    head_tokens = read_head_tokens(folder, form.vocabulary) if named is None else None
    if form.markov and head_tokens is not None:
        keep_rows(network.markov_head.markov_w2, head_tokens)
    ends = None
    if {name.split(".")[0] for name in own} == {*_ENDS}:
        copies = _OwnEnds(form, count)
        found.fill(copies, own)
        ends = TokenEnds.of(copies.embed_tokens, copies.lm_head, head_tokens)
    if named is not None and ends is None:
        raise found.wrong("it names the tokens of a reduced head (d2t) and lacks embed_tokens.weight or lm_head.weight")
    return BlockCheckpoint(network, ends, head_tokens if named is None else named)


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
    save(folder, block_config(form, target) | {"dtype": element}, tensors)


def block_config(form: BlockForm, target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a drafter, from that of its target."""
    kept = {name: target[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in target}
    sliding = [window for window in form.windows if window is not None]
    shared = (
        kept
        | decoder_config(form)
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
            "clean_prefix": form.clean_prefix,
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


class _OwnEnds(nn.Module):
    """Copies of the target's embedding and head."""

    def __init__(self, form: BlockForm, columns: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(form.vocabulary, form.width)
        self.lm_head = nn.Linear(form.width, columns, bias=False)
