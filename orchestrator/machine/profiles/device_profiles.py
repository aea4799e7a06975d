"""Device profiles: forward times of a pair of models on a device, in TOML, with sources. Knows no processes.

Profiles of Macs are derived from chips, models and published speeds (`apple_silicon.toml`).

T(1), a forward of one token behind an empty context, is 1 / tokens_per_second less the context's KV. A forward of W
tokens takes T(W) = T(1) + (r(W) - 1) weights / bandwidth: the matrix products, which read all weights at the full
bandwidth, take r(W) times as long (`kernels`); the rest (launches, norms, the host) does not grow.
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from protocol.bounded_files import read_bounded
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.errors import InputError
from protocol.messages.base import Role
from protocol.paths import cache_folder
from protocol.worker.pacing import DevicePace, StepShape

Positive = Annotated[float, Meta(gt=0.0)]
Count = Annotated[int, Meta(ge=1)]
_FACTS = resources.files("orchestrator.machine.profiles") / "apple_silicon.toml"
_VECTOR_QUERIES, _VECTOR_ROWS = 8, 32
"""Most queries, and most queries times heads a key-value head, of MLX's attention kernel for few queries
(mlx/backend/metal/scaled_dot_product_attention.cpp, use_fallback)."""
_NEURAL_ENGINE_SECONDS = 0.0073 / 0.494
"""A step of a draft of a billion parameters on the Neural Engine: 137 tokens/s for 0.494 on an M4."""
_LAUNCHES = 0.002
"""Seconds of a draft's step on the GPU beside reading its weights. What others measured leaves 2.9 ms (M4, 175 tokens/s
for 0.494 billion), 1.2 ms (M4 Pro, 284 for 0.6 in 8 bits, vllm-mlx issue 531), 2.2 ms (M3 Ultra, 388 for 0.6)."""
_SEQUENCE_SECONDS = 20e-6
"""Of another sequence's attention in one layer."""


class _Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    widths: tuple[tuple[int, Positive], ...]
    """Rows, and the time relative to one row's."""


