"""`launch-pipeline serve`: options to the HTTP server and its pipeline, until Ctrl-C."""

import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.configured_models import ConfiguredModel, configured_models
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import address_option, facts, option, pipeline_options, without_effect
from orchestrator.cli.pipelines import (
    ConversionBar,
    Notices,
    first_models,
    opened,
    print_notes,
    refuse_without_tools,
    target_folder,
    tokenizer_folder,
)
from orchestrator.cli.remote_workers import invited, listening_options
from orchestrator.cli.running_pipelines import keeps_running
from orchestrator.cli.sampling_options import server_defaults, server_options
from orchestrator.cli.sentences import say
from orchestrator.http.model_table import ModelEntry, ModelName
from orchestrator.http.settings import EmbeddingSettings, ServerSettings, fresh_key, loopback
from orchestrator.machine.default_target import default_pair_state
from orchestrator.machine.hardware import usable_bytes
from orchestrator.machine.memory.budget import GIB
from orchestrator.machine.servers import announced, http_address
from orchestrator.runtime.memory_plan import PipelineMemory, require_room
from orchestrator.text.answer_format import teaches_tools
from orchestrator.text.chat_template import own_template
from protocol.bounded_files import read_bounded
from protocol.contracts.coreml import Progress
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.ineffective import Ineffective
from protocol.messages.client import PipelineState
from protocol.paths import servers_folder
from protocol.shown_names import model_name


def serve_models(
    models: Sequence[ConfiguredModel],
    settings: ServerSettings,
    port: int,
    made: bool,
    *,
    keep_minutes: float,
    memory_gib: float | None,
) -> None:
    """`keep_minutes`: how long a model without requests stays loaded, 0 for ever. `memory_gib`: for all models, None
    for a share of this machine's. Models may be fetched. Raises InputError for one that can't be had."""
    settings = dataclasses.replace(settings, names=tuple(name for model in models for name in model.names))
    # The libraries of the server take a while, which other commands need not wait for.
    from orchestrator.http.model_host import ModelPipeline
    from orchestrator.http.run import ModelMemory, run_models

    room = usable_bytes() if memory_gib is None else int(memory_gib * GIB)
    if settings.embedding is not None:
        room -= (size := ModelFolder(settings.embedding.folder).size)
        if room <= 0:
            raise InputError(
                f"The embedding model alone takes {size / GIB:.1f} GiB of the {(room + size) / GIB:.1f} GiB for "
                "models: raise --models-memory, or choose a smaller one."
            )
    shared = ModelMemory(room=room, keep=keep_minutes * 60 or None)
    with _listener(settings, port) as listener:
        notices = Notices(at_once=True)
        served: list[tuple[ModelEntry, ModelPipeline]] = []
        left = room
        # Pinned models are always loaded: others have what these leave.
        for model in sorted(models, key=lambda model: (not model.pinned, model.settings.context == "auto")):
            folder, memory = _examined(model, left)
            left -= memory.bytes if model.pinned else 0
            entry = ModelEntry(ModelName(model.name), memory.bytes, model.pinned, memory.kv_for)
            make = partial(_made, model.settings.changed(**memory.options), notices)
            served.append((entry, ModelPipeline(model.names, folder, make)))
        served.sort(key=lambda each: settings.names.index(each[0].name))
        _require_pinned_fit([entry for entry, _ in served], room)
        run_models(served, shared, settings, listener, made, say)


@contextmanager
def _listener(settings: ServerSettings, port: int) -> Iterator[socket.socket]:
    """Raises InputError if the server can't listen there."""
    from orchestrator.http.run import bound

    with bound(settings.hosts[0], port) as listener:
        address = http_address(*listener.getsockname()[:2])
        with announced(servers_folder(), address, settings.key) as note:
            print_notes([note])
            yield listener


def _examined(model: ConfiguredModel, room: int) -> tuple[Path, PipelineMemory]:
    """Folder of the target, and the memory that the model takes, with a context and caches for KV that leave it within
    `room` if that is possible. Raises InputError, which names the model."""
    try:
        folder = target_folder(model.settings.target)
        with ConversionBar(quiet=False) as bar:
            pipeline = Pipeline(settings=_with_caches(model.settings), on_progress=bar, room=room)
        print_notes([pipeline.note and f"{model.name}: {pipeline.note}"])
        return folder, pipeline.memory()
    except InputError as error:
        raise InputError(f"The model {model.name} can't be served. {error}") from error


def _with_caches(settings: PipelineSettings) -> PipelineSettings:
    """With memory for KV where a model's options state none: several models share what there is."""
    if not settings.arenas:
        return settings
    return settings.changed(arena_memory=settings.arenas, prefix_cache_memory=settings.prefix_cache)


def _made(settings: PipelineSettings, notices: Notices, tell: Callable[[str], None]) -> Pipeline:
    def on_progress(progress: Progress) -> None:
        tell(f"{progress.stage}, {progress.done} of {progress.total}")

    return Pipeline(settings=settings, on_progress=on_progress, on_notice=notices)


