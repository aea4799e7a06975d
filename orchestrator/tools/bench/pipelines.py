"""Our strategies as contenders: a pipeline of three processes each, up during the whole run."""

from dataclasses import replace

from orchestrator.api.pipeline import Pipeline
from orchestrator.tools.bench.contender import Family, GenerationTask, TimedGeneration
from protocol.messages.base import Verification


class PipelineContender:
    """A started pipeline. Its estimates live on from task to task, as they do for its users."""

    def __init__(self, name: str, pipeline: Pipeline, verification: Verification = "coupled") -> None:
        self.name = name
        self.family: Family = "ours" if verification == "coupled" else "in law"
        self._pipeline = pipeline
        self._verification: Verification = verification

    def generate(self, task: GenerationTask) -> TimedGeneration:
        sampling = replace(task.sampling(), verification=self._verification)
        result = self._pipeline.generate(task.tokens, sampling)
        figures = result.statistics
        return TimedGeneration(
            tokens=result.tokens,
            tokens_per_second=figures.tokens_per_second,
            tokens_per_round=figures.tokens_per_round,
            hit_rate=figures.hit_rate,
            acceptance_rate=figures.acceptance_rate,
            target_busy=figures.target_busy,
            draft_busy=figures.draft_busy,
            overhead_per_round=figures.overhead_per_round,
            pace=figures.pace,
        )
