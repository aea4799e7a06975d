"""Converts a trained drafter beside its target: measures the target's features, builds, compares each function.

EAGLE-3, DFlash and DSpark become models to be converted. Knows no graph.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from draft_worker.coreml.conditioning import Conditioning
from draft_worker.coreml.conversion.agreement import (
    Comparison,
    TargetFeatures,
    block_comparison,
    eagle3_comparison,
    require_agreement,
    target_features,
)
from draft_worker.coreml.conversion.build import OnReport, write
from draft_worker.coreml.conversion.convertible import Convertible
from draft_worker.coreml.conversion.layers import Structure
from draft_worker.coreml.package import DecoderShape, Layer, Package
from draft_worker.coreml.rotation import pair_order
from draft_worker.drafters.block import BlockDrafter
from draft_worker.drafters.block_checkpoint import BlockCheckpoint, read_block
from draft_worker.drafters.block_form import BlockForm
from draft_worker.drafters.block_forward import MlxBlockRunner
from draft_worker.drafters.eagle3 import Eagle3, Eagle3Form
from draft_worker.drafters.eagle3_checkpoint import read_eagle3
from draft_worker.drafters.token_ends import TokenEnds, drafter_ends
from protocol.contracts.coreml.conversion import Choices
from protocol.contracts.drafters.description import Drafter
from protocol.contracts.drafters.target_shape import target_shape
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from protocol.inference.device import compute_on_processor
from protocol.messages.features import FeatureForm


class _Source(NamedTuple):
    model: Convertible
    compare: Comparison


def convert_drafter(
    drafter: Drafter,
    source: Path,
    target: Path | None,
    destination: Path,
    choices: Choices,
    report: OnReport = lambda _: None,
) -> Package:
    """Like `build.convert`, for what `source` was found to be. Raises InputError for a kind without a form for Core ML,
    without a target, and for a target that the drafter was not made for."""
    if drafter.kind not in ("eagle3", "dspark", "dflash"):
        raise InputError(f"{source} holds {drafter.name}, which has no form for Core ML: use it as it is.")
    if target is None:
        raise InputError(f"{source} holds {drafter.name}, which reads its target's states: pass --target MODEL.")
    shape = target_shape(target)
    if misfit := drafter.misfit(shape):
        raise InputError(f"{source} does not fit the target {target}: {misfit}. Pass the drafter's own target.")
    features = target_features(target, FeatureForm(drafter.outputs(shape), drafter.width))
    # The drafter's own elements must not matter for the comparison, and a processor computes in fp32.
    compute_on_processor()
    found = (_eagle3 if drafter.kind == "eagle3" else _block)(source, target, features)
    return write(
        found.model,
        destination,
        choices,
        tokenizer_fingerprint(target),
        report,
        tokenizer_folder=target,
        prove=partial(require_agreement, drafter=source, compare=found.compare),
    )


def _eagle3(source: Path, target: Path, features: TargetFeatures) -> _Source:
    network = read_eagle3(source, target_shape(target).layers)
    form = network.form
    ends = None
    if not (form.own_embedding and form.own_head):
        ends = drafter_ends(source, None, target, form.hidden_size, form.vocabulary)
        network.borrow(ends.embed, ends.head)
    model = convertible_eagle3(source, network, ends, features.largest)
    return _Source(model, eagle3_comparison(network, features))


def _block(source: Path, target: Path, features: TargetFeatures) -> _Source:
    drafter = read_block(source)
    form = drafter.network.form
    head_tokens = drafter.head_tokens
    ends = drafter_ends(source, drafter.ends, target, form.width, form.vocabulary, head_tokens=head_tokens)
    model = convertible_block(source, drafter, ends, features.largest)
    return _Source(model, block_comparison(MlxBlockRunner(drafter.network, ends, head_tokens), features))


_ROOM = 8.0
"""Features of other texts may be so many times larger than those that were measured."""
_LARGEST = 65_504.0
"""fp16's largest number."""


def feature_scale(largest: float) -> float:
    """The power of two, 1 or less, that keeps features of `largest` within fp16, with room for larger ones."""
    return float(2.0 ** min(0, np.floor(np.log2(_LARGEST / _ROOM / max(largest, 1.0)))))


