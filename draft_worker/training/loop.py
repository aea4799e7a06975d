"""Steps until the time or the steps are over, or until a stop; the same steps whether interrupted or not.

The order of rows and all chance come from the seed and the number of the step.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from draft_worker.training.held_out import Examiner, first_guess
from draft_worker.training.language import LanguageTraining
from draft_worker.training.optimisers import Optimisers, rate
from draft_worker.training.rows import Row, Shards
from draft_worker.training.saved_state import Progressed, restore, save
from protocol.contracts.training import HeldOut, TrainingChoices, TrainingProgress
from protocol.errors import PipelineError

_WARM_UP = 10
_MEASURED_SHARE = 0.1
"""Of the time, for the last measurement."""
_FEWEST_ROWS = 3
"""That it has in any case: one of each temperature."""
_SMOOTHING = 0.95
"""Weight of the losses so far in the loss that is reported."""


class Stopped(Exception):
    """The training was told to stop; its state is saved."""


@dataclass
class Shell:
    """What a training asks of its process."""

    clock: Callable[[], float]
    stopping: Callable[[], bool]
    report: Callable[[TrainingProgress], None]
    measured: Callable[[HeldOut, Progressed], None]


class TrainingLoop:
    """One training, from its saved state to its end."""

    def __init__(
        self,
        training: LanguageTraining,
        shards: Shards,
        held_out: tuple[Examiner, Shards],
        choices: TrainingChoices,
        folder: Path,
        target: str,
        shell: Shell,
    ) -> None:
        """`target`: its fingerprint."""
        self._training, self._shards, self._choices = training, shards, choices
        self._examiner, self._held_out = held_out
        self._folder, self._shell = folder, shell
        self._optimisers = Optimisers(training.network.trainable_parameters())
        self.progressed = restore(folder, settings(choices), target, training.network, self._optimisers)
        if self.progressed.shards and self._lost_shards():
            self._begin_epoch()
        self._gradient = nn.value_and_grad(training.network, training.loss)
        self._loss: float | None = None
        self._acceptance: float | None = None

    def run(self) -> HeldOut:
        """The last report. Raises Stopped."""
        began = self._shell.clock() - self.progressed.seconds
        reported = self.progressed.seconds
        while self._share() < 1:
            rows = list(self._next_rows())
            if not self._step(rows):
                save(self._folder, self.progressed, self._training.network, self._optimisers)
                raise Stopped
            self._advance(rows)
            self.progressed.seconds = self._shell.clock() - began
            self._report()
            if self.progressed.seconds - reported > self._choices.report_minutes * 60:
                self._keep(self._choices.report_rows)
                reported = self.progressed.seconds = self._shell.clock() - began
        return self._keep(self._held_out.count(self._held_out.refresh()), began)

    def _step(self, rows: list[Row]) -> bool:
        """False if it was stopped; nothing has changed then."""
        network, progressed = self._training.network, self.progressed
        random = np.random.default_rng([self._choices.seed, 1, progressed.step])
        total, losses = None, []
        for row in rows:
            if self._shell.stopping():
                return False
            loss, gradients = self._gradient(row, random)
            mx.eval(loss, gradients)
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise PipelineError(
                    f"The loss is no longer a number; the state in {self._folder} is from before that. Train "
                    "in another folder, with another --seed."
                )
            total = gradients if total is None else tree_map(mx.add, total, gradients)
        assert total is not None, "a step has rows"
        total = tree_map(lambda gradient: gradient / len(rows), total)
        share = rate((progressed.step + 1) / _WARM_UP, self._share())
        network.update(self._optimisers.step(network.trainable_parameters(), total, share))
        mx.eval(network.parameters(), self._optimisers.state)
        mean = float(np.mean(losses))
        self._loss = mean if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * mean
        return True

    def _share(self) -> float:
        """How much of the training is done."""
        time = self._choices.minutes * 60 * (1 - _MEASURED_SHARE)
        shares = [self.progressed.seconds / time] if time else []
        if self._choices.steps is not None:
            shares.append(self.progressed.step / self._choices.steps)
        return max(shares, default=1.0)

    def _next_rows(self) -> Iterator[Row]:
        """Of the epoch's order. An epoch reads the shards that are there when it begins."""
        progressed = self.progressed
        if not progressed.shards:
            progressed.shards = self._shards.refresh()
        order = np.random.default_rng([self._choices.seed, 0, progressed.epoch]).permutation(
            self._shards.count(progressed.shards)
        )
        for number in order[progressed.position : progressed.position + self._choices.batch]:
            yield self._shards.row(int(number))

    def _advance(self, rows: list[Row]) -> None:
        progressed = self.progressed
        progressed.step += 1
        progressed.position += len(rows)
        progressed.tokens += sum(len(row.tokens) for row in rows)
        if progressed.position >= self._shards.count(progressed.shards):
            self._begin_epoch()

    def _lost_shards(self) -> bool:
        """Whether the state's epoch can't be finished, because shards were deleted since."""
        progressed, present = self.progressed, self._shards.refresh()
        return progressed.shards > present or progressed.position >= self._shards.count(progressed.shards)

    def _begin_epoch(self) -> None:
        self.progressed.epoch, self.progressed.position, self.progressed.shards = self.progressed.epoch + 1, 0, 0

    def _keep(self, rows: int, began: float | None = None) -> HeldOut:
        """Save the state, write the drafter as it is, and measure it. `began`: when, so that the measurement ends with
        the training's time."""
        save(self._folder, self.progressed, self._training.network, self._optimisers)
        self._training.write(self._folder)
        report = self._examiner.report(self._training, self._examined(rows, began))
        self._acceptance = first_guess(report)
        self._shell.measured(report, self.progressed)
        self._report()
        return report

    def _examined(self, rows: int, began: float | None) -> Iterator[Row]:
        for number in range(min(rows, self._held_out.count(self._held_out.refresh()))):
            if self._shell.stopping():
                raise Stopped
            time = 0.0 if began is None else self._shell.clock() - began
            if number >= _FEWEST_ROWS and time > self._choices.minutes * 60 > 0:
                return
            yield self._held_out.row(number)

    def _report(self) -> None:
        share, seconds = self._share(), self.progressed.seconds
        self._shell.report(
            TrainingProgress(
                stage="training",
                done=min(share, 1.0),
                total=1,
                tokens=self.progressed.tokens,
                loss=self._loss,
                acceptance=self._acceptance,
                seconds_left=max(0.0, seconds * (1 - share) / share) if share else None,
            )
        )


def settings(choices: TrainingChoices) -> str:
    """What a training can't change on its way."""
    return f"--head {choices.head} --layers {choices.layers} --seed {choices.seed}"
