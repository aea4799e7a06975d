"""The texts that stages let the target continue: the bench's shipped prompts, never a user's."""

from typing import Any

from orchestrator.lab.bench.plan import BenchModels, BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt, read_prompts
from orchestrator.lab.bench.trials import encoded
from orchestrator.text.chat_template import own_template
from protocol.shown_names import model_name


def plan(**changes: Any) -> BenchPlan:
    """A comparison of the default pair, or as `changes` say."""
    options: dict[str, Any] = {
        "target": None,
        "draft": None,
        "strategies": "ar,adaptive",
        "draft_tokens": "2,4",
        "temperature": (0.0,),
        "repeats": 1,
        "max_tokens": 48,
    }
    return BenchPlan.of(**(options | changes))


def measured_pair(models: BenchModels) -> tuple[str, ...]:
    """Notes that say which models a stage measured."""
    names = f"Target {model_name(models.target)}, draft {model_name(models.draft)}."
    return (names, models.note) if models.note else (names,)


def prompts(models: BenchModels, count: int) -> list[BenchPrompt]:
    """Shipped ones that suit the target."""
    return read_prompts(None, count, chat=own_template(str(models.target)) is not None)


def text(models: BenchModels, plan: BenchPlan, tokens: int) -> tuple[int, ...]:
    """So many tokens of prompts behind one another."""
    found: list[int] = []
    for prompt in encoded(prompts(models, tokens), plan):
        found += prompt
    return tuple(found[:tokens])
