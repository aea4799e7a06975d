"""Block drafters: DFlash, DSpark and DFlash2. The formats, all with the tensor names of `BlockDrafter`:

* z-lab (DFlash, DFlash2): `dflash_config {mask_token_id, target_layer_ids}`; no embedding, no head; a mask guesses
  itself.
* DeepSpec (DSpark, and DFlash as a DSpark of rank 0): `mask_token_id`, `target_layer_ids` and `markov_rank` at the top;
  copies of the target's embedding and head; the anchor guesses too.
* SpecForge (DSpark): z-lab's, with `projector_type: dspark` and `markov_rank` inside; the anchor guesses too.
* speculators (all three; vllm-project/speculators: models/dflash/config.py): the sizes of the layers are nested in
  `transformer_layer_config`, outputs are counted from 1 in `aux_hidden_state_layer_ids` (convert/dflash/converter.py),
  and windows are causal in a block unless `sliding_window_non_causal`. Copies of the ends, perhaps a head of some
  tokens, which d2t names.

All name the target's outputs, counted from 0 (hidden_states[id + 1]).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol.contracts.drafters.checkpoint import (
    SPECULATORS,
    Count,
    DecoderConfig,
    DrafterCheckpoint,
    LayerIds,
    Size,
)
from protocol.contracts.drafters.description import BlockForm, Causal, Drafter, MarkovKind
from protocol.json_values import is_list, is_object

_FOREIGN = ("attention_sink_bias", "add_swa_attention_sink_bias", "log_snr_conditioning")
"""Options of variants whose forward differs from those of the formats above."""
_PROJECTORS = (None, "dflash", "dspark")
_LAYER = "transformer_layer_config"
_SLIDING = "sliding_attention"


class _Config(DecoderConfig, kw_only=True):
    """All options on one level, as z-lab names them."""

    dflash_config: dict[str, Any] | None = None
    target_layer_ids: LayerIds
    mask_token_id: Annotated[int, Meta(ge=0)]
    num_hidden_layers: Annotated[int, Meta(ge=1, le=128)]
    target_hidden_size: Size | None = None
    num_target_layers: Count | None = None
    draft_vocab_size: Size | None = None
    attention_bias: bool = False
    rope_is_neox_style: bool | None = None
    is_neox_style: bool = True
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: Annotated[int, Meta(ge=1)] | None = None
    use_swa: bool = False
    swa_window_size: Annotated[int, Meta(ge=1)] | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    dflash_query_causal: bool | None = None
    sample_from_anchor: bool | None = None
    projector_type: str | None = None
    final_logit_softcapping: Annotated[float, Meta(ge=0)] = 0.0
    block_size: Annotated[int, Meta(ge=2, le=64)]
    markov_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    markov_head_type: MarkovKind = "vanilla"
    conv_kernel_size: Annotated[int, Meta(ge=0, le=64)] = 0
    conv_group_size: Size | None = None
    selector_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    selector_top_k: Annotated[int, Meta(ge=0, le=1024)] = 0
    input_embedding_scale: Annotated[float, Meta(gt=0)] = 1.0
    output_multiplier: Annotated[float, Meta(gt=0)] = 1.0

    @property
    def anchor_predicts(self) -> bool:
        """Whether the anchor's row guesses too: in DSpark, and in DeepSpec's DFlash."""
        if self.sample_from_anchor is not None:
            return self.sample_from_anchor
        return not self.dflash_config or self.projector_type == "dspark" or self.markov_rank > 0

    @property
    def interleaved(self) -> bool:
        return not (self.is_neox_style if self.rope_is_neox_style is None else self.rope_is_neox_style)

    @property
    def causal_layers(self) -> Causal:
        """As vLLM and SGLang resolve it: what is stated holds for all layers; otherwise, the sliding ones of
        `layer_types` are causal."""
        for stated in (self.is_causal, self.causal, self.dflash_query_causal):
            if stated is not None:
                return "all" if stated else "none"
        return "none" if self.use_swa and _SLIDING not in self.layer_types else "windows"


def is_block(config: Mapping[str, Any], architectures: tuple[str, ...]) -> bool:
    return "dflash_config" in config or any("DSpark" in name or "DFlash" in name for name in architectures)


def block(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    published, found = found.config, found.plainly_named._replace(config=_options(found.config))
    projector = found.config.get("projector_type")
    variant = next((name for name in _FOREIGN if found.config.get(name)), "")
    if variant or projector not in _PROJECTORS:
        variant = variant or f"projector_type {projector!r:.40}"
        raise found.wrong(f"its config.json states {variant}, a variant that can't be run yet")
    config = found.decoded(_Config)
    _require_sound(found, config)
    width, vocabulary = config.hidden_size, config.vocab_size
    outputs = found.recordable(config.target_layer_ids, config.num_target_layers)
    target_width = config.target_hidden_size or width
    found.require("fc.weight", (width, len(outputs) * target_width))
    found.need(*(f"layers.{layer}.self_attn.k_proj.weight" for layer in range(config.num_hidden_layers)))
    found.drafted(config.draft_vocab_size, width, vocabulary)
    form = BlockForm(
        **found.decoder(config, config.num_hidden_layers, outputs, target_width),
        target_layers=config.num_target_layers,
        block=config.block_size,
        mask_token=config.mask_token_id,
        anchor_predicts=config.anchor_predicts,
        markov=config.markov_head_type if config.markov_rank else None,
        rank=config.markov_rank or (config.selector_rank if config.selector_top_k else 0),
        choices=config.selector_top_k,
        taps=config.conv_kernel_size,
        tap_group=config.conv_group_size or 1,
        input_scale=config.input_embedding_scale,
        logit_scale=config.output_multiplier,
        bias=config.attention_bias,
        rope_interleaved=config.interleaved,
        windows=_windows(found, config),
        causal=config.causal_layers,
        soft_cap=config.final_logit_softcapping or None,
    )
    return Drafter(
        kind=form.kind,
        format=_format(published, form),
        form=form,
        width=target_width,
        stated_outputs=outputs,
        target_layers=config.num_target_layers,
        target_vocabulary=vocabulary,
        layers=config.num_hidden_layers,
    )


def _options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """All options of a config.json on one level, as z-lab names them. Those in `dflash_config` prevail."""
    if config.get(SPECULATORS) is None:
        inner = config.get("dflash_config")
        return {**config, **inner} if is_object(inner) else config
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


def _format(published: Mapping[str, Any], form: BlockForm) -> str:
    if published.get(SPECULATORS) is not None:
        return "speculators"
    if "dflash_config" not in published:
        return "DeepSpec"
    return "SpecForge" if form.markov else "z-lab"


def _require_sound(found: DrafterCheckpoint, config: _Config) -> None:
    if config.mask_token_id >= config.vocab_size:
        raise found.wrong(f"its mask token {config.mask_token_id} is beyond its {config.vocab_size} tokens")
    if config.selector_top_k:
        if config.markov_rank or not config.selector_rank:
            raise found.wrong(
                "its config.json states a selector (selector_top_k) without a rank, or beside a Markov head"
            )
        own = config.draft_vocab_size or config.vocab_size
        if config.selector_top_k > config.vocab_size or own != config.vocab_size:
            raise found.wrong(f"its selector chooses {config.selector_top_k} among {own} of {config.vocab_size} tokens")
    taps, group = config.conv_kernel_size, config.conv_group_size or config.hidden_size + 1
    if taps and (taps > config.block_size or config.hidden_size % group):
        raise found.wrong(
            f"its conv_kernel_size {taps} and conv_group_size {config.conv_group_size} don't fit blocks of "
            f"{config.block_size} tokens and a width of {config.hidden_size:,}"
        )


def _windows(found: DrafterCheckpoint, config: _Config) -> tuple[int | None, ...]:
    """`use_swa` without sliding layers in `layer_types` is a window in all of them."""
    types, window = config.layer_types, config.swa_window_size or config.sliding_window
    if _SLIDING in types:
        if len(types) != config.num_hidden_layers or window is None:
            raise found.wrong("its layer_types fit neither its layers nor a sliding_window")
        return tuple(window if each == _SLIDING else None for each in types)
    if not config.use_swa:
        return ()
    if window is None:
        raise found.wrong("it has sliding windows (use_swa) of no size")
    return (window,) * config.num_hidden_layers
