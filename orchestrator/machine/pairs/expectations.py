"""What a recommended pair takes of this machine's memory, and how fast it would be. Prints nothing."""

import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from orchestrator.core.options import Options
from orchestrator.machine.memory import budget
from orchestrator.machine.memory.kv_form import KvSizes, kv_form
from orchestrator.machine.memory.kv_plan import kv_plan
from orchestrator.machine.models.checkpoints import cached
from orchestrator.machine.pairs.recommended_pairs import Model, Pair
from orchestrator.machine.profiles.device_profiles import DeviceProfile, DeviceTimes
from protocol.contracts.coreml.conversion import Choices
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint

_FP16_BYTES = 2
_LONG_CONTEXT = 1 << 17
"""Tokens, of a model whose own are not known."""
_TOKENS = 128
"""Of the prompt, and of the answer."""
_MAX_RATIO = 20.0
"""Of the weights to those of the calibrated model: beyond it the time of a forward is not proportional to them."""
_MAX_MILLISECONDS = 2000.0
"""Of a forward: much slower targets count as dead."""


class Forecast(NamedTuple):
    """Tokens a second at temperature 0."""

    plain: float
    adaptive: float


class Gains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many times as fast as plain decoding `adaptive` is, with the demo draft's acceptance at temperature 0.

    `orchestrator.lab.simulate.prediction.gains` simulates and writes it. Each axis rises.
    """

    draft: tuple[float, ...]
    """Time of the draft's step, in forwards of the target over one token."""
    wide: tuple[float, ...]
    """Time of the target's forward over 8 tokens, in those over one."""
    slow_down: tuple[float, ...]
    """Of a forward while the other device computes."""
    times: tuple[tuple[tuple[float, ...], ...], ...]
    """By draft, wide and slow_down."""

    def at(self, draft: float, wide: float, slow_down: float) -> float:
        """Linear between the points (in the logarithm of `draft`); the nearest value outside."""
        axes = ([math.log(share) for share in self.draft], self.wide, self.slow_down)
        return _between(self.times, axes, (math.log(draft), wide, slow_down))


@cache
def gains() -> Gains:
    """The shipped table."""
    return msgspec.json.decode((resources.files("orchestrator.machine.pairs") / "gains.json").read_bytes(), type=Gains)


def memory(pair: Pair, on_processor: bool, core_ml: bool = False) -> float:
    """Bytes that the pair needs, estimated. `core_ml`: while the draft is also loaded for the Neural Engine.

    Core ML has the weights in fp16, once for every loaded function (coremltools issue 2351). The draft is in MLX too,
    until a trial has shown which of the two is faster.
    """
    return _weights(pair, on_processor, core_ml) + budget.OVERHEAD


def fits(pair: Pair, on_processor: bool, available: int, core_ml: bool = False) -> bool:
    """`available`: bytes that a pipeline may use."""
    return budget.fits(_weights(pair, on_processor, core_ml), available)


def kept_tokens(pair: Pair, on_processor: bool, available: int) -> int | None:
    """Tokens of conversations that the pair keeps in `available` bytes, about; None if the sizes of the target's KV
    are not known, or the pair does not fit. A trained drafter has little KV, which does not count."""
    forms = {role: _kv_form(model) for role, model in (("target", pair.target), ("draft", pair.draft))}
    drafts = pair.draft.kind is None
    if forms["target"] is None or (drafts and forms["draft"] is None) or not fits(pair, on_processor, available):
        return None
    needs = budget.PipelineNeeds(
        models=(
            budget.ModelNeed(budget.TARGET, int(pair.target.weights(on_processor)), forms["target"], quantizes=True),
            budget.ModelNeed(budget.DRAFT, int(pair.draft.weights(on_processor)), forms["draft"] if drafts else None),
        ),
        context=_LONG_CONTEXT,
        on_processor=on_processor,
    )
    return kv_plan(needs, budget.MemorySettings(), available, concurrent=Options().concurrent).tokens or None


def _kv_form(model: Model) -> KvSizes | None:
    folder = cached(model.id)
    if folder is not None:
        return kv_form(ModelFolder(folder).config)
    return KvSizes(*model.kv) if model.kv else None


def _weights(pair: Pair, on_processor: bool, core_ml: bool) -> float:
    converts = core_ml and pair.draft.kind is None
    package = pair.draft.parameters * 1e9 * _FP16_BYTES * len(Choices().widths) if converts else 0.0
    return pair.target.weights(on_processor) + pair.draft.weights(on_processor) + package


def tokenizers(pair: Pair) -> tuple[bool, bool]:
    """Whether the tokenizers match, and whether both models' files were compared (else the listed names are).

    A trained drafter has its target's tokenizer, and no file of its own to compare.
    """
    if pair.draft.kind is not None:
        return True, False
    folders = cached(pair.target.id), cached(pair.draft.id)
    if None in folders:
        return pair.target.tokenizer == pair.draft.tokenizer, False
    target, draft = (vocabulary_fingerprint(folder) for folder in folders if folder is not None)
    return target == draft, True


def forecast(pair: Pair, profile: DeviceProfile, on_processor: bool) -> Forecast | None:
    """The speed for forward times in proportion to the weights: plain decoding's, and that times the shipped gain.

    None if the profile does not state the weights it was measured with, or if they are too different, and for a trained
    drafter, whose guesses are not like the demo draft's: `pair_plan` predicts one.
    """
    if pair.draft.kind is not None:
        return None
    factors = (
        in_proportion(profile.target, pair.target.read(on_processor)),
        in_proportion(profile.draft, pair.draft.read(on_processor)),
    )
    if factors[0] is None or factors[1] is None:
        return None
    target, draft = profile.target.pace(), profile.draft.pace()
    steps = (factors[0] * target.forward(1), factors[1] * draft.forward(1))
    seconds = factors[0] * sum(target.forward(1, _TOKENS - 1 + done) for done in range(_TOKENS))
    plain, wide = _TOKENS / seconds, target.forward(8) / target.forward(1)
    return Forecast(plain, plain * gains().at(steps[1] / steps[0], wide, profile.both_busy.factor))


def in_proportion(measured: DeviceTimes, read: float) -> float | None:
    """How many times as long as a measured model's the forwards of one take that reads so many bytes.

    None if the measured one's bytes are not known, if they are too different, or if forwards would be much too slow.
    """
    if measured.weights is None:
        return None
    factor = read / measured.weights
    slow = 1000 * factor * measured.pace().forward(1) > _MAX_MILLISECONDS
    return None if slow or not 1 / _MAX_RATIO <= factor <= _MAX_RATIO else factor


def _between(values: Any, axes: Sequence[Sequence[float]], point: Sequence[float]) -> float:
    """Linear interpolation in nested sequences, one axis a level."""
    if not axes:
        return values
    axis, at = axes[0], min(max(point[0], axes[0][0]), axes[0][-1])
    above = next(index for index in range(1, len(axis)) if at <= axis[index])
    share = (at - axis[above - 1]) / (axis[above] - axis[above - 1])
    low, high = (_between(values[index], axes[1:], point[1:]) for index in (above - 1, above))
    return low + share * (high - low)
