"""Memory, tokenizers and predicted speed of the recommended pairs on this machine. Prints nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.prediction.plan import Scenario, plain, simulated
from orchestrator.lab.simulate.prediction.sweep import with_draft_step, with_target_step
from orchestrator.machine.memory import budget
from orchestrator.machine.models.checkpoints import cached, weight_bytes
from orchestrator.machine.pairs.recommended_pairs import PROCESSOR_BITS, Pair
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from protocol.contracts.coreml.conversion import Choices
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint

_FP16_BYTES = 2
_TOKENS = 128
_MAX_RATIO = 20.0
"""Of the weights to those of the calibrated model: beyond it the time of a forward is not proportional to them."""
_MAX_MILLISECONDS = 2000.0
"""Of a forward: much slower targets count as dead."""


@dataclass(frozen=True)
class Forecast:
    """Tokens a second at temperature 0."""

    plain: float
    adaptive: float


def memory(pair: Pair, on_processor: bool, core_ml: bool = False) -> float:
    """Bytes that the pair needs, estimated. `core_ml`: while the draft is also loaded for the Neural Engine.

    Core ML has the weights in fp16, once for every loaded function (coremltools issue 2351). The draft is in MLX too,
    until a trial has shown which of the two is faster.
    """
    return _weights(pair, on_processor, core_ml) + budget.OVERHEAD


def fits(pair: Pair, on_processor: bool, available: int, core_ml: bool = False) -> bool:
    """`available`: the machine's memory in bytes."""
    return budget.fits(_weights(pair, on_processor, core_ml), available)


def _weights(pair: Pair, on_processor: bool, core_ml: bool) -> float:
    converts = core_ml and pair.draft.kind is None
    package = pair.draft.parameters * 1e9 * _FP16_BYTES * len(Choices().widths) if converts else 0.0
    return pair.target.weights(on_processor) + pair.draft.weights(on_processor) + package


def tokenizers(pair: Pair) -> tuple[bool, bool]:
    """Whether the tokenizers match, and whether both models' files were compared (else the listed names are).

    A trained drafter has its target's tokenizer, and no file of its own to compare.
    """
    if pair.draft.kind is not None:
        return pair.target.tokenizer == pair.draft.tokenizer, False
    folders = cached(pair.target.id), cached(pair.draft.id)
    if None in folders:
        return pair.target.tokenizer == pair.draft.tokenizer, False
    target, draft = (vocabulary_fingerprint(folder) for folder in folders if folder is not None)
    return target == draft, True


def forecast(pair: Pair, profile: DeviceProfile, on_processor: bool) -> Forecast | None:
    """The prediction of `plan` for forward times in proportion to the weights, with the demo draft's acceptance.

    None if the profile does not state the weights it was measured with, or if they are too different, and for a trained
    drafter, whose guesses are not like the demo draft's: `plan --drafter` predicts one.
    """
    if pair.draft.kind is not None:
        return None
    measured = profile.target.weights, profile.draft.weights
    if measured[0] is None or measured[1] is None:
        return None
    scenario = Scenario(devices=Devices.of(profile), requests=1, tokens=_TOKENS)
    for change, pace, model, known in (
        (with_target_step, scenario.devices.target, pair.target, measured[0]),
        (with_draft_step, scenario.devices.draft, pair.draft, measured[1]),
    ):
        factor = model.read(on_processor) / known
        milliseconds = 1000 * pace.forward(1) * factor
        if not 1 / _MAX_RATIO <= factor <= _MAX_RATIO or milliseconds > _MAX_MILLISECONDS:
            return None
        scenario = change(scenario, milliseconds)
    return Forecast(plain(scenario).tokens_per_second, simulated(scenario, "adaptive").tokens_per_second)


def weights_in(folder: Path, on_processor: bool) -> int:
    """Bytes that a forward of the model in `folder` reads, by the size of its files."""
    size = weight_bytes(folder)
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
