"""The catalogue of a server with one model, under each of its names."""

from orchestrator.http.ollama.routes import CataloguedModel, catalogued
from orchestrator.http.server import Server
from orchestrator.http.settings import ServerSettings


class ServedCatalogue:
    def __init__(self, server: Server, settings: ServerSettings) -> None:
        self._server = server
        self._settings = settings

    async def catalogue(self) -> list[CataloguedModel]:
        state = (await self._server.condition()).serving
        folder, context = self._server.codec.folder, state and state.context
        sampling = self._server.defaults
        found = [
            CataloguedModel(name, folder, state is not None, context, sampling=sampling)
            for name in self._settings.names
        ]
        return found if self._server.embedding is None else [*found, catalogued(self._server.embedding)]

    def require(self, name: str | None) -> None:
        """Raises ApiError 404 for an unknown name."""
        if self._server.embedding is None or name != self._server.embedding.name:
            self._server.model_name(name)
