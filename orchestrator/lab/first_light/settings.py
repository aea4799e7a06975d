"""What a first light was asked to do, as its stages get it. Plain data."""

from typing import Literal, TypeAlias

import msgspec

Need: TypeAlias = Literal["GPU", "Neural Engine", "second pair", "energy"]
"""What a stage can't do without."""


class LightSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that change what a stage finds."""

    short: bool = False
    """The demo pair and few tokens: whether everything runs, not how fast."""
    energy: bool = False
    second_pair: str = "qwen2.5-3b"
    """A recommended pair that is compared beside the default one."""


class StageOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of a stage's process, in JSON."""

    stage: str
    settings: LightSettings
    life: int
    """A socket shared with the parent; its end of file means that the parent is gone."""
    power: int | None = None
    """A descriptor from which a power meter's samples can be read."""
