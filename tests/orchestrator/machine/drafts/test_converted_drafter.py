"""A trained drafter from the command line to a package, and the package as the draft."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from draft_worker.coreml.converted import Converted
from draft_worker.engines import coreml
from orchestrator.cli.app import cli
from orchestrator.machine.drafts.draft_choice import draft_choice
from orchestrator.runtime.model_checks import draft_finding
from protocol.contracts.engines import AUTO
from protocol.messages.features import FeatureForm
from tests.support.models.drafter_packages import TARGET_LAYERS, setup, write_drafter
from tests.support.models.trained_drafters import WIDTH, write_target


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter, and the drafter's package, as the command made it."""
    root = tmp_path_factory.mktemp("drafter")
    write_drafter("reduced head", root / "drafter", write_target(root / "target", num_hidden_layers=TARGET_LAYERS))
    arguments = [
        "convert",
        f"{root}/drafter",
        "--target",
        f"{root}/target",
        "--out",
        f"{root}/package",
        "--context",
        "64",
    ]
    made = CliRunner().invoke(cli, arguments)
    assert made.exit_code == 0, made.output
    assert "fuse_32" in made.output
    return root


@pytest.mark.thorough
def test_the_folder_drafts_by_core_ml_without_naming_an_engine(root: Path):
    choice = draft_choice(AUTO, str(root / "package"), target=str(root / "target"))

    assert (choice.engine, choice.folder) == ("coreml", root / "package")


@pytest.mark.thorough
def test_its_engine_states_what_it_reads_of_the_target(root: Path):
    engine = coreml.load(setup("coreml", root / "package", root / "target"))

    assert (engine.name, engine.architecture, engine.context) == ("coreml", "eagle3", 64)
    assert engine.features == FeatureForm((0, 1, 3), WIDTH)
    assert engine.tokenizer == Converted.open(root / "package").vocabulary_fingerprint() != ""


@pytest.mark.thorough
def test_without_its_target_it_is_not_converted(root: Path, tmp_path: Path):
    made = CliRunner().invoke(cli, ["convert", str(root / "drafter"), "--out", str(tmp_path / "package")])

    assert made.exit_code != 0
    assert "pass --target MODEL" in str(made.exception or made.output)


@pytest.mark.parametrize("target", [True, False])
def test_doctor_says_what_the_folder_is(root: Path, target: bool):
    finding = draft_finding(str(root / "package"), str(root / "target") if target else None)

    assert (finding.status, "package of a trained drafter" in finding.text) == ("ok", True)
