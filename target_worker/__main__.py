"""The target process: load the model, then serve."""

import sys

from protocol.inference.light_import import import_models
from protocol.worker.interface import Worker
from protocol.worker.memory_shortage import SurvivingWorker
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _build(setup))


def _build(setup: WorkerSetup) -> Worker:
    # Slow imports: `serve` notices the end of the parent process meanwhile.
    import_models()
    from target_worker.assembly import build

    worker = build(setup)
    # Ranks of a divided target run the same forwards: one that left a forward would be out of step with the others.
    return SurvivingWorker(worker) if setup.hosts is None else worker


if __name__ == "__main__":
    sys.exit(main())
