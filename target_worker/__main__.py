"""The target process: load the model, then serve."""

import sys

from protocol.inference.light_import import import_models
from protocol.worker.failed_calls import SurvivingWorker
from protocol.worker.interface import Worker
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _build(setup))


def _build(setup: WorkerSetup) -> Worker:
    # Slow imports: `serve` notices the end of the parent process meanwhile.
    import_models()
    from target_worker.assembly import build
    from target_worker.tensor_parallel.ranks import LeadingWorker

    worker = build(setup)
    # Ranks run the same forwards, so one of them can't leave a forward.
    return SurvivingWorker(worker, worker.lower) if setup.hosts is None else LeadingWorker(worker, setup.hosts.ranks)


if __name__ == "__main__":
    sys.exit(main())
