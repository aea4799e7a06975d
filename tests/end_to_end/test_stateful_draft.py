"""A package of another's making as the draft, end to end: inspected by a command, and drafting the target's tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mlx_lm.utils import load_model

from orchestrator import Pipeline, PipelineError, SamplingParams
from orchestrator.cli.app import cli
from tests.conftest import Reference
from tests.support.models.stateful_packages import stateful_package
from tests.support.models.tokenizer_files import with_other_tokenizer
from tests.support.paths import DEMO_DRAFT
from tests.support.processes import mark, remains

_CONTEXT = 256
_TEXT = "def quicksort(items):"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft as others publish models, with its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("published")
    model, _ = load_model(DEMO_DRAFT)
    shutil.copy(DEMO_DRAFT / "tokenizer.json", folder)
    return stateful_package(model, folder, context=_CONTEXT, lengths=(1, _CONTEXT))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["sd", "adaptive"])
def test_tokens_are_the_targets_own_and_guesses_are_accepted(package: Path, reference: Reference, strategy: Any):
    params = [SamplingParams(max_tokens=40), SamplingParams(temperature=1.0, seed=4, max_tokens=40)]
    with Pipeline(draft=str(package), strategy=strategy) as pipeline:
        name = mark(pipeline)
        results = [pipeline.generate(_TEXT, each) for each in params]

    assert [result.tokens for result in results] == [reference(_TEXT, each).tokens for each in params]
    # The other strategy drafts without waiting, so its acceptance depends on the machine.
    assert strategy != "sd" or results[0].statistics.rounds < 30
    assert remains(name) == []


@pytest.mark.thorough
def test_a_tokenizer_that_differs_from_the_target_s_is_refused(package: Path, tmp_path: Path):
    other = with_other_tokenizer(DEMO_DRAFT, tmp_path / "other")
    folder = tmp_path / "published"
    shutil.copytree(package.parent, folder)
    shutil.copy(other / "tokenizer.json", folder)

    with pytest.raises(PipelineError, match="tokenizer"), Pipeline(draft=str(folder / package.name)) as pipeline:
        pipeline.generate(_TEXT, SamplingParams(max_tokens=4))


@pytest.mark.thorough
def test_doctor_tells_what_a_package_is(package: Path):
    result = CliRunner().invoke(cli, ["doctor", "--json", "--draft", str(package)])
    (finding,) = json.loads(result.stdout)

    assert (result.exit_code, result.stderr, finding["status"]) == (0, "", "ok")
    assert "one path at a time: 4,096 tokens, cache of 256, 1 to 256 tokens a call" in finding["text"]
