"""Join lines for workers of other machines, for clients with the key."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orchestrator.http.errors import ApiError, of_pipeline
from protocol.errors import PipelineError
from protocol.messages.remote import Invitation


class Invitations:
    """`POST /v1/pipeline/invitation`: a join line, good for one machine."""

    def __init__(self, invite: Callable[[], Invitation] | None, key: str | None) -> None:
        """`invite` is None for a pipeline that no other machine can join. Without a `key` nobody is known to be the
        owner, so nobody gets a line."""
        self._invite = invite
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
            invitation = await asyncio.to_thread(self._invite)
        except PipelineError as error:
            raise of_pipeline(error) from error
        told: dict[str, Any] = {
            "line": invitation.line,
            "command": f"launch-pipeline attach draft {invitation.line}",
            "seconds": invitation.seconds,
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})
