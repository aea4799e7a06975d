"""Runs the command line so that Ctrl-C ends it with one sentence from the first moment on. Started by `python -P -S`.

Python reacts to Ctrl-C with a traceback while it still looks for installed packages, so that is put off (-S) until
`interrupted` is in place.
"""

import _signal
import posix
import sys


def interrupted(*_: object) -> None:
    posix.write(2, b"Interrupted.\n")
    posix._exit(130)


def start() -> None:
    _signal.signal(_signal.SIGINT, interrupted)
    if sys.platform == "darwin" and posix.uname().machine != "arm64":
        # A Python for both processors runs as Intel's in a terminal under Rosetta, and can't load .venv's packages.
        posix.execv("/usr/bin/arch", ["arch", "-arm64", sys.executable, *sys.orig_argv[1:]])
    import site

    site.main()
    from orchestrator.cli.entry import main

    main()


if __name__ == "__main__":
    # Processes that a command spawns read this file too, under another name.
    start()
