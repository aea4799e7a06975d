"""`--help` of a command with many options: those that people use. `--help-all` shows the others too."""

from collections.abc import Callable
from typing import Any

import click

_ALL = "help-all"


def brief_help(*names: str) -> Callable[[click.Command], click.Command]:
    """Only these options in `--help`, in this order; `--help-all` is an option of the command then."""

    def decorate(command: click.Command) -> click.Command:
        command.__class__ = _BriefCommand
        assert isinstance(command, _BriefCommand)
        command.brief = names
        command.params.append(_help_all())
        return command

    return decorate


class _BriefCommand(click.Command):
    brief: tuple[str, ...]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get(_ALL):
            super().format_options(ctx, formatter)
            return
        flags = {max(each.opts, key=len): each for each in self.get_params(ctx)}
        shown = [flags[f"--{name}"].get_help_record(ctx) for name in (*self.brief, _ALL, "help")]
        with formatter.section("Options"):
            formatter.write_dl([record for record in shown if record is not None])


def _help_all() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help="Show every option."
    )
