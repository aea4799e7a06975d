"""Asks `launch-pipeline serve` and mlx-lm's own server the same things, with the demo pair, and prints a table.

Run it as `.venv/bin/python -m orchestrator.tools.bench.servers` on Linux or a Mac; it takes some minutes and ends what
it starts.
"""

import platform
import signal
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from orchestrator.tools.bench.servers.asking import NoAnswer
from orchestrator.tools.bench.servers.contenders import Contenders
from orchestrator.tools.bench.servers.questions import Probe, doors, mistakes, parameters, routes, sayings
from orchestrator.tools.bench.servers.running import Server, running
from orchestrator.tools.bench.servers.streams import streams

_SAME = "The text with a draft is the one without"
Column = dict[str, str]


def main() -> None:
    # Both end what was started; a shell's background jobs would ignore Ctrl-C otherwise.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        _compare(Contenders(Path(folder)))


def _compare(who: Contenders) -> None:
    chapters = {
        "Routes": routes(),
        "Parameters": parameters(),
        "Mistakes": mistakes(who.draft),
        "While it generates": streams(),
        "Who asks": doors(),
    }
    probes = {name: probe for chapter in chapters.values() for name, probe in chapter.items()}
    columns = {server.title: _column(server, probes) for server in (who.ours, who.mlx_lm, who.mlx_lm_drafting)}
    rows: dict[str, Iterable[str]] = {title: chapter.keys() for title, chapter in chapters.items()}
    for drafting, alone in ((who.ours, who.ours_alone), (who.mlx_lm_drafting, who.mlx_lm)):
        same = _same(drafting, alone)
        columns[drafting.title] |= same
        rows[_SAME] = same.keys()
    print(f"{_versions()}\n")
    for title, names in rows.items():
        print(f"| {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        for name in names:
            print(f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |")
        print()


def _column(server: Server, probes: dict[str, Probe]) -> Column:
    """What came of every question. A server that a question was too much for is started anew for the next one."""
    column: Column = {}
    left = dict(probes)
    while left:
        with running(server) as found:
            while left and found.healthy() and not found.occupied:
                name, probe = next(iter(left.items()))
                del left[name]
                print(f"{server.title}: {name}", file=sys.stderr)
                try:
                    column[name] = probe(found)
                except NoAnswer:
                    column[name], found.occupied = "no answer for minutes", True
                if not found.healthy():
                    column[name] += "; then nothing, until it is restarted"
    return column


def _same(drafting: Server, alone: Server) -> Column:
    """Whether a draft changes what is said."""
    with running(drafting) as found:
        said = sayings(found)
    with running(alone) as found:
        expected = sayings(found)
    return {name: "yes" if texts == expected[name] else "another" for name, texts in said.items()}


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
