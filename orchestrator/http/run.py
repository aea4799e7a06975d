"""Runs the HTTP server together with its pipeline, or with several models."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import uvicorn

from orchestrator.http.app import application, server_of_one
from orchestrator.http.backend import PipelineBackend, PipelineThread, ServedPipeline
from orchestrator.http.connections import connection_class
from orchestrator.http.metrics import Metrics
from orchestrator.http.model_host import ModelHost, ModelPipeline, PipelineLoader
from orchestrator.http.model_table import ModelEntry, ModelTable, Seconds
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.server import OfferedModel, Server
from orchestrator.http.settings import ServerSettings, loopback
from orchestrator.http.several_models import SeveralModels
from orchestrator.http.work import AdmissionLimit
from orchestrator.machine.network import require_unused
from orchestrator.machine.target import level_note
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation
from protocol.processes import descriptor_limit, raise_descriptor_limit

P = ParamSpec("P")
T = TypeVar("T")


class Say(Protocol):
    def __call__(self, text: str, *, err: bool = False) -> None:
        """Print sentences for the user, with `err` on stderr."""
        ...


_GRACE_SECONDS = 2
"""For responses in progress when the server ends."""
_BACKLOG = 512
"""Connections that wait in the system until they are accepted."""
_SEND_BUFFER = 1 << 15
"""Bytes of a connection that wait in the system until the client takes them; Linux doubles it."""


_PAUSE_SECONDS = 30.0
"""After a model could not be loaded, until it is tried again."""


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """What all models together may take, and for how long."""

    room: int
    """Bytes."""
    keep: Seconds | None
    """How long a model without requests stays loaded; None for ever."""


def run(
    pipeline: ServedPipeline,
    folder: Path,
    settings: ServerSettings,
    listener: socket.socket,
    made: bool,
    say: Say,
    invite: Callable[[], Invitation] | None = None,
    when_ready: Callable[[PipelineState], None] = lambda _: None,
) -> None:
    """Serve `pipeline` until it or the server ends. `folder`: of tokenizer and chat template. `made`: see `greet`.
    `invite`: see `server_of_one`. `when_ready` is called each time that the models are loaded."""
    raise_descriptor_limit()
    codec = TextCodec(folder)
    backend = PipelineBackend(pipeline)
    server = http_server(server_of_one(backend, codec, ChatTemplate(folder, codec), settings, invite))

    def on_ready(state: PipelineState) -> None:
        backend.ready = True
        say(ready_line(state))
        when_ready(state)

    def on_restart(last_words: str) -> None:
        backend.restarting()
        say(
            "The orchestrator ended unexpectedly: another one starts. Requests get 503 meanwhile. "
            f"Its last words: {last_words}",
            err=True,
        )

    thread = PipelineThread(pipeline, on_ready, lambda: setattr(server, "should_exit", True), on_restart)
    greet(settings, listener, made, say)
    say("Loading models ...")
    thread.start()
    try:
        asyncio.run(_serve(server, listener, backend))
    finally:
        thread.leave()
        pipeline.close()
    if thread.failure is not None:
        raise thread.failure


def run_models(
    models: Sequence[tuple[ModelEntry, ModelPipeline]],
    memory: ModelMemory,
    settings: ServerSettings,
    listener: socket.socket,
    made: bool,
    say: Say,
) -> None:
    """Until Ctrl-C. `models`: the first is the default. `made`: the server made the key itself."""
    raise_descriptor_limit()
    figures, store = Metrics(AdmissionLimit(settings.most_open)), ResponseStore()
    table = ModelTable(
        [entry for entry, _ in models],
        room=memory.room,
        keep=memory.keep,
        most_waiting=settings.most_open,
        pause=_PAUSE_SECONDS,
    )
    loader = PipelineLoader([pipeline for _, pipeline in models], settings, figures, store)
    host = ModelHost(table, loader)
    offered = [OfferedModel(entry.name, pipeline.target, pipeline.names[1:]) for entry, pipeline in models]
    server = http_server(Server(SeveralModels(host, offered, settings.keep_alive), settings, figures, store))
    greet(settings, listener, made, say)
    say("Each model is loaded when a request names it. Ctrl-C ends it.")
    try:
        asyncio.run(_serve_models(server, listener, host))
    finally:
        loader.close()


def http_server(server: Server) -> uvicorn.Server:
    """What listens for requests to `server`."""
    settings = replace(server.settings, connections=server.settings.connections.within(descriptor_limit()))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        application(server),
        http=connection_class(settings),
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=settings.connections.most,
        timeout_keep_alive=settings.connections.idle_seconds,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    return _Listener(config, server.stop)


class LeftThreads(ThreadPoolExecutor):
    """A thread for each call. The end waits for them for a short time only: what computes in a library, such as a slow
    pattern of a tokenizer.json, can't be stopped."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[threading.Thread] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)
            finally:
                self._open.discard(threading.current_thread())

        thread = threading.Thread(target=run, daemon=True)
        self._open.add(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        ending = time.monotonic() + _GRACE_SECONDS
        for thread in list(self._open) if wait else ():
            thread.join(max(0.0, ending - time.monotonic()))


class _Listener(uvicorn.Server):
    """Stops all generation before it waits for its connections to end."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_default_executor(LeftThreads())
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop()
        await super().shutdown(sockets)


async def _serve(server: uvicorn.Server, listener: socket.socket, backend: PipelineBackend) -> None:
    try:
        await server.serve(sockets=[listener])
    finally:
        backend.close()


async def _serve_models(server: uvicorn.Server, listener: socket.socket, host: ModelHost) -> None:
    host.start()
    await server.serve(sockets=[listener])


def ready_line(state: PipelineState) -> str:
    """What the terminal says once the models are loaded."""
    ready = ("Ready.", level_note(state.level)) if state.context else ("No target has joined yet.",)
    return " ".join(filter(None, (*ready, "Ctrl-C ends it.")))


def greet(settings: ServerSettings, listener: socket.socket, made: bool, say: Say) -> None:
    """Print addresses and key. `made`: the server made the key itself."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"Serving {', '.join(settings.names)} at http://{shown}:{port}/v1")
    say(f"Page at http://{shown}:{port}/" + (f"#key={settings.key}" if made else ""))
    if made:
        say(f"API key, until the server ends: {settings.key}")
    if not loopback(host):
        say("Key and texts travel unencrypted beyond this machine: see docs/use/serving/access.md.", err=True)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError if this machine has no such address, or another program uses it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        require_unused(str(address[0]), port)
        # asyncio sets TCP_NODELAY only on sockets whose protocol is TCP; socket.create_server does not set it.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. Linux's own grows to 4 MiB, which takes whole answers that nobody reads.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        # Python appends the address to the system's message.
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise InputError(
            f"Can't listen at {host}, port {port} ({reason}): choose others with --host and --port."
        ) from error
