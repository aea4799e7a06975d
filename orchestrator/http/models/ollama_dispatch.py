"""As Dispatch, for Ollama's API: a request may say how long its model stays loaded, or only load or unload it."""

from collections.abc import Callable

from starlette.responses import JSONResponse, Response

from orchestrator.core.models.events import ModelName, Seconds
from orchestrator.http.models.dispatch import Asked, Dispatch
from orchestrator.http.models.host import ModelHost
from orchestrator.http.models.progress import StreamForm
from orchestrator.http.ollama.answer import empty_line
from orchestrator.http.ollama.names import keep_seconds

_EMPTY = (b"", b"null", b"[]", b'""')


class OllamaDispatch(Dispatch):
    def __init__(
        self,
        host: ModelHost,
        name_of: Callable[[Asked], ModelName],
        new_form: Callable[[Asked], StreamForm | None],
        patience: Seconds,
        *,
        chat: bool,
    ) -> None:
        """As of Dispatch."""
        super().__init__(host, name_of, new_form, patience)
        self._chat = chat

    def _early(self, name: ModelName, asked: Asked) -> Response | None:
        """A request without a prompt that keeps its model for no time only unloads it."""
        if asked.keep_alive is None or keep_seconds(asked.keep_alive) != 0:
            return None
        if bytes(asked.messages if self._chat else asked.prompt).strip() not in _EMPTY:
            return None
        self._host.keep(name, 0.0)
        return JSONResponse(empty_line(name, chat=self._chat, done=True, done_reason="unload"))

    def _admitted(self, name: ModelName, asked: Asked) -> None:
        if asked.keep_alive is not None:
            self._host.keep(name, keep_seconds(asked.keep_alive))
