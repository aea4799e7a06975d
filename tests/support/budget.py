"""What the project may weigh, and what it weighs: `python -m tests.support.budget` prints both.

Lines of blanks, comments and docstrings are no code. Words are those of the documents without
the log and the changelog.
"""

import ast
import tomllib
from collections.abc import Iterator

import click

from orchestrator.cli.app import cli
from tests.support.paths import ROOT

BUDGET = ROOT / "tests" / "budget.toml"
PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")


def code_lines(text: str) -> int:
    """Lines of a module that hold code."""
    code = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str())):
                documentation |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            case ast.Constant() | ast.JoinedStr() if node.end_lineno != node.lineno:
                code |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            case _:
                pass
    return len(code - documentation)


def weights() -> dict[str, int]:
    """Lines of code by package and of the tests, files of source, options of all commands, words of the documents."""
    source = {name: [*(ROOT / name).rglob("*.py")] for name in (*PACKAGES, "tests")}
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log")]
    return {
        **{name: sum(code_lines(file.read_text(encoding="utf-8")) for file in files) for name, files in source.items()},
        "files": sum(len(source[name]) for name in PACKAGES),
        "options": len({name for command in _commands(cli) for name in _options(command)}),
        "words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def budget() -> dict[str, int]:
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))


def _commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from _commands(found)


def _options(command: click.Command) -> Iterator[str]:
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield max(option.opts, key=len)


def main() -> None:
    allowed = budget()
    for name, weight in weights().items():
        print(f"{name:14} {weight:7,} of {allowed[name]:7,}")


if __name__ == "__main__":
    main()