def _require_pinned_fit(entries: Sequence[ModelEntry], room: int) -> None:
    pinned = [entry for entry in entries if entry.pinned]
    if sum(entry.bytes for entry in pinned) > room:
        sizes = ", ".join(f"{entry.name} {entry.need}" for entry in pinned)
        raise InputError(
            f"The pinned models need more than the {room / GIB:.1f} GiB for models ({sizes}): pin fewer, or raise "
            "--models-memory."
        )


_INPUT, _OUTPUT, _ERRORS = 0, 1, 2


def follow_starter() -> None:
    """End with the process that started this one. Its log is standard output, to which nothing is written at first.

    A first byte on standard input sends standard error to the log, since the terminal is another program's from then
    on. The end of standard input ends this process.
    """
    log = os.dup(_OUTPUT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _OUTPUT)
    os.close(nowhere)
    threading.Thread(target=_follow, args=(log,), daemon=True, name="starter").start()


def _follow(log: int) -> None:
    os.read(_INPUT, 1)
    os.dup2(log, _ERRORS)
    while os.read(_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


_OF_ONE_MODEL = ("model_name", "record", "listen", "target_engine")
_STAYS = "this server has one model, which stays loaded"
_MOST = "Texts generated at once; a request beyond that is answered with status 429."


@click.command(
    cls=BriefCommand, brief="pair target draft host port api-key no-api-key model-name preset context listen address"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 picks one.")
@click.option(
    "--api-key",
    envvar="LAUNCH_PIPELINE_API_KEY",
    show_envvar=True,
    help="What clients must show. Default: one that is made and printed.",
)
@click.option(
    "--api-key-file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file that holds the key, which other programs can't see there.",
)
@click.option("--no-api-key", is_flag=True, help="Accept every program of this machine; only on loopback.")
@click.option("--model-name", multiple=True, help="What clients call the model; may be given several times.")
@server_options
@click.option("--max-requests", type=click.IntRange(1, 256), default=64, show_default=True, help=_MOST)
@click.option("--max-body", type=click.IntRange(1, 256), default=8, show_default=True, help="MiB of a request.")
@option(
    "--keep",
    Ineffective(_STAYS, several=False, embedding_model=None),
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="MINUTES",
    help="How long a model without requests stays loaded, if the configuration has several models, and the embedding "
    "model; 0: for ever.",
)
@option(
    "--models-memory",
    Ineffective(_STAYS, several=False),
    type=click.FloatRange(0, min_open=True),
    metavar="GIB",
    help="For all models together, if the configuration has several.  [default: three quarters of this machine's]",
)
@click.option(
    "--embedding-model",
    metavar="MODEL",
    help="Also serve embeddings: a folder or Hugging Face id of an embedding model, for mlx-embeddings, which the "
    "first use installs in an environment of its own (1 GB).",
)
@click.option("--allow-host", multiple=True, metavar="NAME", help="A name of this machine that clients use.")
@click.option("--allow-origin", multiple=True, metavar="URL", help="A web page that may ask, from a browser.")
@address_option
@listening_options
@pipeline_options
@click.option("--for-starter", hidden=True, help="What needs a model that knows tools; may be empty.")
@facts(temperature=None)
@stays_awake
def serve(for_starter: str | None, running: str | None, settings: PipelineSettings, **options: Any) -> None:
    """Serve the pipeline to programs that speak OpenAI's, Anthropic's or Ollama's API: editors, agents, chat pages.

    \b
    launch-pipeline serve --pair qwen2.5-3b
    launch-pipeline serve --address tcp://127.0.0.1:5570
    launch-pipeline serve --listen 0.0.0.0:5571 --draft-engine none
    """
    if for_starter is not None:
        follow_starter()
    models = configured_models(click.get_current_context(), _OF_ONE_MODEL)
    keep, memory = options.pop("keep"), options.pop("models_memory")
    defaults = ({} if for_starter is None else {"reasoning_eos": "close"}) | server_defaults(options)
    notes = without_effect(settings, several=bool(models))
    if running is None and not models:
        settings, first = first_models(settings, asks=True, tools=bool(for_starter))
        notes.append(first)
        if settings.memory_check != "off" and settings.target_engine == "mlx" and settings.target_hosts is None:
            require_room(settings.target)
        if for_starter and not _knows_tools(settings):
            refuse_without_tools(for_starter, settings.target or default_pair_state().name)
    embedding, target = _embedding(options.pop("embedding_model"), keep), settings.target
    server, port, made = _server(options, target, defaults, embedding)
    if models:
        serve_models(models, server, port, made, keep_minutes=keep, memory_gib=memory)
        return
    client = None if running is None else Client(running)
    folder = target_folder(target) if client is None else tokenizer_folder(client.state(), target)
    if not server.names:
        server = dataclasses.replace(server, names=(model_name(folder),))
    if target is None:
        # What was fetched for the name is not looked for again; a name of the user's is what notes speak of.
        settings = settings.changed(target=folder)
    # The libraries of the server take a while, which other commands need not wait for.
    from orchestrator.http.backend import RunningPipeline
    from orchestrator.http.run import run

    with _listener(server, port) as listener:
        if client is not None:
            print_notes(notes)
            run(RunningPipeline(client), folder, server, listener, made, say)
            return
        pipeline = opened(settings, notes, quiet=False, on_notice=Notices(at_once=True), conversing=True)
        if settings.listen is None:
            run(pipeline, folder, server, listener, made, say, when_ready=lambda _: keeps_running(pipeline, settings))
            return

        def when_ready(state: PipelineState) -> None:
            keeps_running(pipeline, settings)
            # Each time: the join line of an orchestrator that has ended opens nothing.
            invited(pipeline.owner, state, err=True)

        run(pipeline, folder, server, listener, made, say, lambda: pipeline.owner.invite(), when_ready)


def _knows_tools(settings: PipelineSettings) -> bool:
    """Whether the target does. The default target, which is not fetched to find out, does not."""
    if settings.target is None or settings.target_engine == "none":
        return settings.target_engine == "none"
    template = own_template(str(target_folder(settings.target)))
    return template is not None and teaches_tools(template)


def _embedding(name: str | None, keep_minutes: float) -> EmbeddingSettings | None:
    if name is None:
        return None
    from orchestrator.http.embedding_process import embedding_command, embedding_folder

    with ConversionBar(quiet=False) as bar:
        folder = embedding_folder(name, bar)
        command = embedding_command(folder, bar)
    return EmbeddingSettings(name=_called(name), folder=folder, command=command, keep=keep_minutes * 60 or None)


def _server(
    options: dict[str, Any], target: str | None, defaults: dict[str, Any], embedding: EmbeddingSettings | None
) -> tuple[ServerSettings, int, bool]:
    """From the options that are not the pipeline's: settings, the port, and whether the key was made here."""
    host, port = options.pop("host"), options.pop("port")
    key, made = server_key(options.pop("api_key"), options.pop("api_key_file"), options.pop("no_api_key"), host)
    settings = ServerSettings(
        key=key,
        names=_names(options.pop("model_name"), target),
        hosts=(host, *options.pop("allow_host")),
        origins=tuple(map(page_origin, options.pop("allow_origin"))),
        most_open=options.pop("max_requests"),
        most_bytes=options.pop("max_body") << 20,
        defaults=defaults,
        embedding=embedding,
    )
    return settings, port, made


def page_origin(given: str) -> str:
    """As browsers write it, since they are compared as texts. Raises InputError for what names no web pages."""
    try:
        parts = urlsplit(given.strip())
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError:
        parts, port, host = urlsplit(""), None, ""
    if given == "*":
        return given
    if not parts.scheme or not host or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise InputError(
            f"--allow-origin {given} names no web pages: give their scheme, host and port, like http://localhost:3000, "
            "or * for all. Files and sandboxed pages can't be told apart (null)."
        )
    shown = "" if port in (None, {"http": 80, "https": 443}.get(parts.scheme)) else f":{port}"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{shown}"


def _names(given: tuple[str, ...], target: str | None) -> tuple[str, ...]:
    """None for a model without a name of its own, which then has that of its folder."""
    return given if given or target is None else (_called(target),)


def _called(model: str) -> str:
    """A folder by its name, a Hugging Face id as it is."""
    path = Path(model).expanduser()
    return model_name(path.resolve()) if path.exists() else model


_SHORTEST_KEY = 8


def server_key(given: str | None, file: Path | None, none: bool, host: str) -> tuple[str | None, bool]:
    """The key that clients must show, and whether it was made here. `none`: every program may ask.

    Raises InputError for a file that can't be read, for a server without a key that other machines can reach, for a
    key that is too short, and for more than one of the options.
    """
    key = _given_key(given, file)
    if none and key:
        raise InputError("--no-api-key and an API key (option or environment) exclude each other: leave one out.")
    if none and not loopback(host):
        raise InputError(f"--host {host} can be reached from other machines: leave --no-api-key out.")
    if key is not None and (len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable()):
        raise InputError(
            f"An API key needs at least {_SHORTEST_KEY} printable ASCII characters: leave it out, and one is made."
        )
    return (None, False) if none else (key, False) if key else (fresh_key(), True)


def _given_key(key: str | None, file: Path | None) -> str | None:
    """The user's key, without blanks around it, which no header can carry. Raises InputError for two of them, and for a
    file that can't be read."""
    if file is None:
        return key and key.strip()
    if key is not None:
        raise InputError(
            "--api-key-file and an API key (option, environment or configuration) exclude each other: leave one out."
        )
    try:
        return read_bounded(file, 1).decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise InputError(f"{file} can't be read ({reason}): put the key alone into it.") from error
