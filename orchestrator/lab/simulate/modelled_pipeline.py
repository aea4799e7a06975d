"""Whole pipelines of modelled workers. Pure."""

from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.devices import Devices, Wires
from orchestrator.lab.simulate.draft import ModelledDraft
from orchestrator.lab.simulate.language import Language
from orchestrator.lab.simulate.modelled_worker import CONTEXT, ModelledWorker
from orchestrator.lab.simulate.simulation import BuildWorker, Simulation
from orchestrator.lab.simulate.target import ModelledTarget
from protocol.messages.base import Level, Role


def modelled_workers(
    language: Language, devices: Devices, context: int = CONTEXT, level: Level = "tree"
) -> BuildWorker:
    """Targets of this level and drafts, of this language, with the times of these devices."""

    def build(role: Role) -> ModelledWorker:
        if role == "target":
            return ModelledTarget(language, devices.target, context, level)
        return ModelledDraft(language, devices.draft, context, devices.draft_block)

    return build


def modelled_pipeline(
    options: Options,
    language: Language,
    devices: Devices,
    wires: Wires | None = None,
    seed: int = 0,
    kept: int | None = 0,
    level: Level = "tree",
) -> Simulation:
    """A pipeline whose target, of this level, is up; its draft too, if the strategy uses one."""
    strategy = STRATEGIES[options.strategy]
    simulation = Simulation(
        options,
        language,
        modelled_workers(language, devices, level=level),
        wires,
        seed,
        kept,
        devices.slow_down,
    )
    simulation.start("target")
    if strategy.drafts:
        simulation.start("draft")
    return simulation
