"""What the project may weigh, and what it weighs: `python -m tests.support.budget` prints both.

Code is counted by tokens: lines of blanks, comments and docstrings are none. Words are those of the documents without
the log and the changelog.
"""

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator

import click

from orchestrator.cli.app import cli
from tests.support.paths import ROOT

BUDGET = ROOT / "tests" / "budget.toml"
PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(text: str) -> int:
    """Lines of a module that hold code."""
    documentation = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - documentation)


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
