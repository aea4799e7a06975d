"""Derives device profiles of Macs from chips, models and published speeds. Pure, but for the file of facts.

T(1), a forward of one token behind an empty context, is 1 / tokens_per_second less the context's KV. A forward of W
tokens takes T(W) = T(1) + (r(W) - 1) weights / bandwidth: the matrix products, which read all weights at the full
bandwidth, take r(W) times as long (`kernels`); the rest (launches, norms, the host) does not grow.
"""

import tomllib
from functools import cache
from importlib import resources
from typing import Annotated, Any

import msgspec
from msgspec import Meta

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
        "draft": _on_neural_engine(draft),
        "draft_on_target_device": _draft_on_gpu(chip, draft),
        "both_busy": {"factor": chip.overlap, "source": "assumed: others lose 3 to 18%"},
    }


def _target(plain: _PlainSpeed, chip: _Chip, model: _Model) -> dict[str, Any]:
    forward = 1.0 / plain.tokens_per_second
    whole = model.weights + plain.context * model.kv_bytes
    # The KV is read as fast as the weights: both at the share of the bandwidth that this speed shows.
    rate = whole / forward
    return {
        "weights": model.weights,
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
    kernel = _facts().kernels["half" if model.bits >= 16 else chip.kernel]
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
        "weights": model.weights,
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
        "weights": model.weights,
        "prefill": _prefill(chip, model),
        "shape": "steps",
        "steps": _steps(forward, source, chip, model),
    }
