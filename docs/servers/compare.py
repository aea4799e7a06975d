"""Asks `launch-pipeline serve` and mlx-lm's own server the same things, with the demo pair, and prints a table.

Run it as `.venv/bin/python docs/servers/compare.py` on Linux or a Mac; it takes some minutes and ends what it starts.
"""

import platform
import signal
import sys
from importlib.metadata import version

from questions import Probe, doors, mistakes, parameters, routes, sampled
from running import OURS, OURS_ALONE, THEIRS, THEIRS_DRAFTING, Running, Server, running
from streams import streams

_CHAPTERS = {
    "Routes": routes(),
    "Parameters": parameters(),
    "Mistakes": mistakes(),
    "While it generates": streams(),
    "Who asks": doors(),
}
_SAME = "temperature 1 and a `seed`: the text that there is without a draft"
Column = dict[str, str]


def main() -> None:
    # Both end what was started; a shell's background jobs would ignore Ctrl-C's otherwise.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    alone = {OURS.title: _alone(OURS_ALONE), THEIRS_DRAFTING.title: _alone(THEIRS)}
    columns = {server.title: _column(server, alone) for server in (OURS, THEIRS, THEIRS_DRAFTING)}
    print(f"{_versions()}\n")
    for title, probes in _CHAPTERS.items():
        print(f"| {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        for name in (*probes, *([_SAME] if title == "Parameters" else [])):
            print(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")
        print()


def _column(server: Server, alone: dict[str, list[str]]) -> Column:
    with running(server) as found:
        column = {name: _told(found, name, probe) for probes in _CHAPTERS.values() for name, probe in probes.items()}
        expected = alone.get(server.title)
        same = "" if expected is None else "yes" if sampled(found) == expected else "another"
    return {**column, _SAME: same}


def _told(found: Running, name: str, probe: Probe) -> str:
    print(f"{found.server.title}: {name}", file=sys.stderr)
    return probe(found)


def _alone(server: Server) -> list[str]:
    with running(server) as found:
        return sampled(found)


def _versions() -> str:
    names = ("launch-pipeline", "mlx-lm", "mlx")
    return ", ".join([*(f"{name} {version(name)}" for name in names), f"Python {platform.python_version()}"])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        sys.exit(str(error))
