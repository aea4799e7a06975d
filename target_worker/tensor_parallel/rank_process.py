"""The process of a sharded target's rank 1 or more."""

import os
import signal
import sys
import time

from protocol.contracts.target_hosts import RankSetup
from protocol.errors import InputError
from protocol.inference.light_import import import_models
from protocol.processes import QualityOfService, set_quality_of_service
from protocol.worker.failed_calls import is_shortage
from protocol.worker.process import die_with_parent
from protocol.worker.tracing import settle

REFUSED = 2
"""Exit code for an error that a restart would not remove."""
_END_DELAY = 2.0
"""Seconds before a rank that can't load its model ends, so that rank 0, which can't load it either, reports first."""


def main() -> int:
    setup = RankSetup.from_arguments()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if setup.parent_socket is not None:
        die_with_parent(setup.parent_socket)
    set_quality_of_service(QualityOfService.USER_INTERACTIVE)
    # MLX is slow to import. From here on this process notices the end of its parent meanwhile.
    import_models()
    from protocol.inference.device import TARGET, wire
    from target_worker.tensor_parallel.ranks import serve_rank, shortage

    def ready() -> None:
        wire(setup.gpu_share, TARGET)
        settle()

    def report(text: str) -> None:
        sys.stderr.write(f"Rank {setup.rank}: {text}.\n")
        sys.stderr.flush()

    try:
        serve_rank(setup, ready=ready, report=report)
    except InputError as error:
        report(str(error).rstrip("."))
        time.sleep(_END_DELAY)
        return REFUSED
    except (EOFError, OSError, RuntimeError, MemoryError) as error:
        if is_shortage(error):
            sys.stderr.write(f"{shortage(setup.rank, setup.hosts.ranks)}\n")
            sys.stderr.flush()
            return 1
        report(f"the other ranks are gone ({str(error) or 'end of file'})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
