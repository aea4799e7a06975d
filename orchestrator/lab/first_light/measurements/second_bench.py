"""Our strategies against mlx-lm's own decoding, with a larger pair that the first use downloads."""

from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light.asked import Asked
from orchestrator.lab.first_light.measurements.bench import compared
from orchestrator.lab.first_light.measurements.texts import plan
from orchestrator.machine.pairs.recommended_pairs import pairs


def measure(asked: Asked) -> Findings:
    pair = pairs()[asked.settings.second_pair]
    asked.notice(f"{asked.settings.second_pair}: fetching what is not on the disk")
    return compared(plan(target=pair.target.id, draft=pair.draft.id, temperature=(0.0, 0.8)), 3, asked.notice)
