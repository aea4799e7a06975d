"""The report of a process that inspects a Core ML package of another's making. Plain types; knows no Core ML."""

import msgspec


class PackageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a package can draft."""

    fits: bool
    text: str
    """What it is, or the sentence that says what does not fit."""
