"""How long a target takes to adopt the KV of another process, and what else the host does beside the devices."""

from orchestrator.lab.bench.costs import micro
from orchestrator.lab.findings import Findings, Value
from orchestrator.lab.first_light.asked import Asked

_OTHERS = Value(
    "KV injected into mlx-lm's cache",
    0.2,
    "ms",
    "reported",
    "M4, Qwen2.5-3B, by assignment: no shared memory, no check",
)


def measure(asked: Asked) -> Findings:
    asked.notice("adopting KV from shared memory")
    figures = micro.measured([(micro.ADOPTION, *(("40", "2") if asked.settings.short else ()))])
    if not asked.settings.short:
        asked.notice("the host's steps beside a converted draft, and telemetry")
        figures += micro.measured(micro.HOST)
    return Findings(values=(*figures, _OTHERS))
