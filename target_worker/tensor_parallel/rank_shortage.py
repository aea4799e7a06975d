"""A rank of a divided target that runs out of memory ends. The ranks run the same forwards, so one that left a forward
would be out of step with the others; all of them start anew."""

import os
import sys
from collections.abc import Iterator

import mlx.core as mx

from protocol.errors import PipelineError
from protocol.worker.failed_calls import Sparing, SurvivingWorker
from protocol.worker.interface import WorkerReply

_GIB = 1 << 30


class LeadingWorker(SurvivingWorker):
    """Rank 0's worker. Where memory runs out or the GPU gives up, it raises PipelineError, which ends the process."""

    def __init__(self, worker: Sparing, ranks: int) -> None:
        super().__init__(worker)
        self._ranks = ranks

    def recovery(self, short: bool) -> Iterator[WorkerReply]:
        if not short:
            raise PipelineError("The GPU of rank 0 gave up a command: all ranks start again.")
        text = shortage(0, self._ranks)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        raise PipelineError(text)


def shortage(rank: int, ranks: int) -> str:
    """That a rank's memory does not suffice, as a sentence."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"Rank {rank} of {ranks} ran out of memory: it held {mx.get_active_memory() / _GIB:.1f} GiB on a machine with "
        f"{machine / _GIB:.1f} GiB. Start the target with a smaller --context or --kv-bits 8, or divide it among more "
        "ranks."
    )
