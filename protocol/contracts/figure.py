"""One measured number, from a process that measures to one that reports. Plain data."""

import msgspec


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A median, unless the name says otherwise."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """What it should not exceed, where that was decided beforehand."""

    @property
    def kept(self) -> bool:
        return self.limit is None or self.value <= self.limit
