"""Runs the command line so that Ctrl-C ends it with one sentence from the first moment on. Started by `python -P -S`.

Python reacts to Ctrl-C with a traceback while it still looks for installed packages, so that is put off (-S) until
`interrupted` is in place.
"""

import _signal
import posix


def interrupted(*_: object) -> None:
    posix.write(2, b"Interrupted.\n")
    posix._exit(130)


def start() -> None:
    _signal.signal(_signal.SIGINT, interrupted)
    import site

    site.main()
    from orchestrator.cli.entry import main

    main()


if __name__ == "__main__":
    # Processes that a command spawns read this file too, under another name.
    start()
