"""The installed command. Until there is something to tidy up, Ctrl-C just ends it; importing takes a moment."""

import os
import signal


def main() -> None:
    """Exit code 130, one sentence and no traceback, however early Ctrl-C comes."""
    signal.signal(signal.SIGINT, _interrupted)
    from orchestrator.cli import app as cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupted(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
