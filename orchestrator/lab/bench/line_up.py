"""Our pipelines in a bench: which lines there are, with which options, and for which K. Starts nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.core.options import PlacementChoice
from orchestrator.lab.bench.models import BenchModels
from orchestrator.lab.bench.names import (
    AUTOREGRESSIVE,
    CORE_ML_DRAFT,
    LOOKUP,
    ONE_DEVICE,
    RANDOM_DRAFT,
    WITHOUT_LOOKUP,
    drafter_name,
    remote_name,
)
from orchestrator.lab.bench.plan import CHAINS, BenchPlan
from orchestrator.machine.drafts.draft_choice import first_engine
from orchestrator.runtime.link_emulation import EmulatedLink
from protocol.contracts.engines import AUTO, DraftEngineName
from protocol.messages.base import Verification


class PipelineEntry(NamedTuple):
    """One pipeline. It is a contender for each K: estimates are shared, as between the requests of a real pipeline."""

    line: str
    strategy: str
    engine: DraftEngineName = "mlx"
    verification: Verification = "coupled"
    link: EmulatedLink | None = None
    lookup: bool = True
    placement: PlacementChoice = "auto"
    draft: Path | None = None
    """Of a draft that is compared with the plan's own."""
    draft_tokens: tuple[int | None, ...] = (None,)
    """None: the K of the pipeline's options, or a strategy without a K."""

    def keywords(self, models: BenchModels) -> dict[str, Any]:
        """Of `Pipeline`."""
        options: dict[str, Any] = {} if self.lookup else {"lookup": "off"}
        if self.draft is not None:
            options |= {"draft": str(self.draft), "draft_scale": models.draft_scale(self.draft)}
        if self.placement != "auto":
            options["placement"] = self.placement
        return {**models.pipeline(self.strategy, self.engine), **options, "draft_link": self.link}


def entries(plan: BenchPlan) -> Iterator[PipelineEntry]:
    """The plan's strategies, then the controls of a comparison of drafts."""
    for strategy in plan.strategies:
        counts = _chain_lengths(plan, strategy)
        yield PipelineEntry(strategy, strategy, draft_tokens=counts)
        if strategy == "adaptive" and plan.pace:
            # The profile's draft has a device of its own; many a machine has one for both.
            yield PipelineEntry(ONE_DEVICE, strategy, placement="shared")
        for link in plan.links if strategy not in (AUTOREGRESSIVE, LOOKUP) else ():
            yield PipelineEntry(remote_name(strategy, link), strategy, link=link, draft_tokens=counts)
    for strategy in plan.rejecting:
        # A pipeline of its own: the estimates of the two verification rules must not mix.
        counts = _chain_lengths(plan, strategy)
        yield PipelineEntry(f"{strategy} rejection", strategy, verification="rejection", draft_tokens=counts)
    if plan.core_ml_draft:
        yield PipelineEntry(CORE_ML_DRAFT, "adaptive", "coreml")
    for draft in plan.drafters:
        yield from _with_drafter(plan, draft)
    if plan.controls and set(plan.strategies) != {AUTOREGRESSIVE}:
        yield from _controls(plan)


def _with_drafter(plan: BenchPlan, draft: Path) -> Iterator[PipelineEntry]:
    """The plan's strategies with this draft, and `adaptive` with it alone."""
    engine = first_engine(AUTO, str(draft))
    for strategy in plan.strategies:
        if strategy not in (AUTOREGRESSIVE, LOOKUP):
            counts = _chain_lengths(plan, strategy)
            yield PipelineEntry(drafter_name(strategy, draft), strategy, engine, draft=draft, draft_tokens=counts)
    yield PipelineEntry(drafter_name(WITHOUT_LOOKUP, draft), "adaptive", engine, lookup=False, draft=draft)


def _controls(plan: BenchPlan) -> Iterator[PipelineEntry]:
    """They tell what the draft, and what prompt lookup, is worth."""
    yield PipelineEntry(WITHOUT_LOOKUP, "adaptive", lookup=False)
    if LOOKUP not in plan.strategies:
        yield PipelineEntry(LOOKUP, LOOKUP)
    yield PipelineEntry(RANDOM_DRAFT, "adaptive", "random")


def _chain_lengths(plan: BenchPlan, strategy: str) -> tuple[int | None, ...]:
    """K of every contender of this line."""
    return plan.draft_tokens if strategy in CHAINS and plan.draft_tokens else (None,)
