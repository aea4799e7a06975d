"""The installed command. Until there is something to tidy up, Ctrl-C just ends it; importing takes a moment."""

import signal


def main() -> None:
    """Exit code 130 in a shell, and no traceback, however early or late Ctrl-C comes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from orchestrator.cli import app as cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
