"""Converts a trained drafter beside its target: measures the target's features, builds, compares each function.

EAGLE-3, DFlash, DSpark and DFlash2 become models to be converted. Knows no graph.

The executor stands for the device: what is compared is the graph and its rounding to fp16. The features are recorded
over a text, which also tells how large they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_tokenizer
from msgspec.structs import replace

from draft_worker.conditioned.runner import Wave
from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.conditioning import Conditioning
from draft_worker.coreml.conversion.build import OnReport, write
from draft_worker.coreml.conversion.convertible import Convertible
from draft_worker.coreml.conversion.layers import Structure
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import DecoderShape, Layer, Package
from draft_worker.coreml.rotation import pair_order
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.block_runner import PackageBlockRunner, PackageContext
from draft_worker.coreml.runtime.conditioned_runner import PackageRunner
from draft_worker.drafters.block import BlockCheckpoint, BlockDrafter, read_block
from draft_worker.drafters.block_forward import Block, BlockKv, BlockRows, MlxBlockRunner
from draft_worker.drafters.eagle3 import Eagle3, borrow_ends, read_eagle3
from draft_worker.drafters.token_ends import TokenEnds, drafter_ends, load_target
from protocol.contracts.coreml.conversion import Choices, WeightKind
from protocol.contracts.drafters.description import BlockForm, DecoderForm, Drafter
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from protocol.inference.device import compute_on_processor
from protocol.inference.stored_model import ready_for_processor
from protocol.inference.tap import proved_tap
from protocol.messages.features import FeatureForm

_LIMITS: Mapping[WeightKind, float] = {"fp16": 0.05, "int8": 0.25, "4bit": 1.0}
"""Largest deviation that rounding explains, of activations and of weights in fewer bits. Unrelated results have 1.4."""


class ComparedResults(NamedTuple):
    """Results of a function of the package, and of the drafter in MLX."""

    function: str
    got: Array
    expected: Array

    @property
    def deviation(self) -> float:
        """Root mean square of the differences, in standard deviations of the expected results."""
        difference = self.got.astype(np.float64) - self.expected
        deviation = np.sqrt(np.mean(np.square(difference))) / max(float(np.std(self.expected)), 1e-12)
        return float(deviation) if np.isfinite(deviation) else np.inf


Comparison: TypeAlias = Callable[[Converted], Iterator[ComparedResults]]


def require_agreement(folder: Path, drafter: Path, compare: Comparison) -> None:
    """Raises InputError if a function of the package in `folder` does not compute what `drafter` does."""
    converted = Converted.open(folder)
    limit = _LIMITS[converted.package.weights]
    for pair in compare(converted):
        if not pair.deviation <= limit:
            raise InputError(
                f"The package made of {drafter} was discarded: its function {pair.function} deviates from the drafter "
                f"by {pair.deviation:.2g} standard deviations, and {limit} is the most that rounding to "
                f"{converted.package.weights} explains. Use the drafter as it is, without Core ML."
            )


_MOST = 96
"""Tokens of the text."""
_TEXT = (
    "The largest numbers in the states of a language model stand at its first token, at line breaks and at full stops. "
    "They are hundreds of times larger than the others, and they are the same for every text.\n\n"
    "def largest(states):\n    return max(abs(number) for row in states for number in row)\n\n"
    "1. How tall is Mount Everest?\nIt is 8,849 metres tall; “Chomolungma” is its Tibetan name.\n"
    "2. Wie heißt das auf Deutsch?\nDas ist der höchste Berg der Erde.\n"
)


class TargetFeatures(NamedTuple):
    tokens: list[int]
    rows: Single
    """(tokens, outputs * width): behind each token."""

    @property
    def largest(self) -> float:
        return float(np.abs(self.rows).max())


def target_features(folder: Path, form: FeatureForm) -> TargetFeatures:
    """What the target in `folder` leaves of a text for a drafter of this form. Raises InputError if it can't be had."""
    network = load_target(folder)[0]
    try:
        tokens: list[int] = list(load_tokenizer(folder).encode(_TEXT))[:_MOST]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"The tokenizer in {folder} can't be loaded ({str(error)[:200]}): download it again."
        ) from error
    ready_for_processor(network)
    tap = proved_tap(network)
    lack = "its hidden states can't be recorded" if tap is None else tap.taps.lack(form)
    if tap is None or lack:
        raise InputError(f"The target in {folder} does not fit the drafter ({lack}): pass the drafter's own target.")
    tap.record(form.outputs)
    mx.eval(network(mx.array([tokens]), cache=make_prompt_cache(network)))
    recorded = tap.take()
    assert recorded is not None, "every forward is recorded"
    rows = recorded.numbers
    if not np.isfinite(rows).all():
        raise InputError(f"The states of the target in {folder} are not finite: download it again.")
    return TargetFeatures(tokens, rows)


_BEHIND = 8
"""Blocks begin at so many of the last tokens."""


