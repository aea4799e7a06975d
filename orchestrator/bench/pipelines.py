"""Our strategies as contenders: a pipeline of three processes each, up during the whole run."""

from orchestrator.bench.contender import Family, Generation, Task
from orchestrator.pipeline import Pipeline


class PipelineContender:
    """A started pipeline. Its estimates live on from task to task, as they do for its users."""

    family: Family = "ours"

    def __init__(self, name: str, pipeline: Pipeline) -> None:
        self.name = name
        self._pipeline = pipeline

    def generate(self, task: Task) -> Generation:
        result = self._pipeline.generate(task.tokens, task.sampling())
        figures = result.statistics
        return Generation(
            tokens=result.tokens,
            tokens_per_second=figures.tokens_per_second,
            tokens_per_round=figures.tokens_per_round,
            hit_rate=figures.hit_rate,
            acceptance_rate=figures.acceptance_rate,
            target_busy=figures.target_busy,
            draft_busy=figures.draft_busy,
            overhead_per_round=figures.overhead_per_round,
        )
