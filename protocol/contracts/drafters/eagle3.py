"""EAGLE-3 checkpoints: SafeAILab's (also SpecForge, AngelSlim), speculators' and DeepSpec's.

They number the layers that they read in three ways. SafeAILab's `eagle_config` names outputs, as SGLang reads it
(python/sglang/srt/models/llama_eagle3.py adds 1 for the next layer's input). `eagle_aux_hidden_state_layer_ids` beside
the other fields, which speculators writes and vLLM reads, names inputs, one more (speculators/models/utils.py:
[2, L / 2, L - 3]). DeepSpec's `target_layer_ids` names outputs (deepspec/modeling/dspark/common.py), -1 the embedding.
"""

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter
from protocol.errors import InputError

_IDS = "eagle_aux_hidden_state_layer_ids"
_DEFAULT_COUNT = 3


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
        raise found.wrong(f"it reads {count} outputs of the target and does not say which")
    layer = "midlayer" if found.has("midlayer.self_attn.q_proj.weight") else "layers.0"
    if _matrix(found, f"{layer}.self_attn.q_proj.weight")[1] != 2 * width:
        raise found.wrong(f"the queries of its first layer do not read {2 * width:,} numbers, embedding and state")
    found.need(f"{layer}.hidden_norm.weight", f"{layer}.input_layernorm.weight", "norm.weight")
    head = found.has("lm_head.weight")
    drafted = _drafted(found, vocabulary, width, head)
    layers = text.number_or("num_hidden_layers", 1) or 1
    if layers > 1:
        raise InputError(
            f"{found.folder} holds an EAGLE-3 drafter of {layers} layers, and only those of one layer can be run: "
            "choose another draft."
        )
    return Drafter(
        kind="eagle3",
        format="speculators" if nested else "DeepSpec" if "target_layer_ids" in found.config else "SafeAILab",
        width=target_width,
        count=count,
        stated_outputs=outputs,
        target_layers=found.number_or("num_target_layers", None),
        target_vocabulary=vocabulary,
        drafted=drafted,
        parameters=found.parameters(),
        read=found.parameters(("embed_tokens", "fc.")),
        own_head=head,
    )


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
        return None
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
