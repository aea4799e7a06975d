"""MTP heads: Qwen3-Next and Qwen3.5 (`mtp.*`), DeepSeek and GLM (`model.layers.L.*`), speculators (`mtp_layers.*`).

They are part of the target's own checkpoint, or alone in a folder with its config.json. Conversions to MLX leave them
out.
"""

import re
from typing import Any

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import FINAL, Drafter

_QWEN = re.compile(r"(?:model\.|language_model\.)*mtp\.fc\.weight")
_DEEPSEEK = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.eh_proj\.weight")
_SPECULATORS = re.compile(r"mtp_layers\.0\.(?:input_proj|eh_proj)\.weight")
_STATED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_BODY = re.compile(r"(?:model\.|language_model\.)*layers\.0\.")


def states_mtp(config: dict[str, Any]) -> bool:
    """Whether a config.json says that the original checkpoint has such a head."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return any(type(part.get(name)) is int and part[name] > 0 for part in parts for name in _STATED)


def has_mtp(found: DrafterCheckpoint) -> bool:
    """Whether the tensors are there."""
    return any(pattern.fullmatch(name) for name in found.tensors for pattern in (_QWEN, _DEEPSEEK, _SPECULATORS))


def stands_alone(found: DrafterCheckpoint) -> bool:
    """Whether the folder has the head and no target."""
    return not any(_BODY.match(name) for name in found.tensors)


def mtp(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    text = _text(found)
    width, vocabulary = text.number("hidden_size"), text.number("vocab_size")
    joining, prefix, form = _joining(found)
    found.require(joining, (width, 2 * width))
    own = _alone(found, prefix)
    layers = {part for name in own.tensors if (part := name.removeprefix(prefix)).startswith("layers.")}
    return Drafter(
        kind="mtp",
        format=form,
        width=width,
        count=1,
        stated_outputs=(FINAL,),
        target_layers=text.number_or("num_hidden_layers", None),
        target_vocabulary=vocabulary,
        layers=len({name.split(".")[1] for name in layers}) or 1,
        parameters=own.parameters(),
        read=own.parameters(("embed_tokens", "shared_head.head")),
    )


def _text(found: DrafterCheckpoint) -> DrafterCheckpoint:
    nested = next((name for name in ("text_config", "transformer_layer_config") if name in found.config), None)
    return found if nested is None else found.part(nested)


def _joining(found: DrafterCheckpoint) -> tuple[str, str, str]:
    """The tensor that joins embedding and state, the beginning of the head's names, and whose format it is."""
    for name in sorted(found.tensors):
        if _QWEN.fullmatch(name):
            return name, name.removesuffix("fc.weight"), "Qwen"
        if _DEEPSEEK.fullmatch(name):
            return name, name.removesuffix("eh_proj.weight"), "DeepSeek"
        if _SPECULATORS.fullmatch(name):
            return name, "mtp_layers.", "speculators"
    raise found.wrong(
        "it has no such tensors (conversions to MLX leave them out; the original checkpoint of the target has them)"
    )


def _alone(found: DrafterCheckpoint, prefix: str) -> DrafterCheckpoint:
    tensors = {name: tensor for name, tensor in found.tensors.items() if name.startswith(prefix)}
    return DrafterCheckpoint(found.folder, found.name, found.config, tensors)
