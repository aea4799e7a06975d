"""The options about sampling, derived from `SamplingFields`, and the parameters that they become."""

import functools
from collections.abc import Callable
from typing import IO, Any

import click

from orchestrator.api.sampling import PRESET_FIELDS, PRESETS, SamplingParams, number_fields
from orchestrator.cli.configuration import filled_in
from orchestrator.cli.pipeline_options import given_only, number_range, option
from protocol.bounded_files import bounded
from protocol.errors import InputError
from protocol.ineffective import Ineffective, declared

CommandFunction = Callable[..., Any]
NOT_OPTIONS = {
    "repetition_context": "the default serves every text; programs can set it",
    "logprobs": "a terminal shows text alone; programs can ask for them",
}
"""Fields of `SamplingFields` without a derived option, and why."""
_FIELDS = number_fields(NOT_OPTIONS)
_OWN = "the model's own"


_PRESET = option(
    "--preset",
    Ineffective(
        "all that it would set is given too",
        lambda facts: {field.name for field in PRESET_FIELDS} <= facts["flags"],
    ),
    type=click.Choice(list(PRESETS)),
    help=f"Values for {', '.join(field.option for field in PRESET_FIELDS)}.",
)
_EFFECTS = declared(SamplingParams)


def _of_request(flag: str, **attributes: Any) -> Callable[[CommandFunction], CommandFunction]:
    """The option of a field of `SamplingParams`."""
    return option(flag, *_EFFECTS[flag.removeprefix("--").replace("-", "_")], **attributes)


_OPTIONS = [
    _PRESET,
    *(
        _of_request(
            field.option,
            type=number_range(field.kind, field.limits),
            default=field.default,
            show_default=_OWN if field.of_model else True,
            help=field.limits.description,
        )
        for field in _FIELDS
    ),
    click.option("--json-schema", type=click.File("r", encoding="utf-8"), help="Only JSON that fits this schema."),
    _of_request(
        "--seed",
        type=click.IntRange(0),
        help="Equal seeds give equal text. Default: a fresh one, shown in the summary.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        show_default="what is left of the context",
        help="Of an answer, at most.",
    ),
]
_NAMES = (
    *(field.name for field in _FIELDS),
    "seed",
    "max_tokens",
    "stop",
)


def sampling_options(command: CommandFunction) -> CommandFunction:
    """The options that `sampling` takes, with the values of `--preset` filled in."""

    @functools.wraps(command)
    def chosen(*arguments: Any, preset: str | None, **options: Any) -> Any:
        values = PRESETS[preset] if preset is not None else {}
        return command(*arguments, **filled_in(options, "preset", values))

    for each in reversed(_OPTIONS):
        chosen = each(chosen)
    return chosen


def sampling(options: dict[str, Any]) -> SamplingParams:
    """Takes its own options out of `options`. Raises InputError for a value out of range."""
    schema = options.pop("json_schema")
    values = {name: options.pop(name) for name in _NAMES}
    params = SamplingParams(**values, json_schema=None if schema is None else _schema(schema))
    params.submit("", "check")
    return params


def _schema(file: IO[str]) -> str:
    try:
        return bounded(file, 1).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise InputError(f"The schema {file.name} can't be read ({reason}): give a file with JSON.") from error


def server_options(command: CommandFunction) -> CommandFunction:
    """`--preset` and the options of a server for requests that leave a field open."""
    command = click.option(
        "--reasoning-eos",
        type=click.Choice(["keep", "close"]),
        show_default="keep; close with a preset, and under launch",
        help="What an end inside a thought ends: the answer (keep) or the thought (close), in requests that name none.",
    )(command)
    for field in reversed(PRESET_FIELDS):
        command = click.option(
            field.option,
            type=number_range(field.kind, field.limits),
            default=field.default,
            show_default=_OWN if field.of_model else True,
            help="For requests that name none.",
        )(command)
    return _PRESET(command)


def server_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of `server_options` out of `options`, with the values of `--preset` filled in. What is left to
    the model is not among them."""
    preset = options.pop("preset")
    values = {name: options.pop(name) for name in (*(field.name for field in PRESET_FIELDS), "reasoning_eos")}
    chosen = {} if preset is None else {**PRESETS[preset], "reasoning_eos": "close"}
    return given_only(filled_in(values, "preset", chosen))
