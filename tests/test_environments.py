"""Every process that is started has this one's variables: without PATH it finds no compiler, without HOME the account's
own cache in place of the one that was asked for. Variables are added or replaced."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def _environments(program: str) -> Iterator[str]:
    """The source of each environment that `subprocess` is given, with what the function assigns to names in it."""
    for function in ast.walk(ast.parse(program)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        nodes = list(_own_nodes(function))
        assigned = {ast.unparse(node.targets[0]): ast.unparse(node) for node in nodes if isinstance(node, ast.Assign)}
        for call in nodes:
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("subprocess."):
                for given in (keyword.value for keyword in call.keywords if keyword.arg == "env"):
                    names = [node.id for node in ast.walk(given) if isinstance(node, ast.Name)]
                    yield "\n".join([ast.unparse(given), *(assigned.get(name, "") for name in names)])


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Without those of functions inside."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own_nodes(child)


@pytest.mark.parametrize("folder", ["protocol", "draft_worker", "target_worker", "orchestrator", "tests"])
def test_it_is_this_process_s_with_changes(folder: str):
    wrong = {
        f"{file.relative_to(ROOT)}: {environment}"
        for file in Path(ROOT, folder).rglob("*.py")
        if "env=" in (program := file.read_text())
        for environment in _environments(program)
        if not re.search(r"\*\*os\.environ\b|in os\.environ\.items\(\)", environment)
    }

    assert wrong == set()
