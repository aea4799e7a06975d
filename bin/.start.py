"""Runs the command line so that Ctrl-C shows no traceback from the first moment on. Started by `python -P -S`.

Python reacts to Ctrl-C with a traceback while it still looks for installed packages, so that is put off (-S) until
Ctrl-C just ends the process.
"""

import _signal


def start() -> None:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    import site

    site.main()
    from orchestrator.cli.entry import main

    main()


if __name__ == "__main__":
    # Processes that a command spawns read this file too, under another name.
    start()
