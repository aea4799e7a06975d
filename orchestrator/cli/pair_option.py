"""--pair NAME: a recommended target and draft in one word."""

import functools
from collections.abc import Callable
from typing import Any

import click

from orchestrator.cli.presets import filled_in
from orchestrator.machine.recommended_pairs import pairs, usable_pair
from protocol.contracts.engines import draft_model


def pair_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """For a command with --target and --draft, which win if they are asked for as strongly."""

    @functools.wraps(command)
    def chosen(*arguments: Any, pair: str | None, **options: Any) -> Any:
        values: dict[str, str] = {}
        if pair is not None:
            models = usable_pair(pair)
            values = {"target": models.target.id, "draft": models.draft.id}
            if draft_model(options.get("draft_engine", "mlx")) == "none":
                del values["draft"]
        return command(*arguments, **filled_in(options, "pair", values))

    words = "A recommended target and draft, see `launch-pipeline pairs`."
    return click.option("--pair", type=click.Choice(list(pairs())), metavar="NAME", help=words)(chosen)
