"""The target process: load the model, then serve."""

import sys

from protocol.worker.interface import Worker
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _built(setup))


def _built(setup: WorkerSetup) -> Worker:
    # Imported only now that the parent's end would be noticed.
    from target_worker.assembly import assembled

    return assembled(setup)


if __name__ == "__main__":
    sys.exit(main())
