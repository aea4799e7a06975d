"""`launch-pipeline bench servers`: the same requests to `launch-pipeline serve` and to mlx-lm's own server."""

import json
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from orchestrator.lab.bench.servers.probes import (
    Probe,
    access,
    completions,
    invalid_requests,
    models,
    parameters,
    routes,
    streams,
)
from orchestrator.lab.bench.servers.random_pair import CONTEXT, TOKENS, long_prompts, random_pair, restarted
from orchestrator.lab.bench.servers.scripted_pair import clients, scripted_pair, thinking, tool_calls
from orchestrator.lab.bench.servers.server_process import ROOT, ComparedServer, NoAnswer, end_with_servers, running
from orchestrator.lab.findings import Findings, Table, Watch
from orchestrator.machine.hardware import usable_cores, worker_environment

_KEY = "a-key-for-comparing"
_MODELS = ("first", "second")


class Contenders(NamedTuple):
    """The servers of one comparison."""

    ours: ComparedServer
    mlx_lm: ComparedServer
    mlx_lm_drafting: ComparedServer

    @classmethod
    def of_pair(cls, target: Path, draft: Path, *more: str, home: Path | None = None) -> "Contenders":
        """`more`: options of ours. `home`: the folder of its caches."""
        pair = ("--target", str(target), "--draft", str(draft), *more)
        ours = ("-m", "orchestrator.cli.app", "serve", "--model-name", "demo", "--api-key", _KEY, *pair)
        caches = {} if home is None else {"XDG_CACHE_HOME": str(home)}
        return cls(ComparedServer("launch-pipeline serve", ours, _KEY, caches), *_theirs(target, draft))

    @classmethod
    def of_models(cls, first: Path, second: Path, draft: Path, folder: Path) -> "Contenders":
        """Ours knows the models by a file in `folder`, mlx-lm's by their folders."""
        settings = folder / "models.toml"
        tables = zip(_MODELS, (first, second), strict=True)
        told = "".join(f"[models.{name}]\ntarget = {json.dumps(str(model))}\n" for name, model in tables)
        # Small caches, so that both models fit into the memory of any machine.
        settings.write_text(f"arena-memory = 64\nprefix-cache-memory = 16\n{told}")
        ours = ("-m", "orchestrator.cli.app", "--config", str(settings), "serve", "--api-key", _KEY)
        theirs = _theirs(first, draft, (str(first), str(second)))
        return cls(ComparedServer("launch-pipeline serve", ours, _KEY, models=_MODELS), *theirs)

    @property
    def ours_alone(self) -> ComparedServer:
        """Ours without a draft."""
        ours = self.ours
        return ComparedServer(
            f"{ours.title} --draft-engine none", (*ours.arguments, "--draft-engine", "none"), ours.key
        )


def _theirs(target: Path, draft: Path, models: tuple[str, ...] = ()) -> Iterator[ComparedServer]:
    server = ("-m", "mlx_lm", "server", "--log-level", "WARNING", "--model", str(target))
    # What our workers have too. Without the hub's folder, `/v1/models` of this server has no answer.
    variables = {**worker_environment("target", usable_cores()), "HF_HUB_CACHE": str(target.parent)}
    yield ComparedServer("mlx_lm.server", server, environment=variables, models=models)
    drafting = (*server, "--draft-model", str(draft))
    yield ComparedServer("mlx_lm.server --draft-model", drafting, environment=variables, models=models)


_PAIR = {"target": ROOT / "target_worker/demo_model", "draft": ROOT / "draft_worker/demo_model"}


_SAME = "The text with a draft equals the text without"
_RESTART = f"seconds to the first text of {TOKENS:,} tokens; after a restart, ours with `--disk-cache`"
Column = dict[str, str]
Sections = Mapping[str, Mapping[str, Probe]]