def convertible_eagle3(folder: Path, network: Eagle3, ends: TokenEnds | None, largest: float) -> Convertible:
    """`ends`: the target's, where the drafter has none of its own. `largest`: magnitude of the features,
    as measured on the target. Raises InputError for what Core ML's form of the network can't express."""
    form = network.form
    conditioning = Conditioning(eagle3=form, largest=largest, scale=feature_scale(largest))
    order = pair_order(form.head_dim, _rotated(folder, network.midlayer.self_attn.rope, form.head_dim), False)
    structure = Structure(_eagle3_shape(form), order, [network.midlayer.self_attn.rope], None)
    arrays = dict(_eagle3_arrays(_parameters(network), conditioning))
    if ends is not None:
        arrays = dict(_ends(ends)) | arrays
    return Convertible(folder, structure, arrays, network.head_tokens, conditioning)


def convertible_block(folder: Path, drafter: BlockCheckpoint, ends: TokenEnds, largest: float) -> Convertible:
    """`ends`: the drafter's own or its target's. For the rest see `convertible_eagle3`."""
    network = drafter.network
    form = network.form
    conditioning = Conditioning(block=form, largest=largest, scale=feature_scale(largest))
    rope = network.layers[0].self_attn._rope
    order = pair_order(form.head_width, _rotated(folder, rope, form.head_width), form.rope_interleaved)
    structure = Structure(_block_shape(folder, drafter.kind, form), order, [rope], None)
    arrays = dict(_block_arrays(network, ends, conditioning))
    return Convertible(folder, structure, arrays, drafter.head_tokens, conditioning)


def _eagle3_shape(form: Eagle3Form) -> DecoderShape:
    return DecoderShape(
        architecture="eagle3",
        layers=(Layer(),),
        hidden=form.hidden_size,
        heads=form.heads,
        key_heads=form.kv_heads,
        head=form.head_dim,
        vocabulary=form.vocabulary,
        positions=form.context,
        epsilon=form.rms_norm_eps,
        score_scale=form.head_dim**-0.5,
    )


def _block_shape(folder: Path, kind: str, form: BlockForm) -> DecoderShape:
    windows = {window for window in form.windows if window is not None}
    if len(windows) > 1:
        raise InputError(f"The drafter in {folder} has layers of different windows: use it as it is, without Core ML.")
    return DecoderShape(
        architecture=kind,
        layers=tuple(Layer(sliding=window is not None) for window in form.windows or (None,) * form.layers),
        hidden=form.width,
        heads=form.heads,
        key_heads=form.kv_heads,
        head=form.head_width,
        vocabulary=form.vocabulary,
        positions=form.positions,
        epsilon=form.norm_epsilon,
        score_scale=form.head_width**-0.5,
        window=next(iter(windows), None),
        logit_cap=form.soft_cap,
    )


def _eagle3_arrays(parameters: dict[str, mx.array], conditioning: Conditioning) -> Iterator[tuple[str, mx.array]]:
    """By Llama's names; norms before fc are the host's."""
    for name, array in parameters.items():
        top = name.split(".")[0]
        if top == "midlayer":
            yield name.replace("midlayer", "model.layers.0", 1), array
        elif top in ("norm", "embed_tokens"):
            yield f"model.{name}", array
        elif top == "fc":
            yield from _divided_fc(name, array, conditioning)
        else:
            yield name, array


def _block_arrays(network: BlockDrafter, ends: TokenEnds, conditioning: Conditioning) -> Iterator[tuple[str, mx.array]]:
    for name, array in _parameters(network).items():
        top = name.split(".")[0]
        if top in ("layers", "norm"):
            yield f"model.{name}", array
        elif top == "fc":
            yield from _divided_fc(name, array, conditioning)
        elif top != "confidence_head":
            yield name, array
    yield from _ends(ends)


def _ends(ends: TokenEnds) -> Iterator[tuple[str, mx.array]]:
    yield "model.embed_tokens.weight", ends.embed(mx.arange(ends.vocabulary))
    # A head is linear: its weight is what it makes of unit vectors.
    yield "lm_head.weight", ends.head(mx.eye(ends.width)).T


def _divided_fc(name: str, array: mx.array, conditioning: Conditioning) -> Iterator[tuple[str, mx.array]]:
    """The columns of each of the package's inputs, over the scale of the inputs; the first part has the bias."""
    if name == "fc.bias":
        yield "fc.0.bias", array
        return
    begin = 0
    for index, columns in enumerate(conditioning.parts):
        yield f"fc.{index}.weight", array[:, begin : begin + columns] / conditioning.scale
        begin += columns


def _parameters(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(dequantize_model(network).parameters()))


def _rotated(folder: Path, rope: object, head: int) -> int:
    """How many features of a head the rope rotates."""
    rotated = int(getattr(rope, "dims", None) or getattr(rope, "dim", head))
    if rotated % 2:
        raise InputError(f"The drafter in {folder} rotates an odd number of features: use it without Core ML.")
    return rotated
