"""Tasks for inspect-ai: two questions, and one whose answer must be a call."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

CAPITALS = {"France": "Paris", "Italy": "Rome"}


def questions(*countries: str) -> list:
    return [Sample(input=f"What is the capital of {name}?", target=CAPITALS[name]) for name in countries]


@tool
def capital():
    async def execute(country: str) -> str:
        """The capital of a country.

        Args:
            country: Its name.
        """
        return "Paris"

    return execute


@task
def capitals():
    return Task(dataset=questions("France", "Italy"), solver=generate(), scorer=includes())


@task
def calls():
    solver = [use_tools(capital(), tool_choice="any"), generate(tool_calls="single")]
    return Task(dataset=questions("France"), solver=solver, scorer=includes())
