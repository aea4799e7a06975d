"""The training process: a TrainingOrder as its argument, reports as lines of JSON on standard output."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from draft_worker.training.answers import claim, record_states, write_answers
from draft_worker.training.held_out import Examiner
from draft_worker.training.language import LanguageTraining
from draft_worker.training.loop import Shell, Stopped, TrainingLoop, settings
from draft_worker.training.rows import HELD_OUT, Shards
from draft_worker.training.saved_state import Progressed, head_tokens, kept_head_tokens, require_same
from draft_worker.training.successors import successors
from draft_worker.training.target import Target, trained
from protocol.child_process import Failed, claim_output
from protocol.contracts.training import (
    HeldOut,
    TrainingFinished,
    TrainingOrder,
    TrainingPaused,
    TrainingProgress,
    TrainingReport,
)
from protocol.errors import InputError, PipelineError
from protocol.processes import QualityOfService, set_quality_of_service
from protocol.security.private_files import replacing
from protocol.speculation.successors import SUCCESSORS

REPORT = Path("training") / "report.json"
_LEAST_MINUTES = 1e-3
"""For one step."""


class Process:
    """Sends reports, and knows whether it was told to stop."""

    def __init__(self, order: TrainingOrder, report: Callable[[TrainingReport], None]) -> None:
        self._order, self._report = order, report
        self.out, self._work = Path(order.out), Path(order.work)
        self._stopping = False

    def stop(self, *_: object) -> None:
        """The step in progress is given up, and the state before it is saved."""
        self._stopping = True

    def run(self) -> TrainingFinished:
        """Raises Stopped. The time of the training is what the preparation leaves of it."""
        order, choices, began = self._order, self._order.choices, time.monotonic()
        target = Target(Path(order.target))
        trained_for = self._require_possible(target)

        def over(share: float) -> bool:
            return 0 < share * self._order.choices.minutes * 60 < time.monotonic() - began + trained_for

        prompts = Path(order.prompts) if order.prompts else None
        write_answers(target, prompts, order.ends, self._work, choices, self._prepared, over)
        record_states(target, self._work, self._prepared, over)
        shards, held_out = Shards(self._work), Shards(self._work / HELD_OUT)
        tokens = head_tokens(self.out, choices.head, shards.written(target.vocabulary))
        mx.random.seed(choices.seed)
        training = LanguageTraining(target, tokens, choices.layers)
        shell = Shell(time.monotonic, lambda: self._stopping, self.report, self._measured)
        examined = Examiner(target, tokens), held_out
        if choices.minutes:
            left = choices.minutes - (time.monotonic() - began) / 60
            choices = msgspec.structs.replace(choices, minutes=max(left, _LEAST_MINUTES))
        loop = TrainingLoop(training, shards, examined, choices, self.out, target.fingerprint, shell)
        report = loop.run()
        with replacing(self.out / SUCCESSORS) as file:
            file.write_bytes(successors(shards.answers))
        return TrainingFinished(
            folder=order.out,
            trained_parameters=trained(training.network),
            steps=loop.progressed.step,
            tokens=loop.progressed.tokens,
            seconds=loop.progressed.seconds,
            held_out=report,
        )

    def report(self, report: TrainingReport) -> None:
        try:
            self._report(report)
        except BrokenPipeError:
            # The parent is gone. The state is worth keeping all the same.
            self._stopping = True

    def _prepared(self, progress: TrainingProgress) -> None:
        if self._stopping:
            raise Stopped
        self.report(progress)

    def _require_possible(self, target: Target) -> float:
        """Seconds of training so far. Raises InputError for what would fail behind stages that take hours."""
        choices = self._order.choices
        seconds = require_same(self.out, settings(choices), target.fingerprint)
        kept_head_tokens(self.out, choices.head, target.vocabulary)
        # Its network is made in vain, but not computed.
        LanguageTraining(target, np.arange(min(choices.head, target.vocabulary)), choices.layers)
        claim(self._work, target)
        return seconds

    def _measured(self, held_out: HeldOut, progressed: Progressed) -> None:
        """The last report stays beside the state, for someone who looks at an unfinished training."""
        text = msgspec.json.format(msgspec.json.encode({"progressed": progressed, "held_out": held_out}))
        (self.out / REPORT).write_bytes(text + b"\n")


def main() -> int:
    # The parent handles Ctrl-C and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = claim_output()
    set_quality_of_service(QualityOfService.UTILITY)
    process = Process(msgspec.json.decode(sys.argv[1], type=TrainingOrder), report)
    signal.signal(signal.SIGTERM, process.stop)
    try:
        process.report(process.run())
    except Stopped:
        process.report(TrainingPaused())
    except PipelineError as error:
        process.report(Failed(str(error), isinstance(error, InputError)))
        return 1
    except OSError as error:
        text = f"A file could not be read or written ({error}): free disk space, and start the same command again."
        process.report(Failed(text, input_error=False))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
