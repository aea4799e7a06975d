"""EAGLE-3 drafters of three families, and P-EAGLE.

EAGLE-3 checkpoints are SafeAILab's (also SpecForge, AngelSlim), speculators' or DeepSpec's, which number the layers
that they read in three ways. SafeAILab's `eagle_config` names outputs, as SGLang reads it
(python/sglang/srt/models/llama_eagle3.py adds 1 for the next layer's input). `eagle_aux_hidden_state_layer_ids` beside
the other fields, which speculators writes and vLLM reads, names inputs, one more (speculators/models/utils.py:
[2, L / 2, L - 3]). DeepSpec's `target_layer_ids` names outputs (deepspec/modeling/dspark/common.py), -1 the embedding.
"""

from typing import Any

from protocol.contracts.drafters.block import SPECULATORS, UNUSED
from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter, DrafterKind
from protocol.json_values import is_list, is_object

_IDS = "eagle_aux_hidden_state_layer_ids"
_DEFAULT_COUNT = 3
_MAX_LAYERS = 64
_DEPTHS, _MAX_DEPTHS = 8, 64
"""Of a P-EAGLE: speculators' default, and the most."""


def eagle3(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    nested = "transformer_layer_config" in found.config
    text = found.part("transformer_layer_config") if nested else found
    width = text.number("hidden_size")
    target_width = found.number_or("target_hidden_size", width) or width
    vocabulary = text.number("vocab_size")
    outputs = _outputs(found)
    rows, columns = _matrix(found, "fc.weight")
    count = len(outputs) if outputs is not None else columns // target_width
    if rows != width or columns != count * target_width:
        raise found.wrong(
            f"its fc.weight has the shape {(rows, columns)}, and its config.json says {count} outputs of "
            f"{target_width:,} numbers for a width of {width:,}"
        )
    if outputs is None and count != _DEFAULT_COUNT:
        raise found.wrong(
            f"its tensor fc.weight of the shape {(rows, columns)} reads {count} outputs of the target, and its "
            "config.json does not say which"
        )
    layer = "midlayer" if found.has("midlayer.self_attn.q_proj.weight") else "layers.0"
    if _matrix(found, f"{layer}.self_attn.q_proj.weight")[1] != 2 * width:
        raise found.wrong(
            f"its tensor {layer}.self_attn.q_proj.weight does not read {2 * width:,} numbers, embedding and state"
        )
    found.need(f"{layer}.hidden_norm.weight", f"{layer}.input_layernorm.weight", "norm.weight")
    head = found.has("lm_head.weight")
    drafted = _drafted(found, vocabulary, width, head)
    layers = text.number_or("num_hidden_layers", 1) or 1
    if layers > _MAX_LAYERS:
        raise found.wrong(f"its config.json states {layers:,} layers, of {_MAX_LAYERS} at most")
    for number in range(1, layers):
        name = f"layers.{number}.self_attn.q_proj.weight"
        if _matrix(found, name)[1] != width:
            raise found.wrong(f"its tensor {name} does not read {width:,} numbers, which the layer before it gives")
    kind: DrafterKind = "eagle3"
    if found.config.get(SPECULATORS) == "peagle":
        kind = "peagle"
        found.require("mask_hidden", (1, 1, count * target_width))
        if (mask := found.number("mask_token_id", least=0)) >= vocabulary:
            raise found.wrong(f"its mask_token_id {mask} is beyond its {vocabulary:,} tokens")
    return Drafter(
        kind=kind,
        format="speculators" if nested else "DeepSpec" if "target_layer_ids" in found.config else "SafeAILab",
        width=target_width,
        count=count,
        stated_outputs=outputs,
        target_layers=found.number_or("num_target_layers", None),
        target_vocabulary=vocabulary,
        drafted=drafted,
        layers=layers,
        block=drafted_depths(found.config) if kind == "peagle" else 1,
        parameters=found.parameters(UNUSED),
        read=found.parameters((*UNUSED, "embed_tokens", "fc.")),
        own_head=head,
    )


def drafted_depths(config: dict[str, Any]) -> int:
    """Tokens that one forward of a P-EAGLE guesses, as speculators states them."""
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if is_object(inner) else None
    for method in methods if is_list(methods) else ():
        depths = method.get("speculative_tokens") if is_object(method) else None
        if type(depths) is int and 1 <= depths <= _MAX_DEPTHS:
            return depths
    return _DEPTHS


def _outputs(found: DrafterCheckpoint) -> tuple[int, ...] | None:
    if "target_layer_ids" in found.config:
        return found.numbers("target_layer_ids")
    if found.config.get(_IDS) is not None:
        return shifted(found, _IDS)
    return found.part("eagle_config").numbers(_IDS) if found.config.get("eagle_config") is not None else None


def shifted(found: DrafterCheckpoint, name: str) -> tuple[int, ...]:
    """Outputs from numbers that count the embedding as 0, which is none of the outputs that a target records."""
    numbers = found.numbers(name)
    assert numbers is not None
    if numbers[0] == 0:
        raise found.wrong("it reads the target's embedding as a state, which no target records")
    return tuple(number - 1 for number in numbers)


def _drafted(found: DrafterCheckpoint, vocabulary: int, width: int, head: bool) -> int | None:
    """Tokens of a reduced head, which a table d2t maps to the target's."""
    drafted = found.number_or("draft_vocab_size", vocabulary) or vocabulary
    if drafted > vocabulary:
        raise found.wrong(f"its config.json says that it drafts {drafted:,} of {vocabulary:,} tokens")
    if head:
        found.require("lm_head.weight", (drafted, width))
    if drafted == vocabulary:
        return None if head else found.head_tokens()
    if not head:
        raise found.wrong(f"it drafts {drafted:,} of {vocabulary:,} tokens and has no head of its own")
    found.require("d2t", (drafted,))
    return drafted


def _matrix(found: DrafterCheckpoint, name: str) -> tuple[int, int]:
    match found.shape(name):
        case (rows, columns):
            return rows, columns
        case shape:
            raise found.wrong(f"its tensor {name} has the shape {shape} instead of two sizes")
