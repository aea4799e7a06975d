"""Commands that run a module of this program in a process of its own."""

import sys


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs `module` with this Python.

    `-P`: Python would otherwise look for modules in the current folder first, and take those of another version's
    checkout.
    """
    return (sys.executable, "-P", "-m", module)