class _Chip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bandwidth: Positive
    kernel: str
    teraflops: Positive
    overlap: Annotated[float, Meta(ge=1.0)]


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parameters: Positive
    bits: Positive
    layers: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    block: Count = 1

    @property
    def weights(self) -> int:
        """Bytes."""
        return round(self.parameters * 1e9 * self.bits / 8)

    @property
    def kv_bytes(self) -> int:
        """Of one token: keys and values of 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def vector_queries(self) -> int:
        return min(_VECTOR_QUERIES, _VECTOR_ROWS * self.kv_heads // self.heads)


class _PlainSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens_per_second: Positive
    source: str
    context: Annotated[int, Meta(ge=0)] = 0


class _Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chip: str
    target: str
    draft: str
    plain: _PlainSpeed


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernels: dict[str, _Kernel]
    chips: dict[str, _Chip]
    models: dict[str, _Model]
    machines: dict[str, _Machine]


@cache
def _facts() -> _Facts:
    return msgspec.convert(tomllib.loads(_FACTS.read_text()), _Facts)


def mac_names() -> list[str]:
    return list(_facts().machines)


def mac_profile(name: str) -> dict[str, Any]:
    """The content of a profile, as its TOML would have it."""
    facts = _facts()
    machine = facts.machines[name]
    chip, target, draft = facts.chips[machine.chip], facts.models[machine.target], facts.models[machine.draft]
    return {
        "name": name,
        "description": f"Apple {machine.chip}: {machine.target} on the GPU, {machine.draft} on the Neural Engine",
        "target": _target(machine.plain, chip, target),
        "draft": {**_on_neural_engine(draft), "block": draft.block},
        "draft_on_target_device": _draft_on_gpu(chip, draft),
        "both_busy": {"factor": chip.overlap, "source": "assumed: others lose 3 to 18%"},
    }


def _target(plain: _PlainSpeed, chip: _Chip, model: _Model) -> dict[str, Any]:
    forward = 1.0 / plain.tokens_per_second
    whole = model.weights + plain.context * model.kv_bytes
    # The KV is read as fast as the weights: both at the share of the bandwidth that this speed shows.
    rate = whole / forward
    return {
        "prefill": _prefill(chip, model),
        "shape": "steps",
        "steps": _steps(model.weights / rate, plain.source, chip, model),
        "context": {
            "milliseconds_per_1000_tokens": round(1e6 * model.kv_bytes / rate, 5),
            "vector_queries": model.vector_queries,
            "source": f"derived: {model.kv_bytes:,} bytes of KV a token at {rate / 1e9:.0f} GB/s",
        },
        "sequence": {
            "milliseconds": round(1000 * model.layers * _SEQUENCE_SECONDS, 3),
            "source": "assumed: five launches of 4 us in each layer",
        },
    }


def _steps(forward: float, source: str, chip: _Chip, model: _Model) -> list[dict[str, Any]]:
    kernel = _facts().kernels["half" if model.bits > 8 else chip.kernel]
    products = model.weights / (chip.bandwidth * 1e9)
    return [
        {"width": 1, "milliseconds": round(1000 * forward, 3), "source": source},
        *(
            {
                "width": width,
                "milliseconds": round(1000 * (forward + (ratio - 1.0) * products), 3),
                "source": f"derived, {ratio:g} times one row's products: {kernel.source}",
            }
            for width, ratio in kernel.widths
        ),
    ]


def _prefill(chip: _Chip, model: _Model) -> dict[str, Any]:
    rate = chip.teraflops * 1e12 / (2 * model.parameters * 1e9)
    source = f"derived: {chip.teraflops:g} TFLOPS (see the chip), two operations a parameter"
    return {"tokens_per_second": round(rate, 1), "source": source}


def _on_neural_engine(model: _Model) -> dict[str, Any]:
    step = 1000 * _NEURAL_ENGINE_SECONDS * model.parameters
    wider = "measured by others on another model: 8 tokens in one call cost 4% more, larql PR 312"
    return {
        "prefill": {"tokens_per_second": round(643 * 0.494 / model.parameters, 1), "source": _BY_SIZE},
        "steps": [
            {"width": 1, "milliseconds": round(step, 3), "source": _BY_SIZE},
            {"width": 8, "milliseconds": round(1.04 * step, 3), "source": wider},
            {"width": 32, "milliseconds": round(1.16 * step, 3), "source": "assumed: the same slope goes on"},
        ],
    }


_BY_SIZE = "assumed: 0.5B on an M4's Neural Engine (137 tokens/s, prefill 643), in proportion to the parameters"


def _draft_on_gpu(chip: _Chip, model: _Model) -> dict[str, Any]:
    forward = model.weights / (chip.bandwidth * 1e9) + _LAUNCHES
    source = "derived: the weights at the full bandwidth, and 2 ms; others measured 1.2 to 2.9 ms beside the weights"
    return {
        "prefill": _prefill(chip, model),
        "shape": "steps",
        "steps": _steps(forward, source, chip, model),
    }


Source = Annotated[str, Meta(min_length=1)]
"""Who measured the number beside it, or what it is assumed from."""
_SLOW_MOTION = "@"
_SLOWEST = 100.0
_SHIPPED = resources.files("orchestrator.machine.profiles") / "devices"


class ForwardTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One forward."""

    width: Annotated[int, Meta(ge=1, le=4096)]
    """Tokens."""
    milliseconds: Annotated[float, Meta(gt=0.0, le=1e6)]
    source: Source


class PrefillRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of prefilling."""

    tokens_per_second: Annotated[float, Meta(gt=0.0, le=1e9)]
    source: Source


class ContextCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention over the tokens before a forward: the time of reading their KV."""

    milliseconds_per_1000_tokens: Annotated[float, Meta(ge=0.0, le=1e6)]
    vector_queries: Annotated[int, Meta(ge=0, le=64)] = 0
    """Above 0: of a Mac's GPU, where attention takes as long as a reading of the KV for each token of a sequence up to
    8, and as 16 readings for more; up to so many by a kernel for few tokens. 0: a reading for 32 tokens."""
    source: Source


class SequenceCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that each further sequence adds to a forward, beside its tokens and its context."""

    milliseconds: Annotated[float, Meta(ge=0.0, le=1e6)]
    source: Source


class SlowDown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of a forward while the other device computes, relative to one alone."""

    factor: Annotated[float, Meta(ge=1.0, le=100.0)]
    source: Source


class DeviceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one device."""

    prefill: PrefillRate
    steps: Annotated[tuple[ForwardTime, ...], Meta(min_length=1, max_length=64)]
    """By rising width, the first of width 1."""
    shape: StepShape = "line"
    """line: linear between two widths. steps: between two widths a forward takes what the wider one takes. Beyond the
    last width the last slope continues."""
    context: ContextCost | None = None
    """None: a forward takes the same time behind any context."""
    sequence: SequenceCost | None = None
    """None: a forward takes the same time for any number of sequences."""
    block: Count = 1
    """Of a block drafter: tokens in a row that one forward guesses, which `plan` counts."""

    def pace(self, slow_down: float = 1.0) -> DevicePace:
        return DevicePace(
            steps=tuple((step.width, step.milliseconds / 1000) for step in self.steps),
            shape=self.shape,
            prefill_rate=self.prefill.tokens_per_second,
            slow_down=slow_down,
            context_seconds=self.context.milliseconds_per_1000_tokens / 1e6 if self.context else 0.0,
            vector_queries=self.context.vector_queries if self.context else 0,
            sequence_seconds=self.sequence.milliseconds / 1000 if self.sequence else 0.0,
        )


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both models on their devices."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    description: str
    target: DeviceTimes
    draft: DeviceTimes
    """On a device of its own: the Neural Engine, a second GPU, other cores."""
    draft_on_target_device: DeviceTimes
    """In turns with the target."""
    both_busy: SlowDown
    slow_motion: Annotated[float, Meta(ge=1.0, le=_SLOWEST)] = 1.0
    """How many times longer than on the device everything takes here."""

    def slower(self, factor: float) -> "DeviceProfile":
        """The same device in slow motion, for models that are slower here than there."""
        name = f"{self.name}{_SLOW_MOTION}{factor:g}"
        return replace(self, name=name, slow_motion=factor * self.slow_motion)


def load_profile(name: str) -> DeviceProfile:
    """A shipped profile by its name, or a file of the user's own by its path; NAME@4 is four times slower.

    Raises InputError for a profile that is missing, is not TOML, or has values that can't be.
    """
    device, mark, factor = name.rpartition(_SLOW_MOTION)
    if mark and not Path(name).is_file():
        return load_profile(device).slower(_factor(factor))
    path = Path(name)
    if name in mac_names():
        return _checked(mac_profile(name), name)
    if name in _file_names():
        content = (_SHIPPED / f"{name}.toml").read_text()
    elif path.is_file():
        content = _text(path)
    else:
        raise InputError(
            f"There is no profile {name!r}: choose {', '.join(profile_names())}, or the path of a file that "
            "`launch-pipeline calibrate --out FILE` wrote."
        )
    return parse_profile(content, name)


def _factor(text: str) -> float:
    try:
        return msgspec.convert(text, Annotated[float, Meta(ge=1.0, le=_SLOWEST)], strict=False)
    except msgspec.ValidationError as error:
        raise InputError(
            f"A profile can't be {text!r} times slower: give a number from 1 to {_SLOWEST:g}, as in "
            f"{profile_names()[0]}{_SLOW_MOTION}4."
        ) from error


def profile_names() -> list[str]:
    """The shipped ones, and those that are derived from facts about Macs."""
    return sorted([*_file_names(), *mac_names()])


def _file_names() -> list[str]:
    return [file.name.removesuffix(".toml") for file in _SHIPPED.iterdir() if file.name.endswith(".toml")]


def parse_profile(content: str, origin: str) -> DeviceProfile:
    """A profile from TOML; `origin` names it in the sentence of an InputError."""
    try:
        return _checked(tomllib.loads(content), origin)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _unusable(origin, str(error)) from error


def _checked(content: dict[str, Any], origin: str) -> DeviceProfile:
    try:
        profile = msgspec.convert(content, DeviceProfile)
    except msgspec.ValidationError as error:
        raise _unusable(origin, str(error)) from error
    flaw = next(_flaws(profile), None)
    if flaw is not None:
        raise _unusable(origin, flaw)
    return profile


def _unusable(origin: str, reason: str) -> InputError:
    return InputError(
        f"Profile {origin} can't be used: {reason}. See orchestrator/machine/profiles/devices for examples."
    )


def worker_pace(
    profile: DeviceProfile, role: Role, options: Options, draft_engine: DraftEngineName
) -> DevicePace | None:
    """The pace of a worker of a pipeline; None for a worker without a pace.

    The draft has a device of its own, unless the options place it on the target's, in turns. The slow-down applies if
    both devices compute at once.
    """
    drafts = draft_model(draft_engine) != "none"
    if role == "prefill" or (role == "draft" and not drafts):
        return None
    shared = options.strategy == "adaptive" and options.placement == "shared"
    both = drafts and not shared and STRATEGIES[options.strategy].caches
    draft = profile.draft_on_target_device if shared else profile.draft
    times = draft if role == "draft" else profile.target
    return times.pace(profile.slow_motion * (profile.both_busy.factor if both else 1.0))


def _text(path: Path) -> str:
    try:
        return read_bounded(path, 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Profile {path} can't be read ({error}): check the file.") from error


def _flaws(profile: DeviceProfile) -> Iterator[str]:
    for name in ("target", "draft", "draft_on_target_device"):
        widths = [step.width for step in getattr(profile, name).steps]
        if widths[0] != 1:
            yield f"the first width of {name}.steps is {widths[0]} and must be 1"
        if any(wider <= width for width, wider in pairwise(widths)):
            yield f"the widths of {name}.steps must rise"


def calibration_file() -> Path:
    """`launch-pipeline calibrate` writes it, `plan` reads it."""
    return cache_folder() / "this-machine.toml"
