"""A command that another process of ours starts for its own use, and talks to through standard input."""

import os
import signal
import threading

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2


def follow_starter() -> None:
    """End with the process that started this one. Its log is standard output, to which nothing is written at first.

    A first byte on standard input sends standard error to the log, since the terminal is another program's from then
    on. The end of standard input ends this process.
    """
    log = os.dup(_OUTPUT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _OUTPUT)
    os.close(nowhere)
    threading.Thread(target=_follow, args=(log,), daemon=True, name="starter").start()


def _follow(log: int) -> None:
    os.read(_INPUT, 1)
    os.dup2(log, _ERRORS)
    while os.read(_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
