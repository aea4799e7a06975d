"""mlx-lm's own decoding as contenders: a child process, and figures from its results."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from orchestrator.core.request_stats import pace_of
from orchestrator.lab.bench.contender import PLAIN, Family, GenerationTask, TimedGeneration, contender_name
from orchestrator.machine.hardware import usable_cores, worker_environment
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from protocol.child_process import ChildProcess, module_command
from protocol.errors import PipelineError
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
    target_pace: DevicePace | None = None
    """The times of the paced device, on which both models run in turns; None for no pace."""
    draft_pace: DevicePace | None = None
    tokenizer: bool = False
    """Load mlx-lm's too, as it does, although nobody asks for text."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continue these tokens until `max_tokens` or one of the end tokens `ends`."""

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]
    draft_tokens: int
    """0 for `generate_step`, else the `num_draft_tokens` of `speculative_generate_step`."""


class JobResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a job."""

    tokens: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    """For each token, whether it is an accepted draft token."""
    seconds: float = 0.0
    """From the end of the prefill of all but the prompt's last token to the last token."""
    paced: Paced | None = None
    arrivals: tuple[float, ...] = ()
    """Seconds from the job's begin, prefill included, to each token."""


_TERMINATION_SECONDS = 5.0
_Report = TypeVar("_Report")


@contextmanager
def running(
    target: str,
    draft: str,
    profile: DeviceProfile | None = None,
    texts: Path | None = None,
    *,
    tokenizer: bool = False,
) -> Iterator["MlxLm"]:
    """A process that runs mlx-lm with the models and libraries of our target, on all cores.

    `target` and `draft` are folders (no draft: empty). `profile` paces both models by its target's device.
    `texts` is a file of recorded texts that stand in for the target.
    """
    setup = Setup(
        target=target,
        draft=draft,
        texts="" if texts is None else str(texts),
        target_pace=profile and profile.target.pace(profile.slow_motion),
        draft_pace=profile and profile.draft_on_target_device.pace(profile.slow_motion),
        tokenizer=tokenizer,
    )
    command = [*module_command("orchestrator.lab.bench.mlx_lm_process"), msgspec.json.encode(setup).decode()]
    with ChildProcess(command, variables=worker_environment("target", usable_cores()), asked=True) as process:
        try:
            yield MlxLm(process, profile.name if profile else "")
        finally:
            process.end(_TERMINATION_SECONDS)


class MlxLm:
    """The running process. It is idle between jobs."""

    def __init__(self, process: ChildProcess, profile: str = "") -> None:
        """`profile`: name of the device profile that paces it; empty for none."""
        self.profile = profile
        self._process = process

    def await_ready(self) -> dict[str, float]:
        """Wait until the models are loaded; seconds by part. Raises PipelineError if the process ended instead."""
        return self._report(dict[str, float])

    def run(self, job: Job) -> JobResult:
        """Raises PipelineError if the process ended instead."""
        try:
            self._process.send(job)
        except OSError as error:
            raise self._ended() from error
        return self._report(JobResult)

    def _report(self, form: type[_Report]) -> _Report:
        found = self._process.report(form)
        if found is None:
            raise self._ended()
        return found

    def _ended(self) -> PipelineError:
        return PipelineError(
            f"mlx-lm's process ended; its last line: {self._process.last_words}. Check the models' folders."
        )


class MlxLmContender:
    """`generate_step` (0 draft tokens) or `speculative_generate_step`."""

    family: Family = "mlx-lm"

    def __init__(self, process: MlxLm, draft_tokens: int, ends: Iterable[int]) -> None:
        self.name = contender_name(PLAIN, draft_tokens or None)
        self._process = process
        self._draft_tokens = draft_tokens
        self._ends = tuple(ends)

    def generate(self, task: GenerationTask) -> TimedGeneration:
        job = Job(ends=self._ends, draft_tokens=self._draft_tokens, **task._asdict())
        result = self._process.run(job)
        rounds, tried = rounds_of(result.drafted, self._draft_tokens, task.max_tokens)
        return TimedGeneration(
            tokens=result.tokens,
            tokens_per_second=len(result.tokens) / result.seconds,
            tokens_per_round=len(result.tokens) / rounds,
            acceptance_rate=sum(result.drafted) / tried if tried else None,
            arrivals=result.arrivals,
            # It is never paced.
            compares_prefill=result.paced is None,
            pace=result.paced and pace_of(self._process.profile, result.paced),
        )


def rounds_of(drafted: Sequence[bool], draft_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Rounds, and draft tokens that were verified: the accepted ones and the first rejected one of each round.

    A round drafts at most as many tokens as may still be generated."""
    rounds = tried = begin = 0
    while begin < len(drafted):
        accepted = next((k for k, guessed in enumerate(drafted[begin:]) if not guessed), len(drafted) - begin)
        accepted = min(accepted, draft_tokens)
        ended = begin + accepted == len(drafted)
        rejected = not ended and accepted < min(draft_tokens, max_tokens - begin)
        rounds += 1
        tried += accepted + rejected
        begin += accepted + 1
    return rounds, tried
