"""Laws of what a pipeline is told and what its user is told: both speak of the same draft. Starts nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.api import settings as settings_module
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.app import cli
from orchestrator.machine.drafts import draft_choice as draft_choice_module
from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.converted_draft import conversion_of
from orchestrator.machine.profiles.device_profiles import profile_names
from protocol.contracts.coreml import FOLDER_MODEL, EngineRates
from protocol.errors import InputError, PipelineError
from protocol.messages.sampling import ModelSampling
from tests.support.models.tokenizer_files import with_other_tokenizer
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET


@pytest.fixture
def faster_in_core_ml(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Neural Engine that was found faster for the demo draft."""

    monkeypatch.setattr(draft_choice_module, "neural_engine", lambda: "coreml")
    data = conversion_of(DEMO_DRAFT) / FOLDER_MODEL / "Data"
    data.mkdir(parents=True)
    (data / "model.mlmodel").write_bytes(b"model")
    auto = AutoDraft.on_this_machine(DEMO_DRAFT, DEMO_TARGET, "coreml")
    auto.record_trial("coreml", "it was faster", EngineRates(coreml=40.0, mlx=30.0))


@pytest.mark.usefixtures("faster_in_core_ml")
def test_the_engine_that_begins_is_named():
    assert Pipeline(str(DEMO_TARGET)).note == "The draft runs on the Neural Engine (it was faster)."


@pytest.mark.usefixtures("faster_in_core_ml")
@pytest.mark.parametrize("measured", [{"pace": profile_names()[0]}, {"trace": "trace"}], ids=str)
def test_an_engine_that_a_measurement_does_not_begin_with_is_not_named(measured: dict[str, Any]):
    assert Pipeline(str(DEMO_TARGET), **measured).note == ""


def test_keywords_change_the_settings_beside_them():
    settings = PipelineSettings(target=str(DEMO_TARGET), strategy="ssd")

    assert Pipeline(settings=settings).strategy == "ssd"
    assert Pipeline(settings=settings, strategy="sd").strategy == "sd"
    assert Pipeline(str(DEMO_TARGET), settings=settings).strategy == "ssd"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"strategy": "fast"}, "There is no strategy called 'fast': choose ar, sd, ssd or adaptive"),
        ({"draft_tokens": 0}, "draft_tokens must be a whole number >= 1"),
        ({"prefill_engine": "coreml"}, "prefill_engine can't be 'coreml'"),
        ({"draft_with": 3}, "There is no option 'draft_with'"),
        *(({"context": wrong}, "context must be") for wrong in (-1, 1 << 30)),
        ({"context": "all"}, "context can't be 'all'"),
        ({"prefill_engine": "guest"}, "set listen"),
        ({"prefill_engine": "guest", "listen": "127.0.0.1:0", "arena_memory": 0}, "set arena_memory above 0"),
        ({"prefill_engine": "mlx", "arena_memory": 0}, "set arena_memory above 0"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], sentence: str):
    with pytest.raises(InputError, match=sentence):
        Pipeline(str(DEMO_TARGET), **wrong)
    if wrong.keys() <= set(PipelineSettings.__struct_fields__):
        with pytest.raises(InputError, match=sentence):
            Pipeline(settings=PipelineSettings(**wrong))


def test_a_target_that_no_shipped_draft_fits_decodes_alone_and_says_why(tmp_path: Path):
    """A draft that was asked for is an error, and those of other machines may still come."""
    target = str(with_other_tokenizer(DEMO_TARGET, tmp_path / "target"))
    with pytest.raises(
        InputError,
        match=r"another tokenizer than the target .* \(token \d+ is .* in the draft\).* Choose a draft of the same",
    ):
        Pipeline(target, str(DEMO_DRAFT)).start()
    strategies = [("ar", {}), ("adaptive", {"listen": "127.0.0.1:0"})]
    for strategy, options in strategies:
        pipeline = Pipeline(target, **options)

        assert pipeline.note.startswith("There is no draft, since no shipped draft fits the target")
        assert pipeline.strategy == strategy
    assert Pipeline(target, strategy="ar").note == ""


@pytest.fixture
def slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux processor that has MLX's own BLAS alone."""
    monkeypatch.setattr(settings_module, "lacks_fast_blas", lambda: True)


@pytest.mark.usefixtures("slow_processor")
@pytest.mark.parametrize("strategy", ["adaptive", "sd", "ssd"])
def test_that_speculation_can_not_help_is_told(strategy: str):
    assert "speculation can't help: install OpenBLAS" in Pipeline(str(DEMO_TARGET), strategy=strategy).note


@pytest.mark.usefixtures("slow_processor")
def test_adaptive_does_not_draft_where_speculation_can_not_help():
    assert Pipeline(str(DEMO_TARGET)).strategy == "ar"
    assert Pipeline(str(DEMO_TARGET), listen="127.0.0.1:0").strategy == "ar"
    assert Pipeline(str(DEMO_TARGET), strategy="sd").strategy == "sd"


@pytest.mark.usefixtures("slow_processor")
@pytest.mark.parametrize(
    "options",
    [{"strategy": "ar"}, {"pace": profile_names()[0]}, {"target_engine": "none", "listen": "127.0.0.1:0"}],
    ids=str,
)
def test_nothing_is_told_where_this_processor_does_not_count(options: dict[str, Any]):
    pipeline = Pipeline(str(DEMO_TARGET), **options)

    assert (pipeline.strategy, pipeline.note) == (options.get("strategy", "adaptive"), "")


# Sampling that is left to the target --------------------------------------------------------------


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


def test_a_pipeline_that_was_not_started_says_so():
    pipeline = Pipeline(target=str(DEMO_TARGET), draft_engine="none")
    with pytest.raises(PipelineError, match="not started"):
        pipeline.generate("import os")
