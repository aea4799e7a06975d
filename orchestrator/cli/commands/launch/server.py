"""Asks an HTTP server what a program must know of it: whether it is ready, its models, their context and tools."""

import json
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from protocol.errors import InputError, PipelineError

_ANSWER_SECONDS = 10.0
_LOADING_SECONDS = 600.0
"""For an answer that waits until its model is loaded."""
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff{}$]{1,256}")
"""A model's name that stays one in every program's settings: opencode reads a file for `{file:PATH}`, for instance, and
would send its content to the server."""


def http_server(url: str, key: str | None) -> "HttpServer":
    """The server at `url`, which may end in /v1. Raises InputError for anything but an address of HTTP."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise InputError(f"{url} is no address of a server: give one like http://127.0.0.1:8080.")
    return HttpServer(f"{parts.scheme}://{parts.netloc}", key)


class Answer(NamedTuple):
    status: int
    body: Any
    """Of JSON; None if it is something else."""


class HttpServer(NamedTuple):
    address: str
    """http://HOST:PORT, without a path."""
    key: str | None

    def state(self) -> str | None:
        """`ok`, `degraded`, `loading` or `failed`; None for a server that does not say. Raises PipelineError if nothing
        answers."""
        return self._field(self._ask("/health"), "status")

    def ready(self) -> bool:
        """Whether models are loaded. Raises PipelineError if nothing answers, or the server can't serve."""
        answer = self._ask("/health")
        if self._field(answer, "status") == "failed":
            reason = self._field(answer, "reason") or "with its key it tells why"
            raise PipelineError(f"The server at {self.address} has failed ({reason}): start it again.")
        return self._field(answer, "status") != "loading"

    def models(self) -> list[str]:
        """Their names, the default first. Raises InputError for a wrong key, PipelineError if there is no such API."""
        answer = self._ask("/v1/models")
        if answer.status in (401, 403):
            raise InputError(
                f"The server at {self.address} refuses this key: pass its own with --api-key, or better set "
                "LAUNCH_PIPELINE_API_KEY."
            )
        cards = self._field(answer, "data")
        known = [card.get("id") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        names = [name for name in known if isinstance(name, str) and _NAME.fullmatch(name)]
        if not names:
            raise PipelineError(
                f"What answers at {self.address} names no models, or none whose name a program's settings can hold: "
                "check the address."
            )
        return names

    def context(self, model: str) -> int | None:
        """Tokens of prompt and answer together; None if the server does not say."""
        found = self._field(
            self._ask(f"/v1/models/{quote(model)}", {"anthropic-version": "2023-06-01"}), "max_input_tokens"
        )
        return found if isinstance(found, int) else None

    def knows_tools(self, model: str) -> bool:
        """Whether the model's chat template knows tools; so it is for a server that does not say.

        A server with several models loads this one for it. Raises PipelineError if it can't.
        """
        question = {"model": model, "messages": [{"role": "user", "content": "Look."}]}
        answer = self._ask("/v1/messages/count_tokens", content=question, patience=_LOADING_SECONDS)
        if answer.status == 503:
            error = self._field(answer, "error")
            reason = error["message"] if isinstance(error, dict) and "message" in error else "It does not say why."
            raise PipelineError(f"The server at {self.address} can't serve {model}. {reason}")
        return self._field(self._ask(f"/v1/models/{quote(model)}"), "knows_tools") is not False

    def _field(self, answer: Answer, name: str) -> Any:
        return answer.body.get(name) if isinstance(answer.body, dict) else None

    def _ask(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        content: Any = None,
        patience: float = _ANSWER_SECONDS,
    ) -> Answer:
        """Raises PipelineError if nothing answers."""
        request = urllib.request.Request(  # noqa: S310
            f"{self.address}{path}",
            None if content is None else json.dumps(content).encode(),
            {**(headers or {}), "content-type": "application/json"},
        )
        if self.key is not None:
            request.add_header("authorization", f"Bearer {self.key}")
        # Programs of this machine need no proxy, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=patience) as answer:
                return Answer(answer.status, _parsed(answer.read()))
        except urllib.error.HTTPError as refusal:
            with refusal:
                return Answer(refusal.code, _parsed(refusal.read()))
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise PipelineError(f"No server answers at {self.address} ({reason}): start one, or check it.") from error


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
