"""A draft whose engine the pipeline chooses while it runs, and what is recorded about it. Starts no process."""

from pathlib import Path
from typing import Self

import msgspec

from orchestrator.machine.drafts.converted_draft import conversion_of, is_converted
from orchestrator.machine.hardware import chip, is_quiet
from orchestrator.machine.neural_engine import EXAMINER, PREDICTS
from protocol.contracts.coreml import (
    EngineChoice,
    EngineRates,
    EngineVerdict,
    ExaminedSystem,
    RuntimeName,
    package_fingerprint,
    record,
    recorded,
)
from protocol.contracts.model_folder import ModelFolder
from protocol.shown_names import model_name
from protocol.system import system_build


class AutoDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft that runs in MLX at first, and with Core ML once that was found faster beside the target."""

    checkpoint: str
    """The draft's folder in mlx-lm's format."""
    target: str
    """The target's folder."""
    place: ExaminedSystem
    """What a verdict of a trial is about."""
    runtime: RuntimeName = "coreml"
    """executor: a rehearsal of everything without a Neural Engine."""
    examiner: tuple[str, ...] = EXAMINER
    """The program that runs a stage of the examination."""
    predicts: int = PREDICTS

    @classmethod
    def on_this_machine(cls, checkpoint: Path, target: Path, runtime: RuntimeName) -> Self:
        """Raises InputError if a model's folder can't be read."""
        key = conversion_of(checkpoint).name
        place = ExaminedSystem(system_build(), chip(), key, ModelFolder(target).fingerprint)
        return cls(checkpoint=str(checkpoint), target=str(target), place=place, runtime=runtime)

    @property
    def package(self) -> Path:
        """The folder of the conversion, once it is made."""
        return conversion_of(Path(self.checkpoint))

    def verdict(self) -> EngineVerdict | None:
        """What is known: the outcome of a trial beside this target, or that Core ML can't run this draft here."""
        converted = is_converted(self.package)
        tried = recorded(self.place)
        if tried is not None and (converted or tried.choice == "mlx"):
            return tried
        places = [self._without_target, *([place_of(self.package)] if converted else [])]
        refused = (verdict for verdict in map(recorded, places) if verdict is not None and verdict.choice == "mlx")
        return next(refused, None)

    def record_refusal(self, reason: str) -> None:
        """This draft can't be converted."""
        self._record(self._without_target, "mlx", reason)

    def record_trial(self, choice: EngineChoice, reason: str, rates: EngineRates) -> None:
        """One engine was faster beside this target. That Core ML gains nothing is measured again by a later start if
        this machine is busy with more than the pipeline."""
        if choice == "mlx" and self.runtime == "coreml" and not is_quiet():
            return
        self._record(self.place, choice, reason, rates)

    @property
    def _without_target(self) -> ExaminedSystem:
        return msgspec.structs.replace(self.place, target="")

    def _record(
        self, place: ExaminedSystem, choice: EngineChoice, reason: str, rates: EngineRates | None = None
    ) -> None:
        names = f"{model_name(self.checkpoint)} beside {model_name(self.target)}" if place.target else self.checkpoint
        record(EngineVerdict(place=place, choice=choice, reason=reason, rates=rates, model=names))


def place_of(folder: Path) -> ExaminedSystem:
    """What a verdict that is found now on this machine is about: system, chip and converted model."""
    return ExaminedSystem(system_build(), chip(), package_fingerprint(folder))
