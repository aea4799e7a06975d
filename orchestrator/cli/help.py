"""What `--help` shows: whole sentences at any width, commands by their use, and the options that people use.

`--help-all` of a command with many options shows the others too.
"""

import shutil
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import click

from orchestrator.cli.sentences import folded

_NARROW = 60
"""Columns of a terminal below which two columns of help have no room."""
_ALL = "help-all"
_WHOLE = 1000
"""Characters; no first sentence is longer."""


class Help(click.HelpFormatter):
    """As wide as the terminal, however narrow. In a narrow one the words about an option stand below it."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        if width is None and (columns := shutil.get_terminal_size().columns) < _NARROW:
            width = columns
        super().__init__(indent_increment, width, max_width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Words break as in other sentences, so that a command in them can be copied."""
        rows = list(rows)
        widest = min(max(len(name) for name, _ in rows), col_max) if self.width >= _NARROW - 2 else col_spacing
        indent, margin = " " * self.current_indent, " " * (self.current_indent + widest + col_spacing)
        for name, words in rows:
            start = f"{indent}{name.rstrip()}"
            between = " " * (len(margin) - len(start)) if len(name) <= widest else f"\n{margin}"
            text = folded(words, self.width - len(margin)).replace("\n", f"\n{margin}")
            self.write(f"{start}{between}{text}".rstrip() + "\n")


click.Context.formatter_class = Help


class Group(click.Group):
    """`sections`: names of its commands by their titles, in the order of the help; without them all have one title."""

    def __init__(
        self, *arguments: Any, sections: Mapping[str, Collection[str]] | None = None, **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self._sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Whole sentences, over as many lines as they need."""
        sections = self._sections or {"Commands": self.list_commands(ctx)}
        widest = max(map(len, self.commands))
        for title, names in sections.items():
            rows = [(name.ljust(widest), self.commands[name].get_short_help_str(_WHOLE)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


class BriefCommand(click.Command):
    """`brief`: the options of its `--help`, in this order, separated by blanks."""

    def __init__(self, *arguments: Any, brief: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self._brief = brief.split()
        self.params.append(
            click.Option(
                [f"--{_ALL}"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get(_ALL):
            super().format_options(ctx, formatter)
            return
        options = {max(each.opts, key=len): each for each in self.get_params(ctx)}
        shown = [options[f"--{name}"].get_help_record(ctx) for name in (*self._brief, _ALL, "help")]
        with formatter.section("Options"):
            formatter.write_dl([record for record in shown if record is not None])


def _show_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
