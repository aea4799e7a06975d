"""Tiny trained drafters with random weights, in the published formats, and the target that they belong to."""

import json
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from draft_worker.drafters.block import BlockDrafter
from draft_worker.drafters.token_ends import TokenEnds
from protocol.contracts.drafters.description import BlockForm
from tests.support.models.block_files import write_block
from tests.support.models.drafter_files import speculators_config
from tests.support.models.tiny_models import VOCABULARY, network, write_model
from tests.support.models.tokenizer_files import write_tokenizer

WIDTH = 32
"""Of the target of `tiny_models`."""
LAYERS = 2
SHORT_HEAD = np.array([token for token in range(VOCABULARY) if token % 3], np.int32)
"""The tokens of a head that has only some."""
_SELECTING: dict[str, Any] = {"taps": 2, "tap_group": 4, "choices": 9, "rank": 6, "windows": (6, 6), "causal": "none"}
_SCALED = {"taps": 3, "windows": (), "input_scale": 1.5, "logit_scale": 0.5, "soft_cap": 8.0}
_KINDS: dict[str, dict[str, Any]] = {
    "z-lab": {},
    "z-lab with windows": {"windows": (None, 5)},
    "z-lab with two-way windows": {"windows": (5, 5), "causal": "none"},
    "z-lab, causal": {"causal": "all"},
    "SpecForge": {"anchor_predicts": True, "markov": "vanilla", "rank": 6},
    "rank 0": {"anchor_predicts": True},
    **{kind: {"anchor_predicts": True, "markov": kind, "rank": 6} for kind in ("vanilla", "gated", "rnn")},
    "DFlash2": _SELECTING,
    "DFlash2, scaled": _SELECTING | _SCALED,
}
BLOCK_KINDS = tuple(_KINDS)

_Network = TypeVar("_Network", bound=nn.Module)

_FORM = BlockForm(
    width=WIDTH,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=8,
    inner=48,
    vocabulary=VOCABULARY,
    outputs=(0, 1),
    output_width=WIDTH,
    target_layers=LAYERS,
    block=4,
    mask_token=VOCABULARY - 2,
    anchor_predicts=False,
    positions=512,
)


def block_form(kind: str, **changes: Any) -> BlockForm:
    return msgspec.structs.replace(_FORM, **_KINDS[kind] | changes)


def block_network(form: BlockForm, seed: int = 0) -> BlockDrafter:
    mx.random.seed(seed)
    return loud(BlockDrafter(form))


def write_target(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write a target's folder; returns its mlx-lm model."""
    model = in_half(network("qwen3", seed, **changes))
    write_model(write_tokenizer(folder), model)
    return model


def ends_of(target: Any) -> TokenEnds:
    return TokenEnds.of(target.model.embed_tokens, target.lm_head)


def write_block_folder(folder: Path, kind: str, target: Any, seed: int = 0, **changes: Any) -> BlockForm:
    """Write a drafter of `kind`, one of BLOCK_KINDS, for a target of `write_target`."""
    form = block_form(kind, **changes)
    write_block(folder, block_network(form, seed), ends_of(target), vars(target.args))
    config = json.loads((folder / "config.json").read_text())
    if kind == "SpecForge":
        names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
        config["dflash_config"] = {"projector_type": "dspark"} | {name: config.pop(name) for name in names}
    if kind == "z-lab with two-way windows":
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": form.windows[1], "causal": False}
    (folder / "config.json").write_text(json.dumps(config))
    return form


def pack_as_speculators(folder: Path, target: Path, head: NDArray[np.int32] | None = None) -> Path:
    """Write the drafter in `folder` again as vllm-project/speculators saves it. `head`: the tokens of a reduced one."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    selects = "selector_top_k" in config.get("dflash_config", {})
    kind = "dspark" if config.get("markov_rank") else "dflash2" if selects else "dflash"
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    ends: Any = mx.load(str(target / "model.safetensors"))
    tensors |= {"embed_tokens.weight": ends["model.embed_tokens.weight"], "lm_head.weight": ends["lm_head.weight"]}
    if head is not None:
        for name in {"lm_head.weight", "markov_head.markov_w2.weight"} & tensors.keys():
            tensors[name] = tensors[name][mx.array(head)]
        tensors["d2t"] = mx.array(head - np.arange(len(head)), dtype=mx.int64)
        tensors["t2d"] = mx.array(np.isin(np.arange(config["vocab_size"]), head).tolist())
    mx.eval(tensors)
    drafted = config["vocab_size"] if head is None else len(head)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(speculators_config(kind, config, drafted)))
    return folder


def random_features(count: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def loud(network: _Network) -> _Network:
    """With weights large enough for every input to matter, norms that differ by element, numbers that fp16 holds."""
    network.update(
        tree_map(
            lambda values: values * 2.5 if values.ndim == 2 else values + 0.3 * mx.random.normal(values.shape),
            network.parameters(),
        )
    )
    return in_half(network)


def in_half(network: _Network) -> _Network:
    """Weights rounded to fp16, and fp32 again."""
    network.update(tree_map(lambda values: values.astype(mx.float16).astype(mx.float32), network.parameters()))
    mx.eval(network.parameters())
    return network
