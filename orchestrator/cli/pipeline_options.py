"""Options that several commands share, and which of them the user gave. A field of `Options` is an option here."""

import difflib
import functools
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

import click
import msgspec
from click.core import ParameterSource

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.configuration import filled_in
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.checkpoints import demo_model
from orchestrator.machine.pairs.recommended_pairs import published, runnable
from protocol.contracts.engines import AUTO, NO_DRAFT, PrefillEngineName, draft_model, offered_engines
from protocol.contracts.model_folder import UNQUANTIZED, KvBits
from protocol.ineffective import SET, Ineffective, declared
from protocol.ineffective import without_effect as sentence
from protocol.messages.base import MAX_CONTEXT

Command: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[Command], Command]

_DEMO = "demo"
_FASTER = "mlx, and on Apple silicon the faster of mlx and coreml"
_HAS_TARGET = Ineffective("the pipeline that is asked has its target already", running=SET, tokenizes=False)
_ASKED = Ineffective("the pipeline that is asked runs already, with options of its own", running=SET)
_OF_PAIR = (
    _HAS_TARGET,
    Ineffective(
        "the pipeline that is asked has its draft already, and the target is named",
        lambda facts: "target" in facts["flags"],
        running=SET,
    ),
    Ineffective("both models are named", lambda facts: {"target", "draft"} <= facts["flags"]),
)
_SETTINGS = declared(PipelineSettings)


class Option(click.Option):
    """An option that declares when it changes nothing."""

    def __init__(self, flags: Sequence[str], ineffective: Sequence[Ineffective], **attributes: Any) -> None:
        super().__init__(flags, **attributes)
        self.ineffective = ineffective


def option(*words: str | Ineffective, **attributes: Any) -> Decorator:
    """As `click.option`; declarations stand beside the flags."""
    flags = [word for word in words if isinstance(word, str)]
    ineffective = [word for word in words if isinstance(word, Ineffective)]
    return click.option(*flags, cls=Option, ineffective=ineffective, **attributes)


def setting(flag: str, *words: str | Ineffective, **attributes: Any) -> Decorator:
    """The option of a field of `PipelineSettings`, whose declarations it has beside its own."""
    field = flag.removeprefix("--").replace("-", "_")
    return option(flag, _ASKED, *_SETTINGS[field], *words, **attributes)


target_option = option(
    "--target",
    _HAS_TARGET,
    metavar="MODEL",
    help="Folder or Hugging Face id (mlx-lm format), or a GGUF file. Default: SmolLM2-135M-Instruct, fetched once.",
)
address_option = click.option(
    "--address", "running", help="Ask a pipeline that already runs there, instead of starting one."
)
pace_option = setting(
    "--pace",
    metavar="PROFILE",
    help="Be as slow as another device: a profile's name (a wrong one lists all), or a file that `calibrate` wrote. "
    "PROFILE@4: four times slower, for models that are slower here than there.",
)


def target_hosts_option(*ineffective: Ineffective) -> Decorator:
    return setting(
        "--target-hosts",
        *ineffective,
        metavar="FILE",
        help="Divide the target among the hosts in this file; the others run `launch-pipeline target-rank`. They know "
        "one another by the key in it; what they send, prompts included, is not encrypted.",
    )


def kv_bits_option(*ineffective: Ineffective) -> Decorator:
    return setting(
        "--kv-bits",
        *ineffective,
        type=click.Choice(get_args(KvBits)),
        default=UNQUANTIZED,
        show_default=True,
        help="Of a target or a prefill worker: bits of each key and value.",
    )


def draft_option(*ineffective: Ineffective, default: str = "") -> Decorator:
    """`default`: what is taken without the option."""
    words = "The same for the draft: a model with the target's tokenizer, or a drafter that was trained for the target."
    return setting("--draft", *ineffective, metavar="MODEL", help=f"{words} {default}".strip())


