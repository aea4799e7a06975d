"""The project does not grow unseen, and what a cut has won stays won (tests/budget.toml)."""

import pytest

from tests.support.budget import budget, code_lines, weights

SLACK = 1.02


@pytest.fixture(scope="module")
def weighed() -> dict[str, int]:
    return weights()


@pytest.mark.parametrize("name", budget())
def test_nothing_is_above_its_budget_nor_far_below(name: str, weighed: dict[str, int]):
    weight, allowed = weighed[name], budget()[name]

    assert weight <= allowed, "take something away, or raise the number in tests/budget.toml and say what it buys"
    assert allowed <= SLACK * weight, "lower the number in tests/budget.toml to what was reached"


def test_the_budget_names_all_that_is_weighed(weighed: dict[str, int]):
    assert set(budget()) == set(weighed)


def test_blanks_comments_and_docstrings_are_no_code():
    text = '''"""What it is."""

# Why.
X = (
    1,  # one
)
"""An attribute's
docstring."""


def f() -> str:
    """A contract."""
    return """text
that counts"""
'''
    assert code_lines(text) == 3 + 3
