"""What a program is started with so that it asks a certain server. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class AskedServer:
    """A server, and the model that a program asks it for."""

    address: str
    """http://HOST:PORT, without a path."""
    key: str
    model: str
    context: int | None = None
    """Tokens of prompt and answer together; None if the server does not say."""
    knows_tools: bool = True
    """Whether the model's chat template does."""

    @property
    def openai(self) -> str:
        """The address that clients of OpenAI's API take."""
        return f"{self.address}/v1"


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Settings for one process. The user's files stay as they are."""

    options: tuple[str, ...] = ()
    """Before the user's own. Every program on the machine can read them, so none holds the key."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set; those that are None are removed."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables to set unless the user has set them."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content by name, for the private folder that options and environment point to."""


@dataclass(frozen=True, kw_only=True)
class AgentProgram:
    command: str
    """The name of the executable."""
    install: str
    """The command line that gets it."""
    settings: Callable[[AskedServer, Path], Invocation]
    """Pure: `Path` is the private folder, which need not exist."""
    offers_tools: bool = True
    """Whether it always sends tools, so that the model's chat template must know them."""
