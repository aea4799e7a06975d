"""Loads a trained drafter as a worker does, and prints one report in JSON.

`python -m draft_worker.drafter_examination ENGINE FOLDER TARGET`
"""

import sys
from importlib import import_module

from protocol.child_process import claim_output
from protocol.contracts.model_report import Loaded, ModelRefusal
from protocol.errors import InputError
from protocol.worker.process import WorkerSetup


def main() -> int:
    report = claim_output()
    report(examine(*sys.argv[1:]))
    return 0


def examine(engine: str, folder: str, target: str) -> Loaded | ModelRefusal:
    setup = WorkerSetup(address="", epoch=0, incarnation=0, engine=engine, model=folder, target=target)
    try:
        import_module(f"draft_worker.engines.{engine}").load(setup)
    except InputError as error:
        return ModelRefusal(text=str(error))
    return Loaded()


if __name__ == "__main__":
    sys.exit(main())
