"""Options that several commands share, and which of them the user gave. A field of `Options` is an option here."""

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args, get_origin

import click
import msgspec
from click.core import ParameterSource

from orchestrator.api.sampling.ineffective import ineffective
from orchestrator.cli.precedence import filled_in
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.models.checkpoints import demo_model
from orchestrator.machine.pairs.recommended_pairs import pairs
from orchestrator.machine.profiles.device_profiles import profile_names
from protocol.contracts.engines import AUTO, NO_DRAFT, PrefillEngineName, draft_model, offered_engines
from protocol.contracts.kv_bits import UNQUANTIZED, KvBits
from protocol.messages.base import MAX_CONTEXT

Command: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[Command], Command]

_DEMO = "demo"
_FASTER = "mlx, and on Apple silicon the faster of mlx and coreml"
_NOT_OFFERED = ("turn",)
"""Fields of `Options` that only the Python API offers."""

target_option = click.option(
    "--target",
    metavar="MODEL",
    help="Folder or Hugging Face id (mlx-lm format), or a GGUF file. Default: SmolLM2-135M-Instruct, fetched once.",
)
address_option = click.option("--address", help="Ask a pipeline that already runs there, instead of starting one.")
pace_option = click.option(
    "--pace",
    metavar="PROFILE",
    help=f"Be as slow as another device: {', '.join(profile_names())}, or a file that `calibrate` wrote. "
    "PROFILE@4: four times slower, for models that are slower here than there.",
)
target_hosts_option = click.option(
    "--target-hosts",
    metavar="FILE",
    help="Divide the target among the hosts in this file; the others run `launch-pipeline target-rank`. They know one "
    "another by the key in it; what they send, prompts included, is not encrypted.",
)
kv_bits_option = click.option(
    "--kv-bits",
    type=click.Choice(get_args(KvBits)),
    default=UNQUANTIZED,
    show_default=True,
    help="Of a target or a prefill worker: bits of each key and value.",
)


def draft_option(default: str = "") -> Decorator:
    """`default`: what is taken without the option."""
    words = (
        "The same for the draft: a model with the target's tokenizer, or a drafter that was trained for the target. "
        "exit or exit:LAYERS: the target's own first layers."
    )
    return click.option("--draft", metavar="MODEL", help=f"{words} {default}".strip())


def draft_engine_option(
    *parameters: str, optional: bool = False, with_model: bool = False, automatic: str = _FASTER
) -> Decorator:
    """The engines that the draft worker's modules declare.

    `optional`: also no draft at all. `with_model`: only engines that draft with a model, and no AUTO. `automatic`:
    what AUTO is to this command.
    """
    words = ({} if with_model else {AUTO: automatic}) | {
        name: engine.help for name, engine in offered_engines().items() if engine.model != "none" or not with_model
    }
    if optional:
        words[NO_DRAFT] = "the target alone"
    return click.option(
        "--draft-engine",
        *parameters,
        type=click.Choice(list(words)),
        default="mlx" if with_model else AUTO,
        show_default=True,
        help="; ".join(f"{name}: {word}" for name, word in words.items()) + ".",
    )


def pair_models(pair: str) -> dict[str, str]:
    """What `--pair` stands for: a value for `target` and for `draft`."""
    if pair == _DEMO:
        return {"target": str(demo_model("target")), "draft": str(demo_model("draft"))}
    models = pairs()[pair]
    return {"target": models.target.id, "draft": models.draft.id}


def pair_option(command: Command) -> Command:
    """--pair NAME is a recommended target and draft; --target and --draft given with the same strength win."""

    @functools.wraps(command)
    def with_models(*arguments: Any, pair: str | None, **options: Any) -> Any:
        values = {} if pair is None else pair_models(pair)
        if draft_model(options.get("draft_engine", AUTO)) == "none":
            values.pop("draft", None)
        return command(*arguments, **filled_in(options, "pair", values))

    words = "A recommended target and draft, see `launch-pipeline pairs`; demo: the tiny demo pair."
    return click.option("--pair", type=click.Choice([*pairs(), _DEMO]), metavar="NAME", help=words)(with_models)


def speculation_options(*names: str) -> Decorator:
    """An option for each of these fields of `Options`; for all that are offered if there is no name.

    An option that is not given is None, so that only given ones reach the pipeline; `strategy` has its default.
    """
    fields = {field.name: field for field in msgspec.structs.fields(Options)}
    chosen = [_derived(fields[name]) for name in names or fields if name not in _NOT_OFFERED]

    def decorate(command: Command) -> Command:
        for option in reversed(chosen):
            command = option(command)
        return command

    return decorate


def pipeline_options(command: Command) -> Command:
    """All options of a pipeline; the command gets them as keywords of `Pipeline`, None where not given."""
    for option in reversed(
        (
            pair_option,
            target_option,
            draft_option("Default: a shipped draft, where one fits."),
            draft_engine_option(optional=True),
            click.option(
                "--prefill-engine",
                type=click.Choice(get_args(PrefillEngineName)),
                default="none",
                show_default=True,
                help="Read prompts in a process of their own; guest: by `attach prefill`, which is then trusted with "
                "the text.",
            ),
            speculation_options(),
            target_hosts_option,
            click.option("--record", type=click.Path(dir_okay=False, writable=True), help="Write the event log here."),
            pace_option,
        )
    ):
        command = option(command)
    return command


def without_effect(values: Mapping[str, Any], **facts: Any) -> list[str]:
    """A sentence for each option on the command line that changes nothing beside the running command's others.

    `values`: the options in force, presets and pairs filled in. `facts`: what else the table of `ineffective` asks for.
    Settings from the environment and the configuration file are for many commands, so none of them is told.
    """
    context = click.get_current_context()
    given = [
        option
        for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]
    flags = {option.name: max(option.opts, key=len) for option in given if option.name}
    known = {"command": context.info_name, "flags": set(flags), **context.params, **values, **facts}
    return list(ineffective(known, flags))


def _derived(field: msgspec.structs.FieldInfo) -> Decorator:
    """The option of one field: its type, its help and its range come from the annotation."""
    flag = f"--{field.name.replace('_', '-')}"
    if field.name == "strategy":
        words = "; ".join(f"{name}: {strategy.summary}" for name, strategy in STRATEGIES.items())
        choice = click.Choice(list(STRATEGIES))
        return click.option(flag, type=choice, default=field.default, show_default=True, help=f"{words}.")
    plain, meta = _parts(field.type)
    if "auto" in str(plain) and get_origin(plain) is not Literal:
        return click.option(
            flag, type=TokensOrAuto(), metavar="N|auto", help=f"{meta.description}  [default: {field.default}]"
        )
    if get_origin(plain) is Literal:
        kind: Any = click.Choice(get_args(plain))
        limits = ""
    else:
        kind = plain
        limits = f"; {meta.ge} to {meta.le}"
    return click.option(flag, type=kind, help=f"{meta.description}  [default: {field.default}{limits}]")


class TokensOrAuto(click.ParamType[int | str]):
    """A number of tokens or of MiB, or auto."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return value
        return click.IntRange(0, MAX_CONTEXT).convert(value, param, ctx)


def _parts(annotation: Any) -> tuple[Any, msgspec.Meta]:
    """An annotated type and its metadata."""
    plain, *extras = get_args(annotation) if get_origin(annotation) is typing.Annotated else (annotation,)
    return plain, next((extra for extra in extras if isinstance(extra, msgspec.Meta)), msgspec.Meta())


def given_only(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}
