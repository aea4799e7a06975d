"""What `--help` shows: commands by their use, in whole sentences, and the options that people use.

`--help-all` of a command with many options shows the others too.
"""

from collections.abc import Collection, Mapping
from typing import Any

import click

_ALL = "help-all"
_WHOLE = 1000
"""Characters; no first sentence is longer."""


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

    borrowed: Collection[str] = ()
    """Names of options that are another command's, whose settings they are."""

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
