"""Law: wherever mlx-lm's own loops are timed, they run on its own networks, without a class of ours."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from mlx import nn

from orchestrator.lab import forwards_process
from orchestrator.lab.bench import mlx_lm_process
from orchestrator.lab.bench.mlx_lm import Job, Setup
from orchestrator.lab.forwards import ForwardOrder
from tests.support.models.tiny_models import network, write_model
from tests.support.paths import DEMO_TARGET, ROOT


def packed(folder: Path) -> Path:
    nn.quantize(model := network(), group_size=32, bits=4)
    return write_model(folder, model, quantization={"group_size": 32, "bits": 4})


def foreign(model: nn.Module) -> Iterator[type]:
    """Classes of its parts that their own modules of MLX and mlx-lm do not define."""
    for kind in map(type, model.modules()):
        module = kind.__module__
        if module.partition(".")[0] not in ("mlx", "mlx_lm") or getattr(sys.modules[module], kind.__name__) is not kind:
            yield kind


@pytest.mark.parametrize(("module", "networks"), [(forwards_process, 1), (mlx_lm_process, 3)])
@pytest.mark.parametrize("stored", ["demo", "packed"])
def test_mlx_lm_s_loops_get_networks_of_its_own_classes(
    stored: str, module: ModuleType, networks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Plain decoding, and in the bench speculation too, by the program as it is."""
    folder = str(DEMO_TARGET if stored == "demo" else packed(tmp_path / "packed"))
    order = ForwardOrder(folder=folder, tokens=(5, 9, 2, 33), prompt=4, rounds=2)
    task: dict[str, Any] = {"tokens": (5, 9, 2), "max_tokens": 4, "temperature": 0, "seed": 0, "ends": ()}
    questions = b"\n".join(msgspec.json.encode(Job(draft_tokens=count, **task)) for count in (0, 2))
    argument = order if module is forwards_process else Setup(target=folder, draft=folder)
    found: list[list[type]] = []

    def spied(loop: Callable[..., Any]) -> Callable[..., Any]:
        def run(prompt: Any, *models: Any, **settings: Any) -> Any:
            found.extend(list(foreign(model)) for model in models)
            return loop(prompt, *models, **settings)

        return run

    for name in {"generate_step", "speculative_generate_step"} & vars(module).keys():
        monkeypatch.setattr(module, name, spied(getattr(module, name)))
    monkeypatch.setattr(module, "claim_output", lambda: lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["", msgspec.json.encode(argument).decode()])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(questions)))

    assert module.main() == 0
    assert found == [[]] * networks


def test_no_other_program_runs_mlx_lm_s_loops():
    packages = (ROOT / name for name in ("protocol", "draft_worker", "target_worker", "orchestrator"))
    users = {
        file.stem for package in packages for file in package.rglob("*.py") if "generate_step(" in file.read_text()
    }

    assert users == {"forwards_process", "mlx_lm_process"}
