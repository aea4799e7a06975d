"""The process of a sharded target's rank 1 or more."""

import os
import signal
import sys
import time

from protocol.contracts.target_hosts import RankSetup
from protocol.errors import InputError
from protocol.worker.process import die_with_parent
from protocol.worker.replay import settle

REFUSED = 2
"""Exit code for what another try would not mend."""
_AFTERTHOUGHT = 2.0
"""Seconds before a rank ends that can't load its model, so that rank 0, which can't either, says why first."""


def main() -> int:
    setup = RankSetup.from_arguments()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if setup.life is not None:
        die_with_parent(setup.life)
    # Imported only now that the parent's end would be noticed: MLX takes a second.
    from target_worker.device import wire
    from target_worker.tensor_parallel.ranks import serve_rank

    def ready() -> None:
        wire()
        settle()

    def say(text: str) -> None:
        sys.stderr.write(f"Rank {setup.rank}: {text}.\n")
        sys.stderr.flush()

    try:
        serve_rank(setup, ready=ready, say=say)
    except InputError as error:
        say(str(error).rstrip("."))
        time.sleep(_AFTERTHOUGHT)
        return REFUSED
    except (EOFError, OSError, RuntimeError) as error:
        say(f"the other ranks are gone ({str(error) or 'end of file'})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
