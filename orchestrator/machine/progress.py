"""How long work on models reports its progress."""

from collections.abc import Callable
from typing import TypeAlias

from protocol.contracts.coreml import Progress

OnProgress: TypeAlias = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Reports nothing."""
