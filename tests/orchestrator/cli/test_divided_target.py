"""Laws of what the user of a divided target is told before it starts. Starts nothing."""

import json
from pathlib import Path

import pytest

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.pipelines import opened
from tests.support.paths import DEMO_TARGET


@pytest.mark.parametrize(("host", "told"), [("10.0.0.", 1), ("127.0.0.", 0)])
def test_ranks_on_several_machines_are_warned_of_plain_traffic(
    host: str, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "hosts.json"
    file.touch(0o600)
    file.write_text(json.dumps({"hosts": [[f"{host}1:5711"], [f"{host}2:5711"]], "key": "k" * 32}))

    opened(PipelineSettings(target=str(DEMO_TARGET), draft_engine="none", target_hosts=str(file)), quiet=True)

    assert (
        capsys.readouterr().err.count("what MLX sends between the ranks is neither encrypted nor authenticated") == told
    )
