"""Several models behind a server, each loaded when a request names it; and what the page shows of them."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.model_table import ModelName, ModelPhase, Seconds
from orchestrator.http.models.dispatch import (
    ChunkForm,
    Dispatch,
    LineForm,
    ModelQuestion,
    PingForm,
    QueuedForm,
    StreamForm,
)
from orchestrator.http.models.host import ModelHost
from orchestrator.http.monitoring.health import Condition, Health
from orchestrator.http.monitoring.live import Watchable
from orchestrator.http.ollama.answer import empty_line
from orchestrator.http.ollama.request import keep_seconds, own_name
from orchestrator.http.ollama.routes import CHAT, GENERATE
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.routes import CHATS
from orchestrator.http.server import OfferedModel
from orchestrator.http.tokens import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE
from protocol.errors import PipelineError
from protocol.messages.base import SequenceId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame

_NONE = "No model is loaded: the next request loads one."


class LatestModel:
    """The pipeline of that model, as the live page needs it."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def state(self) -> PipelineState | None:
        latest = self._host.latest
        return None if latest is None else await latest.server.backend.state()

    async def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        latest = self._host.latest
        if latest is None:
            raise PipelineError(_NONE)
        async with aclosing(latest.server.backend.watch(sequence)) as frames:
            async for frame in frames:
                if self._host.latest is not latest:
                    return
                yield frame


class LatestModelHealth(Health):
    """The condition of that model."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(LatestModel(host))
        self._host = host

    async def check(self) -> Condition:
        latest = self._host.latest
        return Condition("loading", _NONE) if latest is None else await latest.server.condition()


_EMPTY = (b"", b"null", b"[]", b'""')


class OllamaDispatch(Dispatch):
    def __init__(
        self,
        host: ModelHost,
        name_of: Callable[[ModelQuestion], ModelName],
        new_form: Callable[[ModelQuestion], StreamForm | None],
        patience: Seconds,
        *,
        chat: bool,
    ) -> None:
        """As of Dispatch."""
        super().__init__(host, name_of, new_form, patience)
        self._chat = chat

    def _early(self, name: ModelName, asked: ModelQuestion) -> Response | None:
        """A request without a prompt that keeps its model for no time only unloads it."""
        if asked.keep_alive is None or keep_seconds(asked.keep_alive) != 0:
            return None
        if bytes(asked.messages if self._chat else asked.prompt).strip() not in _EMPTY:
            return None
        self._host.keep(name, 0.0)
        return JSONResponse(empty_line(name, chat=self._chat, done=True, done_reason="unload"))

    def _admitted(self, name: ModelName, asked: ModelQuestion) -> None:
        if asked.keep_alive is not None:
            self._host.keep(name, keep_seconds(asked.keep_alive))


NewForm: TypeAlias = Callable[[ModelQuestion], StreamForm | None]
_FIRST_EVENT_SECONDS = 1.0
"""After which a stream that waits begins; an answer that begins earlier has an HTTP status of its own."""


class SeveralModels:
    """The models of a host, as `ServedModels` has them."""

    chats = True

    def __init__(self, host: ModelHost, offered: Sequence[OfferedModel], keep_alive: Seconds) -> None:
        """`keep_alive`: between two events of a stream that waits for its model."""
        self.offered = offered
        self.health: Health = LatestModelHealth(host)
        self._host = host
        self._keep_alive = keep_alive

    @property
    def shown(self) -> Watchable:
        return LatestModel(self._host)

    def server(self, name: ModelName) -> ModelServer | None:
        model = self._host.loaded(name)
        return None if model is None else model.server

    def memory(self, name: ModelName) -> tuple[int | None, Seconds | None]:
        return self._host.status(name).entry.bytes, self._host.left(name)

    async def report(self) -> tuple[Condition, dict[str, Any]]:
        """Degraded if one of the models is."""
        told = {model.name: await self._told(model.name) for model in self.offered}
        failing = next((each for each in told.values() if each["status"] in ("failed", "degraded")), None)
        condition = Condition("ok") if failing is None else Condition("degraded", failing["reason"])
        return condition, {"waiting": self._host.waiting, "models": told}

    def stop(self) -> None:
        self._host.stop()

    async def _told(self, name: ModelName) -> dict[str, Any]:
        """One model's state for /health."""
        table, server = self._host.status(name), self.server(name)
        if server is not None:
            condition = await server.condition()
            status, reason = condition.status, condition.reason
        elif table.phase is ModelPhase.ABSENT:
            status, reason = ("failed", table.failure) if table.failure else ("unloaded", "")
        else:
            status, reason = table.phase.value, self._host.doing(name)
        return {"status": status, "reason": reason, "running": len(table.running), "bytes": table.entry.bytes}

    def routes(self, names: Callable[[str | None], ModelName]) -> list[Route]:
        patience = min(_FIRST_EVENT_SECONDS, self._keep_alive)
        forms: dict[str, NewForm] = {
            "/v1/completions": lambda asked: ChunkForm(chat=False) if asked.stream is True else None,
            **dict.fromkeys(CHATS, lambda asked: ChunkForm(chat=True) if asked.stream is True else None),
            "/v1/responses": lambda asked: QueuedForm() if asked.stream is True else None,
            "/v1/responses/input_tokens": lambda _: None,
            "/v1/responses/compact": lambda _: None,
            **dict.fromkeys((TOKENIZE, DETOKENIZE, APPLY_TEMPLATE), lambda _: None),
            "/v1/messages": lambda asked: PingForm() if asked.stream is True else None,
            "/v1/messages/count_tokens": lambda _: None,
        }
        lines: dict[str, NewForm] = {
            path: lambda asked, chat=path == CHAT: None if asked.stream is False else LineForm(chat=chat)
            for path in (CHAT, GENERATE)
        }

        def named(asked: ModelQuestion) -> ModelName:
            return names(asked.model)

        def named_by_ollama(asked: ModelQuestion) -> ModelName:
            return names(own_name(asked.model or asked.name))

        return [
            *(
                Route(path, Dispatch(self._host, named, form, patience), methods=["POST"])
                for path, form in forms.items()
            ),
            *(
                Route(
                    path,
                    OllamaDispatch(self._host, named_by_ollama, form, patience, chat=path == CHAT),
                    methods=["POST"],
                )
                for path, form in lines.items()
            ),
        ]
