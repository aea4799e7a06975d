"""One measured number, sent from a measuring process to a reporting one. Plain data."""

import msgspec


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A median, unless the name says otherwise."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """The highest acceptable value, if there is one."""

    @property
    def within_limit(self) -> bool:
        return self.limit is None or self.value <= self.limit
