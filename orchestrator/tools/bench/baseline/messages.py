"""What passes between the bench and the process that runs mlx-lm: one JSON object a line."""

import msgspec

from protocol.messages.worker import Paced
from protocol.worker.pacing import DevicePace


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the process is told at its start, as one JSON argument."""

    target: str
    """Folder of the model."""
    draft: str
    """The same; empty if nothing is drafted."""
    cores: tuple[int, ...] = ()
    """Processor cores to stay on, where the OS allows; empty for all."""
    target_pace: DevicePace | None = None
    """The device to be as slow as, on which both models run in turns; None for the speed of this one."""
    draft_pace: DevicePace | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="one"):
    """Continue these tokens until `max_tokens` or one of `ends`."""

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]
    draft_tokens: int
    """0 for `generate_step`, else the `num_draft_tokens` of `speculative_generate_step`."""


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="batch"):
    """Continue all these prompts together, without a draft."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]


class BatchDelivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of it."""

    generated: int
    """Tokens of all prompts while all of them were being continued."""
    seconds: float
    """That took."""
    paced: Paced | None = None


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of an order. An empty one says that the models are loaded."""

    tokens: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    """Of each token, whether the draft had guessed it."""
    seconds: float = 0.0
    """From the end of the prefill of all but the prompt's last token to the last token."""
    paced: Paced | None = None
