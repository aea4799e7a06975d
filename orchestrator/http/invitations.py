"""Join lines for workers of other machines, for clients with the key."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orchestrator.api.owner import attach_command
from orchestrator.http.errors import ApiError, of_pipeline
from orchestrator.http.monitoring.health import LOADING, StateSource
from protocol.errors import PipelineError
from protocol.messages.remote import Invitation


class Invitations:
    """`POST /v1/pipeline/invitation`: a join line, good for one machine."""

    def __init__(self, invite: Callable[[], Invitation] | None, pipeline: StateSource, key: str | None) -> None:
        """`invite` is None for a pipeline that no other machine can join. Without a `key` nobody is known to be the
        owner, so nobody gets a line."""
        self._invite = invite
        self._pipeline = pipeline
        self._key = key

    @property
    def offered(self) -> bool:
        return self._invite is not None and self._key is not None

    async def create(self, _: Request) -> Response:
        if self._invite is None:
            raise ApiError(404, "No machine can join this pipeline: start the server with --listen HOST:PORT.")
        if self._key is None:
            raise ApiError(
                403, "A server without a key gives no join lines: run `launch-pipeline workers invite` beside it."
            )
        try:
            state = await self._pipeline.state()
            if state is None:
                raise ApiError(503, LOADING, code="loading", headers={"retry-after": "5"})
            invitation = await asyncio.to_thread(self._invite)
        except PipelineError as error:
            raise of_pipeline(error) from error
        told: dict[str, Any] = {
            "line": invitation.line,
            "command": attach_command(invitation, state),
            "seconds": invitation.seconds,
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})
