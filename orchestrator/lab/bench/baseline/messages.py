"""Messages between the bench and the process that runs mlx-lm: one JSON object a line."""

import msgspec

from protocol.messages.worker import Paced
from protocol.worker.pacing import DevicePace


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the process: its one argument, as JSON."""

    target: str
    """Folder of the model."""
    draft: str
    """Folder of the draft model; empty for none."""
    texts: str = ""
    """File of recorded texts that stand in for the target; empty to load the target."""
    cores: tuple[int, ...] = ()
    """Processor cores to run on, where the OS allows it; empty for all."""
    target_pace: DevicePace | None = None
    """The times of the paced device, on which both models run in turns; None for no pace."""
    draft_pace: DevicePace | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="one"):
    """Continue these tokens until `max_tokens` or one of the end tokens `ends`."""

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]
    draft_tokens: int
    """0 for `generate_step`, else the `num_draft_tokens` of `speculative_generate_step`."""


class BatchJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="batch"):
    """Continue all these prompts together, without a draft."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]


class BatchJobResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a batch job."""

    generated: int
    """Tokens of all prompts in the time in which all of them were decoded."""
    seconds: float
    """Length of that time."""
    paced: Paced | None = None


class JobResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a job. The first one is empty: the models are loaded."""

    tokens: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    """For each token, whether it is an accepted draft token."""
    seconds: float = 0.0
    """From the end of the prefill of all but the prompt's last token to the last token."""
    paced: Paced | None = None
    arrivals: tuple[float, ...] = ()
    """Seconds from the job's begin, prefill included, to each token."""
