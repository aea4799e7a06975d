"""Law: wherever mlx-lm's own loops are timed, they run on its own networks, without a class of ours."""

import io
import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from orchestrator.lab import forwards_process
from orchestrator.lab.bench import mlx_lm_process
from orchestrator.lab.bench.mlx_lm import Job, Setup
from orchestrator.lab.forwards import ForwardOrder
from tests.support.paths import DEMO_TARGET, ROOT


def is_stock(kind: type) -> bool:
    """A module of MLX or mlx-lm defines it."""
    module = kind.__module__
    return module.partition(".")[0] in ("mlx", "mlx_lm") and getattr(sys.modules[module], kind.__name__) is kind


@pytest.mark.parametrize(("program", "networks"), [(forwards_process, 1), (mlx_lm_process, 3)])
def test_mlx_lm_s_loops_get_networks_of_its_own_classes(
    program: ModuleType, networks: int, monkeypatch: pytest.MonkeyPatch
):
    """Plain decoding, and in the bench speculation too, by the program as it is."""
    task: dict[str, Any] = {"tokens": (5, 9, 2), "max_tokens": 4, "temperature": 0, "seed": 0, "ends": ()}
    jobs = b"\n".join(msgspec.json.encode(Job(draft_tokens=count, **task)) for count in (0, 2))
    order = ForwardOrder(folder=str(DEMO_TARGET), tokens=(5, 9, 2, 33), prompt=4, rounds=2)
    argument = order if program is forwards_process else Setup(target=str(DEMO_TARGET), draft=str(DEMO_TARGET))
    names = {"generate_step", "speculative_generate_step"} & vars(program).keys()
    loops = {name: Mock(wraps=getattr(program, name)) for name in names}
    for name, value in {**loops, "claim_output": Mock(), "signal": Mock()}.items():
        monkeypatch.setattr(program, name, value, raising=False)
    monkeypatch.setattr(sys, "argv", ["", msgspec.json.encode(argument).decode()])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(jobs)))

    assert program.main() == 0
    timed = [network for loop in loops.values() for call in loop.call_args_list for network in call.args[1:]]
    foreign = [kind for network in timed for kind in map(type, network.modules()) if not is_stock(kind)]
    assert (len(timed), foreign) == (networks, [])


def test_no_other_program_runs_mlx_lm_s_loops():
    files = [*(ROOT / "protocol").rglob("*.py"), *ROOT.glob("*_worker/**/*.py"), *(ROOT / "orchestrator").rglob("*.py")]
    users = {file.stem for file in files if "generate_step(" in file.read_text()}

    assert users == {"forwards_process", "mlx_lm_process"}
