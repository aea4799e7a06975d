"""Which processes a test has started, also those whose parents are gone."""

import os
import subprocess


def started_with(variable: str) -> list[str]:
    """Lines of `ps` of all other processes with this variable (`NAME=value`) in their environment."""
    command, without = ["ps", "axewwo", "pid=,args="], {variable.partition("=")[0]: ""}
    listing = subprocess.run(command, env={**os.environ, **without}, capture_output=True, text=True, check=True)
    lines = [line.strip() for line in listing.stdout.splitlines() if f" {variable} " in f"{line} "]
    return [line for line in lines if int(line.split(maxsplit=1)[0]) != os.getpid()]
