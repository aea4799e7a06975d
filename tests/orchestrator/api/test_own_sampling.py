"""Laws of requests that leave sampling to the target: its own values hold, in Python and on a terminal."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.cli.app import cli
from protocol.messages.sampling import ModelSampling
from tests.support.paths import DEMO_TARGET

OWN = SamplingParams(temperature=0.8, top_p=1.0, top_k=5, min_p=0.0, seed=5, max_tokens=24)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The demo target, which states how to sample."""
    place = shutil.copytree(DEMO_TARGET, tmp_path / "stating")
    (place / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.8, "top_k": 5}')
    return place


def test_without_parameters_the_target_s_own_values_hold(target: Path):
    with Pipeline(str(target), draft_engine="none") as pipeline:
        stated = pipeline.generate("import", OWN)
        left = pipeline.generate("import", SamplingParams(seed=5, max_tokens=24))
        greedy = pipeline.generate("import", SamplingParams(temperature=0, max_tokens=24))
        words = ["generate", "import", "--address", pipeline.address, "--seed", "5", "--max-tokens", "24"]
        terminal = CliRunner().invoke(cli, words, catch_exceptions=False)
        state = pipeline.state()

    assert state.sampling == ModelSampling(temperature=0.8, top_k=5)
    assert left.tokens == stated.tokens != greedy.tokens
    assert terminal.stdout == stated.text + "\n"
    assert "seed" in terminal.stderr
