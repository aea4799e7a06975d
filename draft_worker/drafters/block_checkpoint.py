"""Reads and writes the published files of the block drafters DFlash, DSpark and DFlash2. Knows no engine.

The formats, all with the tensor names of `block.BlockDrafter`, and the target's layers counted from 0:

* z-lab (DFlash, DFlash2): `dflash_config {mask_token_id, target_layer_ids}`; no embedding, no head; a mask guesses
  itself.
* DeepSpec (DSpark, and DFlash as a DSpark of rank 0): `mask_token_id`, `target_layer_ids` and `markov_rank` at the top;
  copies of the target's embedding and head; the anchor guesses too.
* SpecForge (DSpark): z-lab's, with `projector_type: dspark` and `markov_rank` inside; the anchor guesses too.
* speculators (all three): see `protocol.contracts.drafters.block`; copies of the ends, perhaps a head of some tokens,
  which d2t names.

Our own key `clean_prefix` says how many known tokens a block may begin with, and our own file head_tokens.npy which
tokens are guessed at all; other programs ignore both.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
from msgspec import Meta

from draft_worker.drafters.block import BlockDrafter, BlockForm, BlockKind, Causal, MarkovKind, markov_head
from draft_worker.drafters.files import DrafterFolder, Quantization, parameters, save
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from draft_worker.short_head import keep_rows
from protocol.contracts.drafters.block import UNUSED, anchor_predicts, foreign, options
from protocol.messages.base import MAX_CONTEXT

_Size = Annotated[int, Meta(ge=1, le=1 << 20)]
_Layer = Annotated[int, Meta(ge=-1, lt=1024)]
_Layers = Annotated[tuple[_Layer, ...], Meta(min_length=1, max_length=32)]
_ENDS = ("embed_tokens", "lm_head")
_CONFIDENCE = "confidence_head"
_NAME = "a DFlash, DSpark or DFlash2 drafter"
_SLIDING = "sliding_attention"


class BlockCheckpoint(NamedTuple):
    """A drafter from its files."""

    kind: BlockKind
    network: BlockDrafter
    ends: TokenEnds | None
    """Its own copies of the target's embedding and head; None: the target's."""
    head_tokens: HeadTokens | None
    """Those of the columns of head and Markov head; None: column c is token c."""


def read_block(folder: Path) -> BlockCheckpoint:
    """Raises InputError for files that are missing, damaged or of another form."""
    found = DrafterFolder(folder, _NAME)
    raw = found.raw_config()
    form = _form(found, raw)
    tensors = found.tensors()
    quantization = found.decoded(raw, _Quantized).quantization
    named = found.head_tokens(tensors, form.vocabulary, ("lm_head.", "markov_head.markov_w2."))
    drafted, count = options(raw).get("draft_vocab_size"), form.vocabulary if named is None else len(named)
    if drafted not in (None, count):
        which = "lacks the tensor d2t" if named is None else f"its tensor d2t names {count}"
        raise found.wrong(f"it drafts {drafted} of {form.vocabulary} tokens by its config.json, and {which}")
    own = {name: values for name, values in tensors.items() if name.split(".")[0] in _ENDS}
    # Our trees rank by probability, so the confidence head that some have is not read.
    left_out = (*_ENDS, _CONFIDENCE, *UNUSED)
    tensors = {name: values for name, values in tensors.items() if name.split(".")[0] not in left_out}
    try:
        network = BlockDrafter(form)
        if form.markov and named is not None:
            network.markov_head = markov_head(form, len(named))
        found.fill(network, tensors, quantization)
        # Some ropes read their options when they are called.
        mx.eval(network.layers[0].self_attn.keys_values(mx.zeros((1, 1, form.width)), mx.zeros((1, 1), mx.int32)))
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise found.wrong(f"its config.json states a rotary embedding that is not known ({error})") from error
    head_tokens = read_head_tokens(folder, form.vocabulary) if named is None else None
    if form.markov and head_tokens is not None:
        keep_rows(network.markov_head.markov_w2, head_tokens)
    ends = _own_ends(found, form, own, quantization, count, head_tokens)
    if named is not None and ends is None:
        raise found.wrong("it names the tokens of a reduced head (d2t) and lacks the tensor lm_head.weight")
    return BlockCheckpoint(form.kind, network, ends, head_tokens if named is None else named)


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
    shared = kept | {
        "model_type": "qwen3",
        "hidden_size": form.width,
        "num_hidden_layers": form.layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_width,
        "intermediate_size": form.inner,
        "vocab_size": form.vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": form.norm_epsilon,
        "attention_bias": form.bias,
        "attention_dropout": 0.0,
        "rope_theta": form.rope_base,
        "rope_scaling": form.rope_scaling,
        "max_position_embeddings": form.positions,
        "layer_types": [_SLIDING if window else "full_attention" for window in form.windows or (None,) * form.layers],
        "use_sliding_window": bool(sliding),
        **({"sliding_window": sliding[0]} if sliding else {}),
        **({} if form.causal == "windows" else {"is_causal": form.causal == "all"}),
        "num_target_layers": form.target_layers,
        "block_size": form.block,
        "clean_prefix": form.clean_prefix,
    }
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


class _Quantized(msgspec.Struct):
    quantization: Quantization | None = None


class _Asked(msgspec.Struct):
    """What a drafter asks of its target."""

    target_layer_ids: _Layers
    mask_token_id: Annotated[int, Meta(ge=0)]


class _Config(msgspec.Struct, kw_only=True):
    """The fields of config.json that all formats share."""

    hidden_size: _Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=128)]
    num_attention_heads: Annotated[int, Meta(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    head_dim: Annotated[int, Meta(ge=2, le=4096)] | None = None
    intermediate_size: _Size
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    target_hidden_size: _Size | None = None
    num_target_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    attention_bias: bool = False
    rope_theta: Annotated[float, Meta(gt=0, lt=1e12)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_is_neox_style: bool | None = None
    is_neox_style: bool = True
    max_position_embeddings: Annotated[int, Meta(ge=2)] = MAX_CONTEXT
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: Annotated[int, Meta(ge=1)] | None = None
    use_swa: bool = False
    swa_window_size: Annotated[int, Meta(ge=1)] | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    dflash_query_causal: bool | None = None
    final_logit_softcapping: Annotated[float, Meta(ge=0)] | None = None
    block_size: Annotated[int, Meta(ge=2, le=64)]
    clean_prefix: Annotated[int, Meta(ge=1, le=64)] = 1
    markov_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    markov_head_type: MarkovKind = "vanilla"
    conv_kernel_size: Annotated[int, Meta(ge=0, le=64)] | None = None
    conv_group_size: _Size | None = None
    selector_rank: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    selector_top_k: Annotated[int, Meta(ge=0, le=1024)] | None = None
    input_embedding_scale: Annotated[float, Meta(gt=0)] | None = None
    output_multiplier: Annotated[float, Meta(gt=0)] | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def _form(found: DrafterFolder, raw: dict[str, Any]) -> BlockForm:
    stated = options(raw)
    if variant := foreign(stated):
        raise found.wrong(f"its config.json states {variant}, a variant that can't be run yet")
    asked = found.decoded(stated, _Asked)
    config = found.decoded(stated, _Config)
    _require_sound(found, asked, config)
    return BlockForm(
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        outputs=asked.target_layer_ids,
        output_width=config.target_hidden_size or config.hidden_size,
        target_layers=config.num_target_layers,
        block=config.block_size,
        mask_token=asked.mask_token_id,
        anchor_predicts=anchor_predicts(stated),
        clean_prefix=config.clean_prefix,
        markov=config.markov_head_type if config.markov_rank else None,
        rank=config.markov_rank or (config.selector_rank or 0 if config.selector_top_k else 0),
        choices=config.selector_top_k or 0,
        taps=config.conv_kernel_size or 0,
        tap_group=config.conv_group_size or 1,
        input_scale=config.input_embedding_scale or 1.0,
        logit_scale=config.output_multiplier or 1.0,
        norm_epsilon=config.rms_norm_eps,
        bias=config.attention_bias,
        rope_base=_rope_base(config),
        rope_scaling=_rope_scaling(config),
        rope_interleaved=not (config.is_neox_style if config.rope_is_neox_style is None else config.rope_is_neox_style),
        positions=min(config.max_position_embeddings, MAX_CONTEXT),
        windows=_windows(found, config),
        causal=_causal(config),
        soft_cap=config.final_logit_softcapping or None,
    )


def _require_sound(found: DrafterFolder, asked: _Asked, config: _Config) -> None:
    outputs, heads = asked.target_layer_ids, config.num_attention_heads
    if any(later <= earlier for earlier, later in pairwise(outputs)):
        raise found.wrong(f"its target_layer_ids {outputs} do not ascend")
    if -1 in outputs:
        raise found.wrong("it reads the target's embedding (target_layer_ids -1), which is not recorded")
    if config.num_target_layers is not None and outputs[-1] >= config.num_target_layers:
        raise found.wrong(f"it reads layer {outputs[-1]} of a target of {config.num_target_layers} layers")
    if heads % config.kv_heads or config.head_width < 2 or config.head_width % 2:
        raise found.wrong(f"{heads} heads of {config.head_width} numbers don't fit {config.kv_heads} KV heads")
    if asked.mask_token_id >= config.vocab_size:
        raise found.wrong(f"its mask token {asked.mask_token_id} is beyond its {config.vocab_size} tokens")
    if config.selector_top_k:
        if config.markov_rank or not config.selector_rank:
            raise found.wrong(
                "its config.json states a selector (selector_top_k) without a rank, or beside a Markov head"
            )
        if config.selector_top_k > config.vocab_size:
            raise found.wrong(f"its selector chooses among {config.selector_top_k} of {config.vocab_size} tokens")
    taps, group = config.conv_kernel_size or 0, config.conv_group_size or config.hidden_size + 1
    if taps and (taps > config.block_size or config.hidden_size % group):
        raise found.wrong(
            f"its conv_kernel_size {taps} and conv_group_size {config.conv_group_size} don't fit blocks of "
            f"{config.block_size} tokens and a width of {config.hidden_size:,}"
        )


def _rope_parameters(config: _Config) -> dict[str, Any] | None:
    """Some state them by kind of layer: all layers then rotate as the sliding ones (speculators: models/utils.py)."""
    stated = config.rope_parameters
    sliding = None if stated is None else stated.get(_SLIDING)
    return sliding if isinstance(sliding, dict) else stated


def _rope_base(config: _Config) -> float:
    """Transformers 5 writes it into rope_parameters."""
    stated = (_rope_parameters(config) or {}).get("rope_theta", config.rope_theta)
    return float(stated) if isinstance(stated, int | float) and stated > 0 else 10000.0


def _rope_scaling(config: _Config) -> dict[str, Any] | None:
    scaling = config.rope_scaling or _rope_parameters(config)
    kind = scaling and scaling.get("type", scaling.get("rope_type", "default"))
    return None if kind is None or kind == "default" else scaling


def _windows(found: DrafterFolder, config: _Config) -> tuple[int | None, ...]:
    """`use_swa` without sliding layers in `layer_types` is a window in all of them."""
    types = config.layer_types or ()
    window = config.swa_window_size or config.sliding_window
    if _SLIDING in types:
        if len(types) != config.num_hidden_layers or window is None:
            raise found.wrong("its layer_types fit neither its layers nor a sliding_window")
        return tuple(window if each == _SLIDING else None for each in types)
    if not config.use_swa:
        return ()
    if window is None:
        raise found.wrong("it has sliding windows (use_swa) of no size")
    return (window,) * config.num_hidden_layers


def _causal(config: _Config) -> Causal:
    """As vLLM and SGLang resolve it: what is stated holds for all layers; otherwise, the sliding ones of `layer_types`
    are causal."""
    for stated in (config.is_causal, config.causal, config.dflash_query_causal):
        if stated is not None:
            return "all" if stated else "none"
    return "none" if config.use_swa and _SLIDING not in (config.layer_types or ()) else "windows"


class _OwnEnds(nn.Module):
    """Copies of the target's embedding and head."""

    def __init__(self, form: BlockForm, columns: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(form.vocabulary, form.width)
        self.lm_head = nn.Linear(form.width, columns, bias=False)


def _own_ends(
    found: DrafterFolder,
    form: BlockForm,
    tensors: Mapping[str, mx.array],
    quantization: Quantization | None,
    columns: int,
    head_tokens: HeadTokens | None,
) -> TokenEnds | None:
    """None if the file does not have both. `columns`: of the head in the file; `head_tokens`: those that are kept."""
    if {name.split(".")[0] for name in tensors} != {*_ENDS}:
        return None
    ends = _OwnEnds(form, columns)
    found.fill(ends, tensors, quantization)
    return TokenEnds.of(ends.embed_tokens, ends.lm_head, head_tokens)
