"""Keeps a Mac from idle sleep while a command works: sleep stops every process, and network connections break.

Linux sleeps only where a desktop asks for it, so nothing is done there. A closed lid puts a Mac to sleep all the same.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CAFFEINATE = "/usr/bin/caffeinate"


@contextmanager
def without_idle_sleep(system: str = sys.platform, program: str = _CAFFEINATE) -> Iterator[str]:
    """The context of work that should not be interrupted. Yields a sentence if sleep can't be prevented, else "".

    caffeinate(8): -i prevents idle sleep; -w ends with the process of that number, so that nothing is left if this
    process is killed.
    """
    if system != "darwin":
        yield ""
        return
    try:
        assertion = subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for this process, which may still have to end its work.
            start_new_session=True,
        )
    except OSError as error:
        yield f"This Mac may fall asleep meanwhile ({program}: {error.strerror})."
        return
    try:
        yield ""
    finally:
        assertion.terminate()
        assertion.wait()
