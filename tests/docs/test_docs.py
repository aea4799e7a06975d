"""The documents name only options, commands, paths and sections that exist; every package has a docstring."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import click
import pytest

import protocol.messages
from orchestrator.cli.app import cli
from protocol.messages.base import VERSION, Message
from tests.support.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "log"]
"""Pages about the present program. The changelog and the log name commands, options and files of their day."""
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
FOREIGN_OPTIONS = {
    "--draft-model",  # mlx_lm.server
    "--auth-type",  # programs that `launch` runs
    "--env-file",
    "--model-metadata-file",
    "--settings",
    "--weak-model",
    "--backend",  # guidellm
    "--tokenizer",
    "--quick",  # bin/test
}


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def code(page: Path) -> list[str]:
    """What a page shows as code, by the span or by the block."""
    text = page.read_text(encoding="utf-8")
    return FENCE.findall(text) + CODE.findall(FENCE.sub("", text))


def commands(group: click.Command, context: click.Context) -> Iterator[click.Command]:
    yield group
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from commands(command, context)


@cache
def options(of: str = "") -> frozenset[str]:
    """Options of a command and its subcommands; of all commands without a name."""
    with click.Context(cli) as context:
        command = cli.get_command(context, of) if of else cli
        assert command is not None, of
        every = [option for one in commands(command, context) for option in one.get_params(context)]
    return frozenset(name for option in every for name in (*option.opts, *option.secondary_opts))


def mentioned_options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*\w", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Fragments of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_link_to_a_file_and_section_of_the_repository_resolves(page: Path):
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    for path, fragment in links:
        target = (page.parent / path).resolve() if path else page

        assert target.is_file(), path
        assert not fragment or fragment in anchors(target), f"{path}#{fragment}"


def test_the_readme_is_short_and_begins_with_a_sentence_two_commands_and_the_picture():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    title, sentence, block, picture, *_ = text.split("\n\n")

    assert len(text.encode()) <= 7_000
    assert title == "# launch-pipeline"
    assert "\n" not in sentence
    generate, test = block.splitlines()[1:3]
    assert generate.startswith('bin/launch-pipeline generate "')
    assert test == "bin/test"
    assert "docs/page/page-dark.png" in picture


def test_the_page_of_commands_has_every_command_in_its_table():
    page = (ROOT / "docs" / "use" / "commands.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([a-z-]+)", page, re.MULTILINE))

    assert named == {name for name, command in cli.commands.items() if not command.hidden}


@pytest.mark.parametrize("page", CURRENT, ids=names(CURRENT))
def test_every_path_in_code_exists(page: Path):
    folders = "|".join(sorted(entry.name for entry in ROOT.iterdir() if entry.is_dir() and entry.name[0] != "."))
    for span in code(page):
        for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*[\w/]", span):
            assert (ROOT / path).exists(), path
        if re.fullmatch(r"\w+\.py", span):
            assert any(ROOT.glob(f"*/**/{span}")), span


@pytest.mark.parametrize("page", CURRENT, ids=names(CURRENT))
def test_every_option_in_code_is_one_of_some_command(page: Path):
    assert mentioned_options("\n".join(code(page))) - FOREIGN_OPTIONS <= options()


@pytest.mark.parametrize("page", CURRENT, ids=names(CURRENT))
def test_every_command_in_code_exists_and_has_its_options(page: Path):
    for name, arguments in re.findall(r"launch-pipeline ([a-z][a-z-]*)([^|&#\n]*)", "\n".join(code(page))):
        own, _, passed_on = arguments.partition(" -- ")
        assert mentioned_options(own) <= options(name), name
        if passed_on:
            assert name in ("service", "launch")
        if name == "service":
            assert mentioned_options(passed_on) <= options("serve"), name


@pytest.mark.parametrize("page", CURRENT, ids=names(CURRENT))
def test_every_module_that_python_is_told_to_run_exists(page: Path):
    for module in re.findall(r"python -m ([\w.]+)", "\n".join(code(page))):
        path = ROOT / module.replace(".", "/")

        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_table_of_messages_has_every_message_once():
    for module in iter_modules(protocol.messages.__path__):
        import_module(f"{protocol.messages.__name__}.{module.name}")
    page = (ROOT / "docs" / "inside" / "protocol.md").read_text(encoding="utf-8")
    table = page.split("## Messages")[1].split("\n\n")[1]
    named = [name for cell in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for name in CODE.findall(cell)]

    messages = [message for message in Message.__subclasses__() if message.__module__.startswith("protocol.messages.")]

    assert sorted(named) == sorted(message.__name__ for message in messages)


def test_the_protocols_page_is_about_the_present_version():
    page = (ROOT / "docs" / "inside" / "protocol.md").read_text(encoding="utf-8")

    assert f", version {VERSION}." in page


PACKAGES = sorted(
    module.relative_to(ROOT).as_posix()
    for package in ("protocol", "draft_worker", "target_worker", "orchestrator")
    for module in (ROOT / package).rglob("__init__.py")
)


@pytest.mark.parametrize("module", PACKAGES)
def test_every_package_says_what_lives_there(module: str):
    assert ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))


def test_the_folders_in_the_architecture_exist():
    page = (ROOT / "docs" / "inside" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("## Folders")[1].split("```")[1]
    parents: list[str] = []
    for indent, name in re.findall(r"^( *)([\w]+/)", tree, re.MULTILINE):
        parents = [*parents[: len(indent) // 2], name]

        assert (ROOT / "".join(parents)).is_dir(), "".join(parents)
