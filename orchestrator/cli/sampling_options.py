"""The options about sampling that several commands share, and what they become."""

import functools
from collections.abc import Callable
from typing import Any

import click

from orchestrator.api.sampling_params import SamplingParams
from orchestrator.cli.presets import PRESETS, filled_in

CommandFunction = Callable[..., Any]
_OPTIONS = [
    click.option("--preset", type=click.Choice(list(PRESETS)), help="Values for the following five."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most probable token."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, help="0 keeps all tokens.  [default: 0]"),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="As OpenAI has it."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="As OpenAI has it."),
    click.option("--json-schema", type=click.File("r", encoding="utf-8"), help="Only JSON that fits this schema."),
    click.option("--seed", type=int, help="Equal seeds give equal text. Default: a fresh one, shown in the summary."),
    click.option("--verification", type=click.Choice(["coupled", "rejection"]), default="coupled", show_default=True),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
]
_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "verification", "max_tokens", "stop"),
)


def sampling_options(max_tokens: int) -> Callable[[CommandFunction], CommandFunction]:
    """Those that `sampling` takes, with a preset's values already in them; `max_tokens` unless it is said."""

    def decorate(command: CommandFunction) -> CommandFunction:
        @functools.wraps(command)
        def chosen(*arguments: Any, preset: str | None, **options: Any) -> Any:
            values = PRESETS[preset] if preset is not None else {}
            return command(*arguments, **filled_in(options, "preset", values))

        limit = click.option("--max-tokens", type=int, default=max_tokens, show_default=True)
        for option in reversed([*_OPTIONS, limit]):
            chosen = option(chosen)
        return chosen

    return decorate


def sampling(options: dict[str, Any]) -> SamplingParams:
    """Takes what belongs to it out of `options`. Raises InputError for a value out of range."""
    schema = options.pop("json_schema")
    values = {name: options.pop(name) for name in _NAMES}
    params = SamplingParams(**values, json_schema=None if schema is None else schema.read())
    params.submit("", "check")
    return params
