"""What a stage is given: the settings, and whom it tells what it does."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light.stages import LightSettings

OnNotice: TypeAlias = Callable[[str], None]
OnFindings: TypeAlias = Callable[[Findings], None]


class Asked(NamedTuple):
    """The argument of every `measure`."""

    settings: LightSettings
    notice: OnNotice
    """Called with what the stage does now."""
    so_far: OnFindings = lambda _: None
    """Called with what is found so far, which is kept if the stage does not come to its end."""
    power: int | None = None
    """See `StageOrder`."""

    def sized(self, short: int, full: int) -> int:
        """How many of something is measured."""
        return short if self.settings.short else full
