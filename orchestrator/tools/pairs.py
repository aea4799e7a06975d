"""What recommended pairs of models take, whether they go together, what they would reach here. Prints nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

from orchestrator.machine.checkpoints import cached
from orchestrator.machine.device_profiles import DeviceProfile
from orchestrator.machine.recommended_pairs import PROCESSOR_BITS, Pair
from orchestrator.tools.simulate.devices import Devices
from orchestrator.tools.simulate.plan import Scenario, plain, simulated
from orchestrator.tools.simulate.sweep import with_draft_step, with_target_step
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint

_USABLE = 0.75
"""Of a machine's memory: about what macOS lends the GPU, and the system needs the rest."""
_KV_BYTES = 1 << 30
"""For keys and values of some thousand tokens, and the processes themselves."""
_TOKENS = 128
_FURTHEST = 20.0
"""Times the weights of the calibrated model: beyond, what a forward takes besides reading them is a guess."""
_SLOWEST = 2000.0
"""Milliseconds of a forward that anybody would wait for; far slower targets are taken for dead."""


@dataclass(frozen=True)
class Forecast:
    """Tokens a second at temperature 0."""

    plain: float
    adaptive: float


def memory(pair: Pair, on_processor: bool) -> float:
    """Bytes that the pair needs, estimated."""
    return pair.target.weights(on_processor) + pair.draft.weights(on_processor) + _KV_BYTES


def fits(pair: Pair, on_processor: bool, available: int) -> bool:
    """`available`: the machine's memory in bytes."""
    return memory(pair, on_processor) <= _USABLE * available


def tokenizers(pair: Pair) -> tuple[bool, bool]:
    """Whether they match, and whether that was found in the files themselves, because both are here."""
    folders = cached(pair.target.id), cached(pair.draft.id)
    if None in folders:
        return pair.target.tokenizer == pair.draft.tokenizer, False
    target, draft = (tokenizer_fingerprint(folder) for folder in folders if folder is not None)
    return target == draft, True


def forecast(pair: Pair, profile: DeviceProfile, on_processor: bool) -> Forecast | None:
    """What `plan` says for a device whose forwards take as much longer as the weights are bigger.

    None if the profile does not say what weights it was measured with, or they were too different. The draft
    guesses as the demo pair's does.
    """
    measured = profile.target.weights, profile.draft.weights
    if measured[0] is None or measured[1] is None:
        return None
    scene = Scenario(devices=Devices.of(profile), requests=1, tokens=_TOKENS)
    for change, pace, model, known in (
        (with_target_step, scene.devices.target, pair.target, measured[0]),
        (with_draft_step, scene.devices.draft, pair.draft, measured[1]),
    ):
        factor = model.weights(on_processor) / known
        milliseconds = 1000 * pace.forward(1) * factor
        if not 1 / _FURTHEST <= factor <= _FURTHEST or milliseconds > _SLOWEST:
            return None
        scene = change(scene, milliseconds)
    return Forecast(plain(scene).tokens_per_second, simulated(scene, "adaptive").tokens_per_second)


def weights_in(folder: Path, on_processor: bool) -> int:
    """Bytes that a forward of the model in `folder` reads, by the size of its files."""
    size = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    if not on_processor:
        return size
    config = json.loads((folder / "config.json").read_bytes())
    quantization = config.get("quantization")
    if isinstance(quantization, dict):
        # A scale and a bias of 16 bits for each group.
        bits = quantization["bits"] + 32 / quantization.get("group_size", 64)
    else:
        bits = 32 if config.get("torch_dtype", config.get("dtype")) == "float32" else 16
    return round(size * PROCESSOR_BITS / bits)
