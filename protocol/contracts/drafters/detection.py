"""Finds out what kind of drafter a folder holds, from config.json and the tensors' names. Reads no tensor.

EAGLE-3 checkpoints are SafeAILab's (also SpecForge, AngelSlim), speculators' or DeepSpec's, which number the layers
that they read in three ways. SafeAILab's `eagle_config` names outputs, as SGLang reads it
(python/sglang/srt/models/llama_eagle3.py adds 1 for the next layer's input). `eagle_aux_hidden_state_layer_ids` beside
the other fields, which speculators writes and vLLM reads, names inputs, one more (speculators/models/utils.py:
[2, L / 2, L - 3]). DeepSpec's `target_layer_ids` names outputs (deepspec/modeling/dspark/common.py), -1 the embedding.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.contracts.drafters.block import SPECULATORS, block, block_kind, is_block, options
from protocol.contracts.drafters.checkpoint import DrafterCheckpoint, config_in
from protocol.contracts.drafters.description import NAMES, Drafter, DrafterKind
from protocol.contracts.drafters.early_exit import MODEL_TYPE as EXIT
from protocol.contracts.drafters.early_exit import early_exit
from protocol.contracts.drafters.mtp import has_mtp, mtp, stands_alone, states_mtp, unknown
from protocol.errors import InputError
from protocol.json_values import is_list

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


_READERS: dict[DrafterKind, Callable[[DrafterCheckpoint], Drafter]] = {
    "eagle3": eagle3,
    "dspark": block,
    "dflash": block,
    "dflash2": block,
    "mtp": mtp,
    "exit": early_exit,
}
_SPECULATORS: dict[str, DrafterKind] = {
    **{"eagle3": "eagle3", "mtp": "mtp"},
    **{"dflash": "dflash", "dspark": "dspark", "dflash2": "dflash2"},
}
"""By `speculators_model_type`."""
_PREFIXED: tuple[DrafterKind, ...] = ("eagle3", "dspark", "dflash", "dflash2")
"""Kinds whose tensors some programs name as parts of a `model`."""
_FOREIGN = ("PEagle", "ForCausalLMEagle", "EagleSpeculator", "Medusa", "Hydra", "MLPSpeculator", "Assistant")
"""Parts of the architectures' names of drafters that no engine runs."""


def read_drafter(folder: Path, *, with_own_head: bool = False) -> Drafter | None:
    """The trained drafter in `folder`; None for an ordinary language model.

    `with_own_head`: of a language model whose checkpoint has an MTP head, that head. Raises InputError for a folder
    that can't be read, for a drafter that is damaged, and for one of a kind that is not served.
    """
    config = config_in(folder)
    kind = _stated_kind(folder, config)
    if kind is not None:
        found = DrafterCheckpoint.read(folder, NAMES[kind], config)
        if kind in _PREFIXED:
            found = found.without_prefix("model.")
        return _READERS[kind](found)
    if not states_mtp(config):
        return None
    found = DrafterCheckpoint.read(folder, NAMES["mtp"], config)
    if with_own_head or (has_mtp(found) and stands_alone(found)):
        return mtp(found)
    return None


def has_own_head(folder: Path) -> bool:
    """Whether a language model's checkpoint has an MTP head that can be run.

    Raises InputError for a folder that can't be read.
    """
    config = config_in(folder)
    return states_mtp(config) and not unknown(config) and has_mtp(DrafterCheckpoint.read(folder, NAMES["mtp"], config))


def is_drafter(folder: Path) -> bool:
    """Whether the folder's config.json says that it is no language model by itself. Never raises."""
    try:
        config = config_in(folder)
        return _stated_kind(folder, config) is not None or read_drafter(folder) is not None
    except InputError:
        return False


def _stated_kind(folder: Path, config: dict[str, Any]) -> DrafterKind | None:
    """By what the config says of itself. Raises InputError for a kind that is not served."""
    architectures = _architectures(config)
    match config.get(SPECULATORS), config.get("model_type"):
        case str(kind), _:
            if kind not in _SPECULATORS:
                raise _foreign(folder, kind)
            return _SPECULATORS[kind]
        case _, str(kind) if kind == EXIT:
            return "exit"
        case _:
            pass
    for name in architectures:
        if "Eagle3" in name:
            return "eagle3"
        if any(part in name for part in _FOREIGN):
            raise _foreign(folder, name)
    if is_block(config, architectures):
        return block_kind(options(config))
    return "eagle3" if "draft_vocab_size" in config else None


def _architectures(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if is_list(names) else ()


def _foreign(folder: Path, kind: str) -> InputError:
    return InputError(
        f"{folder} holds a drafter of the kind {kind[:60]}, which no draft engine runs: choose one of EAGLE-3, MTP, "
        "DSpark or DFlash, or a smaller model of the target's family."
    )