def block_comparison(mlx: MlxBlockRunner, features: TargetFeatures) -> Comparison:
    def compare(converted: Converted) -> Iterator[ComparedResults]:
        package = PackageBlockRunner(converted, ExecutorRuntime(converted))
        conditioning = converted.package.conditioning
        assert conditioning is not None
        # The tokens leave room for the last block.
        tokens = features.tokens[: converted.package.context - mlx.form.masks]
        known = len(tokens) - _BEHIND
        contexts = [mlx.open(), package.open()]
        for context in contexts:
            context.feed(0, features.rows[:known])
            context.read_all()
        ours, theirs = (context.store for context in contexts)
        assert isinstance(ours, BlockKv)
        assert isinstance(theirs, PackageContext)
        yield ComparedResults(conditioning.function, theirs.kv[:, :, :known], _stacked(ours))
        blocks = [Block([tokens[position]], position) for position in range(known, len(tokens))]
        expected = mlx.forward([(contexts[0], blocks)])[0]
        for width in converted.package.widths:
            # As many blocks as fill this function, and no wider one.
            count = min(len(blocks), width // (1 + mlx.form.masks))
            found = package.forward([(contexts[1], blocks[:count])])[0]
            yield ComparedResults(converted.package.function(width), _logits(found), _logits(expected[:count]))
            if conditioning.state != "none":
                yield ComparedResults(converted.package.function(width), _states(found), _states(expected[:count]))

    return compare


def _stacked(kv: BlockKv) -> Array:
    """In the order of a package's cache."""
    layers = kv.keys_values()
    return np.concatenate([np.array(keys) for keys, _ in layers] + [np.array(values) for _, values in layers])


def _logits(rows: Sequence[BlockRows]) -> Array:
    return np.stack([np.array(each.logits) for each in rows])


def _states(rows: Sequence[BlockRows]) -> Array:
    """Those that the host reads: a selector's projections of them."""
    return np.stack([np.array(each.states) if each.choices is None else each.choices.latents for each in rows])


def eagle3_comparison(network: Eagle3, features: TargetFeatures) -> Comparison:
    def compare(converted: Converted) -> Iterator[ComparedResults]:
        conditioning = converted.package.conditioning
        assert conditioning is not None
        runner = PackageRunner(converted, ExecutorRuntime(converted))
        most = min(len(features.tokens) - 1, runner.open().most_committed)
        # The row of a token reads the feature of the token before it.
        tokens, rows = features.tokens[1 : most + 1], features.rows[:most]
        fused = network.fuse(mx.array(rows))
        given = runner.fuse(rows)
        yield ComparedResults(conditioning.function, given, np.array(fused))
        states = network(mx.array([tokens]), fused[None])
        logits = network.logits(states)[0]
        for width in converted.package.widths:
            sequence, found = runner.open(), []
            for begin in range(0, most, width):
                part = slice(begin, begin + width)
                found.append(runner.evaluate(Wave(sequence, tokens[part], [], begin, ()), given[part]))
            left = mx.concatenate(found)
            sequence.close()
            function = converted.package.function(width)
            yield ComparedResults(function, runner.states(left), np.array(states[0]))
            yield ComparedResults(function, np.array(runner.logits(left)), np.array(logits))

    return compare


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
    if not drafter.converts:
        raise InputError(f"{source} holds {drafter.name}, which has no form for Core ML: use it as it is.")
    if target is None:
        raise InputError(f"{source} holds {drafter.name}, which reads its target's states: pass --target MODEL.")
    shape = drafter.fitting(source, target)
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
    network = read_eagle3(source, target)
    if network.form.layers > 1:
        raise InputError(f"The drafter in {source} has {network.form.layers} layers: use it as it is, without Core ML.")
    model = convertible_eagle3(source, network, borrow_ends(network, source, target), features.largest)
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
    order = pair_order(form.head_width, _rotated(folder, network.midlayer.self_attn.rope, form.head_width), False)
    structure = Structure(_shape(form, "eagle3", [Layer()]), order, [network.midlayer.self_attn.rope], None)
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
    structure = Structure(_block_shape(folder, form), order, [rope], None)
    arrays = dict(_block_arrays(network, ends, conditioning))
    return Convertible(folder, structure, arrays, drafter.head_tokens, conditioning)


def _shape(form: DecoderForm, architecture: str, layers: Sequence[Layer]) -> DecoderShape:
    return DecoderShape(
        architecture=architecture,
        layers=tuple(layers),
        hidden=form.width,
        heads=form.heads,
        key_heads=form.kv_heads,
        head=form.head_width,
        vocabulary=form.vocabulary,
        positions=form.positions,
        epsilon=form.norm_epsilon,
        score_scale=form.head_width**-0.5,
    )


def _block_shape(folder: Path, form: BlockForm) -> DecoderShape:
    windows = {window for window in form.windows if window is not None}
    if len(windows) > 1:
        raise InputError(f"The drafter in {folder} has layers of different windows: use it as it is, without Core ML.")
    layers = [Layer(sliding=window is not None) for window in form.windows or (None,) * form.layers]
    return replace(
        _shape(form, form.kind, layers),
        window=next(iter(windows), None),
        taps=form.taps,
        embedding_scale=form.input_scale,
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
        else:
            yield name, array
    yield from _ends(ends, network.form.logit_scale)


def _ends(ends: TokenEnds, scale: float = 1.0) -> Iterator[tuple[str, mx.array]]:
    """`scale`: of the logits."""
    yield "model.embed_tokens.weight", ends.embed(mx.arange(ends.vocabulary))
    # A head is linear: its weight is what it makes of unit vectors.
    yield "lm_head.weight", ends.head(mx.eye(ends.width)).T * scale


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
