"""What a service is started with, what becomes of it, and what every system's service manager can do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceDefinition:
    """A service; everyone on this machine may be able to read it, so nothing here is secret."""

    program: tuple[str, ...]
    """What starts launch-pipeline, with an absolute path."""
    arguments: tuple[str, ...]
    """Those of launch-pipeline, the command first."""
    folder: str
    """Where it runs: relative paths among the arguments mean what they meant to the user."""
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceState:
    definition: str
    """The file that defines the service."""
    log: str
    """The file that has the service's output, or the command that shows it."""
    installed: bool = False
    process: int | None = None
    """Of the running service."""
    arguments: tuple[str, ...] = ()
    """As in its definition."""


class ServiceManager(Protocol):
    """Raises PipelineError if the system's program is absent or refuses."""

    def require_available(self) -> None:
        """Writes nothing, so that `install` need not be taken back."""
        ...

    def install(self, definition: ServiceDefinition) -> None:
        """Start it now and at each login. Replaces a service that is installed."""
        ...

    def remove(self) -> bool:
        """Stop it and delete all that `install` wrote; False if nothing was installed."""
        ...

    def state(self) -> ServiceState: ...
