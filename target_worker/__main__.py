"""The target process: load the model, then serve."""

import sys

from protocol.worker.interface import Worker
from protocol.worker.process import WorkerSetup, serve


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: _build(setup))


def _build(setup: WorkerSetup) -> Worker:
    # A slow import: `serve` notices the end of the parent process meanwhile.
    from target_worker.assembly import build

    return build(setup)


if __name__ == "__main__":
    sys.exit(main())
