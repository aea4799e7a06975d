"""The standard output of a program that is for its reports alone."""

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec


def claim_output() -> Callable[[Any], None]:
    """A function that writes a report as one line of JSON to the standard output. Nothing else gets there from now on:
    what Python's `print` and native code (Core ML's compiler) write to descriptor 1 goes to the standard error."""
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def report(what: Any) -> None:
        output.write(msgspec.json.encode(what) + b"\n")
        output.flush()

    return report