class Report:
    """Tables with a column a server and a row a probe."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._columns: defaultdict[str, Column] = defaultdict(dict)
        self._rows: dict[str, Iterable[str]] = {}

    def compare(self, servers: Contenders, sections: Sections) -> None:
        """Send every probe to every server."""
        probes = {name: probe for section in sections.values() for name, probe in section.items()}
        self._watch.begin(len(servers) * len(probes), "the servers")
        for server in servers:
            self._columns[server.title] |= _column(server, probes, self._watch)
        self._rows |= {title: section.keys() for title, section in sections.items()}

    def add(self, title: str, server: ComparedServer, column: Column) -> None:
        """A table, or more rows of one that is there."""
        self._columns[server.title] |= column
        self._rows[title] = dict.fromkeys((*self._rows.get(title, ()), *column))

    def findings(self) -> Findings:
        titles = list(self._columns)
        tables = {
            title: {name: [self._columns[server].get(name, "") for server in titles] for name in names}
            for title, names in self._rows.items()
        }
        return Findings(
            title="servers",
            conditions=(_versions(),),
            tables=tuple(
                Table("", (title, *titles), tuple((name, *cells) for name, cells in rows.items()))
                for title, rows in tables.items()
            ),
            figures={"versions": _versions(), "servers": titles, "tables": tables},
        )


def measure(watch: Watch) -> Findings:
    """Raises RuntimeError for a server that does not start."""
    end_with_servers()
    report = Report(watch)
    with tempfile.TemporaryDirectory() as folder:
        _compare(report, Path(folder))
    return report.findings()


def _compare(report: Report, folder: Path) -> None:
    # Our workers compute in 32 bits on a processor. In 16 bits the greedy text would depend on the width of a forward.
    target, draft = (_in_32_bits(source, folder / name) for name, source in _PAIR.items())
    demo = Contenders.of_pair(target, draft)
    sections = {"Routes": routes(), "Parameters": parameters(), "Invalid requests": invalid_requests(draft)}
    report.compare(demo, sections | {"While the server generates": streams(), "Access": access()})
    for drafting, alone in ((demo.ours, demo.ours_alone), (demo.mlx_lm_drafting, demo.mlx_lm)):
        report.add(_SAME, drafting, _same(drafting, alone))
    scripted = Contenders.of_pair(*scripted_pair(folder / "scripted"))
    report.compare(scripted, {"Thinking": thinking(), "Tools": tool_calls(), "Clients": clients()})
    report.compare(Contenders.of_models(target, draft, draft, folder), {"Several models": models()})
    long = Contenders.of_pair(*random_pair(folder / "long", CONTEXT), "--disk-cache", "1", home=folder)
    title = "A long prompt"
    report.compare(long, {title: long_prompts()})
    for server in long:
        report.add(title, server, {_RESTART: restarted(server)})


def _column(server: ComparedServer, probes: dict[str, Probe], watch: Watch) -> Column:
    """The outcome of every probe. A server that fails or stays occupied is replaced for the next probe."""
    column: Column = {}
    left = dict(probes)
    while left:
        with running(server) as process:
            while left and process.healthy() and not process.occupied:
                name, probe = next(iter(left.items()))
                del left[name]
                watch.finished(f"{server.title}: {name}")
                try:
                    column[name] = probe(process)
                except NoAnswer:
                    column[name], process.occupied = "no answer for minutes", True
                if not process.healthy():
                    column[name] += "; then no answer until a restart"
    return column


def _same(drafting: ComparedServer, alone: ComparedServer) -> Column:
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
    weights = load_file(source / "model.safetensors")
    wide = {name: weight.astype(np.float32) for name, weight in weights.items()}
    save_file(wide, folder / "model.safetensors", {"format": "mlx"})
    return folder


def _versions() -> str:
    names = ("launch-pipeline", "mlx-lm", "mlx")
    return ", ".join([*(f"{name} {version(name)}" for name in names), f"Python {platform.python_version()}"])
