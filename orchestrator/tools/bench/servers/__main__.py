"""Sends the same requests to `launch-pipeline serve` and to mlx-lm's own server, with the demo pair, and prints tables.

Run `.venv/bin/python -m orchestrator.tools.bench.servers` on Linux or a Mac. It takes some minutes and ends every
server that it starts. It imports MLX to convert the demo pair; no other module of this folder does.
"""

import platform
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from orchestrator.tools.bench.servers.http_requests import NoAnswer
from orchestrator.tools.bench.servers.probes import Probe, access, completions, invalid_requests, parameters, routes
from orchestrator.tools.bench.servers.server_process import ROOT, Server, end_with_servers, running
from orchestrator.tools.bench.servers.stream_probes import streams

_KEY = "a-key-for-comparing"
_PAIR = {"target": ROOT / "target_worker/demo_model", "draft": ROOT / "draft_worker/demo_model"}


_SAME = "The text with a draft equals the text without"
Column = dict[str, str]


class Contenders:
    """The servers, all with the demo pair in 32 bits, which is written to `folder`.

    Our workers compute in 32 bits on a processor. In 16 bits the greedy text would depend on the width of a forward.
    """

    def __init__(self, folder: Path) -> None:
        target, self.draft = (_in_32_bits(source, folder / name) for name, source in _PAIR.items())
        pair = ("--target", str(target), "--draft", str(self.draft))
        serve = ("-m", "orchestrator.cli.app", "serve", "--model-name", "demo", "--api-key", _KEY, *pair)
        mlx_lm_server = ("-m", "mlx_lm", "server", "--log-level", "WARNING", "--model", str(target))
        self.ours = Server("launch-pipeline serve", serve, _KEY)
        self.ours_alone = Server("launch-pipeline serve --draft-engine none", (*serve, "--draft-engine", "none"), _KEY)
        self.mlx_lm = Server("mlx_lm.server", mlx_lm_server)
        self.mlx_lm_drafting = Server("mlx_lm.server --draft-model", (*mlx_lm_server, "--draft-model", str(self.draft)))


def main() -> None:
    end_with_servers()
    with tempfile.TemporaryDirectory() as folder:
        _compare(Contenders(Path(folder)))


def _compare(servers: Contenders) -> None:
    sections = {
        "Routes": routes(),
        "Parameters": parameters(),
        "Invalid requests": invalid_requests(servers.draft),
        "While the server generates": streams(),
        "Access": access(),
    }
    probes = {name: probe for section in sections.values() for name, probe in section.items()}
    columns = {
        server.title: _column(server, probes) for server in (servers.ours, servers.mlx_lm, servers.mlx_lm_drafting)
    }
    rows: dict[str, Iterable[str]] = {title: section.keys() for title, section in sections.items()}
    for drafting, alone in ((servers.ours, servers.ours_alone), (servers.mlx_lm_drafting, servers.mlx_lm)):
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
    """The outcome of every probe. A server that fails or stays occupied is replaced for the next probe."""
    column: Column = {}
    left = dict(probes)
    while left:
        with running(server) as process:
            while left and process.healthy() and not process.occupied:
                name, probe = next(iter(left.items()))
                del left[name]
                print(f"{server.title}: {name}", file=sys.stderr)
                try:
                    column[name] = probe(process)
                except NoAnswer:
                    column[name], process.occupied = "no answer for minutes", True
                if not process.healthy():
                    column[name] += "; then no answer until a restart"
    return column


def _same(drafting: Server, alone: Server) -> Column:
    """Whether a draft changes the texts."""
    with running(drafting) as process:
        found = completions(process)
    with running(alone) as process:
        expected = completions(process)
    return {name: "yes" if texts == expected[name] else "no" for name, texts in found.items()}


def _in_32_bits(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text().replace('"float16"', '"float32"'))
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    wide = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})
    return folder


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
