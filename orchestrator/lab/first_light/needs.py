"""What this machine lacks for a stage. Asks the system; starts nothing heavy and imports no Core ML."""

from orchestrator.lab.first_light.stages import LightSettings, Need, Stage
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.pairs.recommended_pairs import fits, pairs


def lacking(stage: Stage, settings: LightSettings) -> str:
    """What this machine lacks for the stage, as words behind "not here:"; empty if nothing."""
    return next(filter(None, (_lacking(need, settings) for need in stage.needs)), "")


def has_neural_engine() -> bool:
    """A Mac with Apple silicon and Core ML's Python package. Whether Core ML uses it, only its times tell."""
    return machine_facts.neural_engine() is not None and machine_facts.installed_version("coremltools") is not None


def _lacking(need: Need, settings: LightSettings) -> str:
    match need:
        case "GPU":
            return "" if machine_facts.computes_on_gpu() else "no GPU that MLX uses"
        case "Neural Engine":
            return "" if has_neural_engine() else "no Neural Engine with Core ML"
        case "second pair":
            return _no_second_pair(settings)


def _no_second_pair(settings: LightSettings) -> str:
    if settings.short:
        return "the short form measures the demo pair alone"
    pair = pairs()[settings.second_pair]
    if fits(pair, on_processor=False, available=machine_facts.usable_bytes()):
        return ""
    return f"no memory for the pair {settings.second_pair}"
