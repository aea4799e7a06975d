"""Block drafters: DFlash (z-lab), DSpark and DFlash of DeepSpec.

They name the target's outputs in `target_layer_ids` (z-lab inside `dflash_config`), counted from 0
(hidden_states[id + 1]).
"""

from typing import Any

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter

_MAX_BLOCK, _MAX_LAYERS = 64, 128


def block(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
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
    # A block of z-lab's guesses one token less: the anchor's own row is not used.
    anchored = rank > 0 or "num_anchors" in found.config or found.config.get("sample_from_anchor") is True
    return Drafter(
        kind="dspark" if rank else "dflash",
        format="z-lab" if "dflash_config" in found.config else "DeepSpec",
        width=target_width,
        count=len(outputs),
        stated_outputs=outputs,
        target_layers=found.number_or("num_target_layers", None),
        target_vocabulary=vocabulary,
        drafted=None if drafted == vocabulary else drafted,
        layers=layers,
        block=size if anchored else size - 1,
        parameters=found.parameters(),
        read=found.parameters(
            ("embed_tokens", "fc.", "markov_w1"), by_token=("lm_head", "markov_w2"), tokens=min(drafted, vocabulary)
        ),
        own_head=head,
    )


def _outputs(found: DrafterCheckpoint) -> tuple[int, ...]:
    holder = found.part("dflash_config") if "dflash_config" in found.config else found
    outputs = holder.numbers("target_layer_ids")
    if outputs is None:
        raise found.wrong("its config.json does not say which layers of the target it reads")
    return outputs


def is_block(config: dict[str, Any], architectures: tuple[str, ...]) -> bool:
    return "dflash_config" in config or any("DSpark" in name or "DFlash" in name for name in architectures)
