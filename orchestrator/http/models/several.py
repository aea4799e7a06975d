"""Several models behind a server, each loaded when a request names it; and what the page shows of them."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.anthropic.answer import WaitingPings
from orchestrator.http.generation import WaitingStream
from orchestrator.http.model_table import ModelName, ModelPhase, Seconds
from orchestrator.http.models.dispatch import Dispatch, ModelQuestion
from orchestrator.http.models.host import ModelHost
from orchestrator.http.monitoring.health import Condition, Health
from orchestrator.http.monitoring.live import Watchable
from orchestrator.http.ollama.answer import WaitingLines, empty_line
from orchestrator.http.ollama.request import keep_seconds, own_name
from orchestrator.http.ollama.routes import CHAT, GENERATE
from orchestrator.http.openai.answer import WaitingChunks
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.routes import CHATS
from orchestrator.http.responses.answer import QueuedResponse
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
        return Condition("loading", _NONE) if latest is None else await latest.server.health.check()


_EMPTY = (b"", b"null", b"[]", b'""')


class OllamaDispatch(Dispatch):
    def __init__(
        self,
        host: ModelHost,
        name_of: Callable[[ModelQuestion], ModelName],
        patience: Seconds,
        *,
        chat: bool,
    ) -> None:
        """As of Dispatch."""
        super().__init__(host, name_of, partial(WaitingLines, chat=chat), patience)
        self._chat = chat

    def _streams(self, asked: ModelQuestion) -> bool:
        return asked.stream is not False

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
            condition = await server.health.check()
            status, reason = condition.status, condition.reason
        elif table.phase is ModelPhase.ABSENT:
            status, reason = ("failed", table.failure) if table.failure else ("unloaded", "")
        else:
            status, reason = table.phase.value, self._host.doing(name)
        return {"status": status, "reason": reason, "running": len(table.running), "bytes": table.entry.bytes}

    def routes(self, names: Callable[[str | None], ModelName]) -> list[Route]:
        patience = min(_FIRST_EVENT_SECONDS, self._keep_alive)
        streams: dict[str, Callable[[ModelName], WaitingStream] | None] = {
            "/v1/completions": partial(WaitingChunks, "text"),
            **dict.fromkeys(CHATS, partial(WaitingChunks, "chat")),
            "/v1/responses": QueuedResponse,
            "/v1/messages": lambda _: WaitingPings(),
            **dict.fromkeys(("/v1/responses/input_tokens", "/v1/responses/compact", "/v1/messages/count_tokens")),
            **dict.fromkeys((TOKENIZE, DETOKENIZE, APPLY_TEMPLATE)),
        }

        def named(asked: ModelQuestion) -> ModelName:
            return names(asked.model)

        def named_by_ollama(asked: ModelQuestion) -> ModelName:
            return names(own_name(asked.model or asked.name))

        endpoints: dict[str, Dispatch] = {
            **{path: Dispatch(self._host, named, stream, patience) for path, stream in streams.items()},
            CHAT: OllamaDispatch(self._host, named_by_ollama, patience, chat=True),
            GENERATE: OllamaDispatch(self._host, named_by_ollama, patience, chat=False),
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
