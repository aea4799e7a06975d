"""Which servers are compared, and with which models. Sends no requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.lab.bench.servers.server_process import Server
from orchestrator.machine.hardware import usable_cores, worker_environment

_KEY = "a-key-for-comparing"
_MODELS = ("first", "second")


class Contenders(NamedTuple):
    """The servers of one comparison."""

    ours: Server
    mlx_lm: Server
    mlx_lm_drafting: Server

    @classmethod
    def of_pair(cls, target: Path, draft: Path, *more: str, home: Path | None = None) -> "Contenders":
        """`more`: options of ours. `home`: the folder of its caches."""
        pair = ("--target", str(target), "--draft", str(draft), *more)
        ours = ("-m", "orchestrator.cli.app", "serve", "--model-name", "demo", "--api-key", _KEY, *pair)
        caches = {} if home is None else {"XDG_CACHE_HOME": str(home)}
        return cls(Server("launch-pipeline serve", ours, _KEY, caches), *_theirs(target, draft))

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
        return cls(Server("launch-pipeline serve", ours, _KEY, models=_MODELS), *theirs)

    @property
    def ours_alone(self) -> Server:
        """Ours without a draft."""
        ours = self.ours
        return Server(f"{ours.title} --draft-engine none", (*ours.arguments, "--draft-engine", "none"), ours.key)


def _theirs(target: Path, draft: Path, models: tuple[str, ...] = ()) -> Iterator[Server]:
    server = ("-m", "mlx_lm", "server", "--log-level", "WARNING", "--model", str(target))
    # What our workers have too. Without the hub's folder, `/v1/models` of this server has no answer.
    variables = {**worker_environment("target", usable_cores()), "HF_HUB_CACHE": str(target.parent)}
    yield Server("mlx_lm.server", server, environment=variables, models=models)
    drafting = (*server, "--draft-model", str(draft))
    yield Server("mlx_lm.server --draft-model", drafting, environment=variables, models=models)