def draft_engine_option(
    *parameters: str | Ineffective, optional: bool = False, with_model: bool = False, automatic: str = _FASTER
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
    return setting(
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
    models = runnable(pair)
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
    choice = NamedChoice([*published(), _DEMO], "`launch-pipeline pairs`")
    return option("--pair", *_OF_PAIR, type=choice, metavar="NAME", help=words)(with_models)


def pipeline_options(command: Command) -> Command:
    """All options of a pipeline; the command gets them, and others that are fields of them, as `settings`."""

    @functools.wraps(command)
    def with_settings(*arguments: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in PipelineSettings.__struct_fields__ if name in options}
        settings = PipelineSettings().changed(**given_only(given))
        return command(*arguments, settings=settings, **options)

    made: Command = with_settings
    for each in reversed(
        (
            pair_option,
            target_option,
            draft_option(default="Default: a shipped draft, where one fits."),
            draft_engine_option(optional=True),
            setting(
                "--prefill-engine",
                type=click.Choice(get_args(PrefillEngineName)),
                default="none",
                show_default=True,
                help="Read prompts in a process of their own; guest: by `attach prefill`, which is then trusted with "
                "the text.",
            ),
            *map(speculation_option, _offered()),
            target_hosts_option(),
            setting("--record", type=Destination(path_type=str), help="Write the event log here."),
            pace_option,
        )
    ):
        made = each(made)
    return made


def facts(**values: Any) -> Decorator:
    """What holds whenever the command runs, for the declarations of its options; stronger than options' values.

    `requests`: "one", or "in turn" if it sends several, one at a time. `tokenizes`: whether it needs the target's
    tokenizer for a pipeline that runs already. `temperature`: None if each request may have its own.
    """

    def decorate(command: Command) -> Command:
        vars(command)[_FACTS] = values
        return command

    return decorate


_FACTS = "facts"


def without_effect(settings: PipelineSettings | None = None, **facts: Any) -> list[str]:
    """A sentence for each option on the command line that changes nothing beside the running command's others.

    `settings`: those in force. `facts`: what else the declarations ask for, and values that are not the options' own.
    Settings from the environment and the configuration file are for many commands, so none of them is told.
    """
    context = click.get_current_context()
    given = [
        each
        for each in context.command.params
        if context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
    ]
    known = {
        **context.params,
        **({} if settings is None else msgspec.structs.asdict(settings)),
        **facts,
        **vars(context.command.callback).get(_FACTS, {}),
        "flags": {each.name for each in given},
    }
    options = (each for each in given if isinstance(each, Option))
    sentences = (sentence(max(each.opts, key=len), each.ineffective, known) for each in options)
    return list(filter(None, sentences))


def _offered() -> Iterator[str]:
    """Fields of `Options` that are options of a pipeline."""
    for field in msgspec.structs.fields(Options):
        if field.name == "strategy" or _parts(field.type)[1].description is not None:
            yield field.name


def speculation_option(name: str, *ineffective: Ineffective) -> Decorator:
    """The option of a field of `Options`: its type, its help and its range come from the annotation.

    An option that is not given is None, so that only given ones reach the pipeline; `strategy` has its default.
    """
    field = next(field for field in msgspec.structs.fields(Options) if field.name == name)
    make = functools.partial(setting, f"--{name.replace('_', '-')}", *ineffective)
    if name == "strategy":
        words = "; ".join(f"{name}: {strategy.summary}" for name, strategy in STRATEGIES.items())
        choice = click.Choice(list(STRATEGIES))
        return make(type=choice, default=field.default, show_default=True, help=f"{words}.")
    plain, meta = _parts(field.type)
    if get_origin(plain) is Union:
        _, bounds = _parts(get_args(plain)[0])
        assert isinstance(bounds.le, int)
        kind: Any = TokensOrAuto(bounds.le)
        return make(type=kind, metavar="N|auto", help=f"{meta.description}  [default: {field.default}]")
    kind = click.Choice(get_args(plain)) if get_origin(plain) is Literal else number_range(plain, meta)
    return make(type=kind, help=f"{meta.description}  [default: {field.default}]")


def number_range(kind: type, limits: msgspec.Meta) -> click.ParamType:
    """Numbers of `kind`, float or int, within `limits`."""
    least = limits.ge if limits.gt is None else limits.gt
    if kind is float:
        return click.FloatRange(least, limits.le, min_open=limits.gt is not None)
    return click.IntRange(None if least is None else int(least), None if limits.le is None else int(limits.le))


class Destination(click.Path):
    """A file or a folder that is written at the end, so that a path that can't be written is refused before the work
    begins."""

    def __init__(self, folder: bool = False, path_type: type = Path) -> None:
        super().__init__(path_type=path_type, dir_okay=folder, file_okay=not folder)
        self._folder = folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(value, param, ctx)
        path = Path(os.fsdecode(converted))
        above = path.absolute().parent
        # Folders are made, with those above them.
        while self._folder and not above.exists():
            above = above.parent
        if not above.is_dir():
            self.fail(f"{path} can't be written, since there is no folder {above}.", param, ctx)
        if not os.access(path if path.exists() else above, os.W_OK):
            self.fail(f"{path} can't be written, since {above} is not yours to write in.", param, ctx)
        return converted


class NamedChoice(click.Choice[str]):
    """One of many names: a sentence about another one suggests the nearest instead of all. `where`: what lists all."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        super().__init__(names)
        self._where = where

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        near = difflib.get_close_matches(str(value), self.choices, 1, 0.65)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        return f"there is no {str(value)!r}.{meant} {self._where} lists all."


class TokensOrAuto(click.IntRange):
    """A number of tokens or of MiB, or auto."""

    name = "whole number or auto"

    def __init__(self, most: int = MAX_CONTEXT) -> None:
        super().__init__(0, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


def _parts(annotation: Any) -> tuple[Any, msgspec.Meta]:
    """An annotated type and its metadata."""
    plain, *extras = get_args(annotation) if get_origin(annotation) is typing.Annotated else (annotation,)
    return plain, next((extra for extra in extras if isinstance(extra, msgspec.Meta)), msgspec.Meta())


def given_only(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}
