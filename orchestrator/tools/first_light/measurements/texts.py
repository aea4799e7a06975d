"""The texts that stages let the target continue: the bench's shipped prompts, which nobody's own."""

from orchestrator.api.chat_prompts import own_template
from orchestrator.tools.bench.models import BenchModels
from orchestrator.tools.bench.plan import BenchPlan
from orchestrator.tools.bench.prompts import BenchPrompt, read_prompts
from orchestrator.tools.bench.trials import encoded


def plan(**changes: object) -> BenchPlan:
    """A comparison of the default pair, or as `changes` say."""
    options = {
        "target": None,
        "draft": None,
        "strategies": "ar,adaptive",
        "draft_tokens": "2,4",
        "temperature": (0.0,),
        "repeats": 1,
        "max_tokens": 48,
        "random_draft": False,
    }
    return BenchPlan.of(**(options | changes))  # pyright: ignore[reportArgumentType]


def prompts(models: BenchModels, count: int) -> list[BenchPrompt]:
    """Shipped ones that suit the target."""
    return read_prompts(None, count, chat=own_template(str(models.target)) is not None)


def text(models: BenchModels, plan: BenchPlan, tokens: int) -> tuple[int, ...]:
    """So many tokens of prompts behind one another."""
    found: list[int] = []
    for prompt in encoded(prompts(models, tokens), plan):
        found += prompt
    return tuple(found[:tokens])
