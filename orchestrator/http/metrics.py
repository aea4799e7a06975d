"""Metrics of the server for Prometheus. Each server has its own registry, so that one process may hold several."""

import logging
import time
from collections import Counter as Counts
from collections.abc import AsyncIterator, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.result import Result
from orchestrator.http.generation import OutputSource
from orchestrator.http.live import Condition
from orchestrator.http.work import AdmissionLimit
from protocol.messages.client import PipelineState

log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STATUSES = ("ok", "loading", "degraded", "failed")


class Metrics:
    def __init__(self, limit: AdmissionLimit) -> None:
        self.limit = limit
        self._registry = CollectorRegistry()
        own: Any = {"namespace": "launch_pipeline", "registry": self._registry}
        seconds = {"buckets": _SECONDS, **own}
        self._requests = Counter("http_requests", "Answers by route and status", ["route", "status"], **own)
        self._tokens = Counter("tokens", "Tokens by kind", ["kind"], **own)
        self._finished = Counter("generations", "Finished generations by reason", ["reason"], **own)
        self._latency = Histogram("generation_seconds", "From admission to the last token", **seconds)
        self._first = Histogram("time_to_first_token_seconds", "From admission to the first text", **seconds)
        self._rate = Summary("tokens_per_second", "Of each generation, from the end of prefill on", **own)
        self._shares = {
            "hit_rate": Summary("hit_rate", "Share of rounds whose new root the tree already had", **own),
            "acceptance_rate": Summary("acceptance_rate", "Share of verified tokens that were accepted", **own),
            "target_busy": Summary("target_busy_share", "Share of decoding time that the target worked", **own),
            "draft_busy": Summary("draft_busy_share", "Share of decoding time that the draft worked", **own),
        }
        open_text = "Places taken by generations, counts of tokens and embeddings"
        Gauge("open_generations", open_text, **own).set_function(lambda: limit.taken)
        Gauge("places", "Generations that may be open at once", **own).set(limit.most)
        self._waiting = Gauge("queue", "Open generations without any text yet", **own)
        self._lost = Gauge("worker_restarts", "Workers that went down; local ones are restarted", **own)
        self._kv_warnings = Counter("kv_warnings", "KV that could not be used or kept, for a prefill each", **own)
        self._counted_warnings: dict[str, int] = {}
        """By the session of a pipeline."""
        self._noted = Counter("warned_requests", "Requests whose answer has warnings, by kind", ["kind"], **own)
        self._noted_so_far = Counts[str]()
        self._status = Gauge("status", "1 for the status that /health reports", ["status"], **own)

    def text(self, condition: Condition) -> bytes:
        """All metrics in Prometheus' text format; `condition` gives those of the pipeline."""
        for status in _STATUSES:
            self._status.labels(status).set(status == condition.status)
        if condition.state is not None:
            self._lost.set(condition.state.lost)
            self._count_warnings(condition.state)
        return generate_latest(self._registry)

    def _count_warnings(self, state: PipelineState) -> None:
        before = self._counted_warnings.get(state.session, 0)
        self._counted_warnings[state.session] = state.kv_warnings
        self._kv_warnings.inc(max(0, state.kv_warnings - before))

    def answered(self, route: str, status: int) -> None:
        self._requests.labels(route, status).inc()

    def noted(self, kinds: Iterable[str]) -> None:
        """A request whose answer has warnings of these kinds. The log has the 1st, the 10th, the 100th of each kind."""
        for kind in kinds:
            self._noted.labels(kind).inc()
            self._noted_so_far[kind] += 1
            if str(self._noted_so_far[kind]).strip("0") == "1":
                log.warning("answers with a warning (%s): %d", kind, self._noted_so_far[kind])

    async def measured(self, pieces: OutputSource) -> AsyncIterator[str]:
        """The same pieces, measured."""
        began = time.monotonic()
        waiting = True
        self._waiting.inc()
        try:
            async for piece in pieces:
                if waiting:
                    waiting = False
                    self._waiting.dec()
                    self._first.observe(time.monotonic() - began)
                yield piece
        finally:
            if waiting:
                self._waiting.dec()
            self._end(pieces.result, time.monotonic() - began)

    def _end(self, result: Result | None, seconds: float) -> None:
        self._finished.labels("unfinished" if result is None else result.finish_reason).inc()
        if result is None:
            return
        figures = result.statistics
        self._latency.observe(seconds)
        self._rate.observe(figures.tokens_per_second)
        self._tokens.labels("prompt").inc(figures.prompt_tokens)
        self._tokens.labels("generated").inc(figures.generated_tokens)
        self._tokens.labels("adopted").inc(figures.adopted_tokens)
        for name, summary in self._shares.items():
            share = getattr(figures, name)
            if share is not None:
                summary.observe(share)


class Counted:
    """ASGI middleware that counts responses."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        """All paths that are not in `routes` count as one route, `other`."""
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in self._routes else "other"
                self._metrics.answered(route, message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)
