"""Converts a trained drafter beside its target: measures the target's features, builds, compares each function."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from draft_worker.coreml.conversion.build import OnReport, write
from draft_worker.coreml.conversion.convertible import Convertible
from draft_worker.coreml.conversion.trained import convertible_block, convertible_eagle3
from draft_worker.coreml.conversion.trained_drafters.agreement import Comparison, require_agreement
from draft_worker.coreml.conversion.trained_drafters.compare_block import block_comparison
from draft_worker.coreml.conversion.trained_drafters.compare_eagle3 import eagle3_comparison
from draft_worker.coreml.conversion.trained_drafters.target_features import TargetFeatures, target_features
from draft_worker.coreml.package import Package
from draft_worker.drafters.block_checkpoint import read_block
from draft_worker.drafters.block_forward import MlxBlockRunner
from draft_worker.drafters.eagle3_checkpoint import read_eagle3
from draft_worker.drafters.token_ends import drafter_ends
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
