"""Loads a target and finds its level: `python -m target_worker.model_examination FOLDER` prints one report in JSON."""

import sys
from pathlib import Path

from protocol.child_process import claim_output
from protocol.contracts.model_report import ModelRefusal, ModelReport
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel


def main() -> int:
    report = claim_output()
    report(examine(Path(sys.argv[1])))
    return 0


def examine(folder: Path) -> ModelReport | ModelRefusal:
    try:
        model = LanguageModel.load(folder)
    except InputError as error:
        return ModelRefusal(text=str(error))
    return ModelReport(
        architecture=model.architecture,
        level=model.level,
        reason=model.level_reason,
        deviation=model.deviation,
        joins=model.joins,
        joint_deviation=model.joint_deviation,
        batch_dependent=model.batch_dependent,
        recorded_layers=0 if model.tap is None else model.tap.taps.layers,
        context=model.context,
    )


if __name__ == "__main__":
    sys.exit(main())
