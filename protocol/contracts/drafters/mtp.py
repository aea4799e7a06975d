"""MTP heads: Qwen3-Next and Qwen3.5 (`mtp.*`), DeepSeek and GLM (`model.layers.L.*`).

They are part of the target's own checkpoint, or alone in a folder with its config.json. Conversions to MLX leave them
out.
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from protocol.contracts.drafters.checkpoint import Count, DrafterCheckpoint, Size
from protocol.contracts.drafters.description import FINAL, Drafter, MtpForm
from protocol.json_values import is_object

_QWEN_FC = re.compile(r"(?:model\.|language_model\.)*mtp\.fc\.weight")
_DEEPSEEK_FC = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.eh_proj\.weight")
QWEN, DEEPSEEK = _STATED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""The key of config.json with the number of heads, in the two published forms."""


class MtpFamily(NamedTuple):
    """Where an architecture keeps its heads."""

    number: str
    """QWEN or DEEPSEEK."""
    module: str
    """Of `mlx_lm.models`."""


FAMILIES: Mapping[str, MtpFamily] = MappingProxyType(
    {
        "qwen3_next": MtpFamily(QWEN, "qwen3_next"),
        "qwen3_5": MtpFamily(QWEN, "qwen3_5"),
        "qwen3_5_moe": MtpFamily(QWEN, "qwen3_5"),
        "deepseek_v3": MtpFamily(DEEPSEEK, "deepseek_v3"),
        "glm4_moe": MtpFamily(DEEPSEEK, "glm4_moe"),
    }
)
"""Architectures whose heads are run, by `model_type` of the checkpoint."""
_MOST = 3
_BODY = re.compile(r"(?:model\.|language_model\.)*layers\.0\.")


class _Text(msgspec.Struct):
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Count


def states_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the original checkpoint has such a head."""
    parts = [part for part in (config, config.get("text_config")) if is_object(part)]
    return any(type(part.get(name)) is int and part[name] > 0 for part in parts for name in _STATED)


def unknown(config: Mapping[str, Any]) -> str:
    """Why a head with this config.json can't be run, as half a sentence; empty if it can."""
    model, text = config.get("model_type"), config.get("text_config", config)
    if not isinstance(model, str) or model not in FAMILIES or not is_object(text):
        return f"its architecture is {model!r:.60}; known ones are {', '.join(FAMILIES)}"
    key = FAMILIES[model].number
    number = text.get(key, 1)
    if type(number) is not int or not 1 <= number <= _MOST:
        return f"its config.json states {key} = {number!r:.60}"
    return ""


def has_mtp(found: DrafterCheckpoint) -> bool:
    """Whether the tensors are there."""
    return any(pattern.fullmatch(name) for name in found.tensors for pattern in (_QWEN_FC, _DEEPSEEK_FC))


def stands_alone(found: DrafterCheckpoint) -> bool:
    """Whether the folder has the head and no target."""
    return not any(_BODY.match(name) for name in found.tensors)


def mtp(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together, or can't be run."""
    if reason := unknown(found.config):
        raise found.wrong(reason)
    stated = found.config.get("text_config", found.config)
    text = found.decoded(_Text, stated)
    joining, prefix, form = _joining(found)
    found.require(joining, (text.hidden_size, 2 * text.hidden_size))
    own = [name for name in found.tensors if name.startswith(prefix) and not name.endswith((".scales", ".biases"))]
    layers = {part.split(".")[1] for name in own if (part := name.removeprefix(prefix)).startswith("layers.")}
    return Drafter(
        kind="mtp",
        format=form,
        form=MtpForm(architecture=found.config["model_type"], config=stated),
        width=text.hidden_size,
        stated_outputs=(FINAL,),
        target_layers=text.num_hidden_layers,
        target_vocabulary=text.vocab_size,
        layers=len(layers) or 1,
        parameters=sum(math.prod(found.shape(name)) for name in own),
    )


def _joining(found: DrafterCheckpoint) -> tuple[str, str, str]:
    """The tensor that joins embedding and state, the beginning of the head's names, and whose format it is."""
    for name in sorted(found.tensors):
        if _QWEN_FC.fullmatch(name):
            return name, name.removesuffix("fc.weight"), "Qwen"
        if _DEEPSEEK_FC.fullmatch(name):
            return name, name.removesuffix("eh_proj.weight"), "DeepSeek"
    raise found.wrong(
        "it has no such tensors (conversions to MLX leave them out; the original checkpoint of the target has them)"
    )
