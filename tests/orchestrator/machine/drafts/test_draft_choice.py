"""Laws of the choice of a draft: what was asked for, a shipped draft beside a target that it fits, or none."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.lab.bench.plan import bench_models
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.drafts import converted_draft as converted_draft_module
from orchestrator.machine.drafts import draft_choice as draft_choice_module
from orchestrator.machine.drafts import preparation
from orchestrator.machine.drafts.auto_draft import place_of
from orchestrator.machine.drafts.converted_draft import conversion_of, converted_draft
from orchestrator.machine.drafts.draft_choice import DraftChoice, draft_choice, draft_for, first_engine, measured_pair
from orchestrator.machine.drafts.preparation import Declined, Prepared, prepare
from orchestrator.machine.memory.budget import GIB
from orchestrator.machine.pairs.recommended_pairs import pairs
from protocol.contracts.coreml import FOLDER_MODEL, EngineRates, EngineVerdict, record, silent
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import AUTO
from protocol.errors import InputError
from tests.support.models.drafter_files import FORMATS, LAYERS, VOCABULARY, WIDTH, layer, write
from tests.support.models.tokenizer_files import with_other_tokenizer
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

NGRAM = DraftChoice("ngram", None)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(with_other_tokenizer(DEMO_TARGET, tmp_path_factory.mktemp("foreign") / "target"))


def chosen(target: str, engine: str = "mlx", draft: str | None = None, own: bool = False) -> DraftChoice:
    return draft_for(target, engine, draft, lambda _: None, own=own)


def test_the_demo_draft_is_taken_beside_a_target_with_its_tokenizer():
    assert chosen(str(DEMO_TARGET)) == DraftChoice("mlx", DEMO_DRAFT)


def test_the_default_target_gets_its_own_draft(foreign: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "shipped_draft", {Path(foreign): DEMO_DRAFT}.get)

    assert chosen(foreign) == DraftChoice("mlx", DEMO_DRAFT)


def test_without_a_name_and_a_target_it_is_the_default_draft(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "default_draft", lambda _: (DEMO_DRAFT, "No network."))

    assert draft_choice("mlx", None) == DraftChoice("mlx", DEMO_DRAFT, "No network.")


@pytest.mark.parametrize("engine", ["mlx", "coreml", "random"])
def test_the_demo_draft_is_not_taken_beside_a_foreign_target(foreign: str, engine: str):
    engine, folder, note, *_ = chosen(foreign, engine)

    assert (engine, folder) == ("none", None)
    assert f"fits the target {foreign}: choose a draft of the target's family or the draft engine ngram." in note
    assert "\n" not in note


def test_the_note_names_the_draft_of_a_recommended_pair_with_this_target(foreign: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "resolve", lambda *_: Path(foreign))
    pair = pairs()["qwen2.5-3b"]

    assert f"choose the draft {pair.draft.id} or the draft engine ngram." in chosen(pair.target.id).note


def test_a_draft_that_is_named_and_a_program_of_ones_own_are_taken_whatever_the_target(foreign: str):
    assert chosen(foreign, draft=str(DEMO_DRAFT)) == DraftChoice("mlx", DEMO_DRAFT)
    assert chosen(foreign, own=True) == DraftChoice("mlx", None)


def test_an_engine_without_a_model_looks_at_none(foreign: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "resolve", None)

    assert (chosen(foreign, "ngram"), draft_choice("ngram", None)) == (NGRAM, NGRAM)
    assert chosen(foreign, "ngram", draft="no/such-draft") == NGRAM
    assert chosen(foreign, "none") == DraftChoice("none", None)


def test_an_engine_that_there_is_not_is_answered_with_the_choices():
    with pytest.raises(
        InputError, match=r"no draft engine called 'tarot': choose auto, .*coreml, .*mlx, .*ngram.* or none\."
    ):
        draft_choice("tarot", None)


# The automatic engine ------------------------------------------------------------------------------


@pytest.fixture
def neural_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet machine that has one, with an empty cache folder."""
    monkeypatch.setattr(draft_choice_module, "neural_engine", lambda: "coreml")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))


def converted_in_cache() -> Path:
    """The demo draft's place in the cache, with a folder that looks converted."""
    folder = conversion_of(DEMO_DRAFT)
    data = folder / FOLDER_MODEL / "Data"
    data.mkdir(parents=True)
    (data / "model.mlmodel").write_bytes(b"model")
    return folder


def test_without_a_neural_engine_the_automatic_engine_is_mlx(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "neural_engine", lambda: None)

    assert chosen(str(DEMO_TARGET), AUTO) == DraftChoice("mlx", DEMO_DRAFT)
    assert chosen(str(DEMO_TARGET), AUTO, own=True) == DraftChoice("mlx", DEMO_DRAFT)


def test_the_automatic_engine_of_a_converted_draft_is_core_ml(tmp_path: Path):
    (tmp_path / FOLDER_MODEL).mkdir()
    with pytest.raises(InputError, match=r"lacks package\.json"):
        chosen(str(DEMO_TARGET), AUTO, draft=str(tmp_path))


@pytest.mark.usefixtures("neural_engine")
def test_mlx_drafts_until_it_is_known_which_engine_is_faster():
    choice = chosen(str(DEMO_TARGET), AUTO)

    assert (choice.engine, choice.folder, choice.note) == ("mlx", DEMO_DRAFT, "")
    assert choice.auto is not None
    assert (choice.auto.checkpoint, choice.auto.runtime) == (str(DEMO_DRAFT), "coreml")
    assert chosen(str(DEMO_TARGET), "mlx") == DraftChoice("mlx", DEMO_DRAFT)


@pytest.mark.usefixtures("neural_engine")
def test_the_winner_of_an_earlier_trial_is_begun_with_unless_its_conversion_is_gone(monkeypatch: pytest.MonkeyPatch):
    auto = chosen(str(DEMO_TARGET), AUTO).auto
    assert auto is not None
    auto.record_trial("coreml", "it was faster", EngineRates(coreml=40.0, mlx=30.0))
    gone = chosen(str(DEMO_TARGET), AUTO)
    folder = converted_in_cache()
    with monkeypatch.context() as busy:
        busy.setattr(os, "getloadavg", lambda: (1000.0, 1000.0, 1000.0))
        auto.record_trial("mlx", "it was slower beside much else", EngineRates(coreml=30.0, mlx=40.0))
    won = chosen(str(DEMO_TARGET), AUTO)
    auto.record_trial("mlx", "it was slower", EngineRates(coreml=30.0, mlx=40.0))
    lost = chosen(str(DEMO_TARGET), AUTO)

    assert gone == DraftChoice("mlx", DEMO_DRAFT, "", auto)
    assert won == DraftChoice("coreml", folder, "The draft runs on the Neural Engine (it was faster).", auto)
    assert lost == DraftChoice("mlx", DEMO_DRAFT, "The draft runs in MLX (it was slower): see launch-pipeline doctor.")


@pytest.mark.usefixtures("neural_engine")
def test_a_trial_beside_another_target_says_nothing(foreign: str):
    auto = chosen(str(DEMO_TARGET), AUTO, draft=str(DEMO_DRAFT)).auto
    other = chosen(str(DEMO_DRAFT), AUTO, draft=str(DEMO_DRAFT)).auto
    assert auto is not None
    assert other is not None
    auto.record_trial("mlx", "it was slower", EngineRates(coreml=30.0, mlx=40.0))

    assert auto.verdict() is not None
    assert other.verdict() is None


@pytest.mark.usefixtures("neural_engine")
def test_a_device_that_failed_its_examination_is_not_tried_beside_any_target():
    folder = converted_in_cache()
    record(EngineVerdict(place=place_of(folder), choice="mlx", reason="it crashed"))

    note = "The draft runs in MLX (it crashed): see launch-pipeline doctor."
    assert chosen(str(DEMO_TARGET), AUTO) == DraftChoice("mlx", DEMO_DRAFT, note)


def test_what_a_killed_conversion_left_is_removed_before_the_next_one(home: Path, monkeypatch: pytest.MonkeyPatch):
    place = conversion_of(DEMO_DRAFT)
    half = place.parent / f".{place.name}-abc"
    half.mkdir(parents=True)
    monkeypatch.setattr(converted_draft_module, "_convert", lambda *_: None)
    with pytest.raises(InputError, match="lacks"):
        converted_draft_module.converted_draft(str(DEMO_DRAFT))

    assert not half.exists()


# Preparation for the Neural Engine ----------------------------------------------------------------


@pytest.mark.parametrize(("needed", "tried"), [(5 * GIB, True), (5 * GIB + 1, False)])
def test_core_ml_is_tried_where_it_fits_beside_all_that_the_pipeline_needs(
    needed: int, tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = {"installed_version": "9", "converted_draft": tmp_path, "loaded_bytes": GIB, "_examined": Prepared()}
    facts |= {"usable_bytes": 6 * GIB}
    for name, fact in facts.items():
        monkeypatch.setattr(preparation, name, lambda *_, fact=fact: fact)
    auto: Any = SimpleNamespace(checkpoint="draft")

    found = prepare(auto, needed, lambda _: None)

    if tried:
        assert found == Prepared()
    else:
        assert isinstance(found, Declined)
        assert "1.0 GiB beside the 5.0 GiB that the pipeline needs, which is more than the 6.0 GiB" in found.reason


# Trained drafters ---------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A language model of the shape that the tiny drafters were made for, with its own MTP head."""
    config, head = FORMATS["qwen_mtp"]()
    body = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for index in range(LAYERS):
        body |= layer(f"model.layers.{index}")
    folder = write(tmp_path / "target", (config, body | head))
    shutil.copy(DEMO_TARGET / "tokenizer.json", folder)
    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write(tmp_path / "drafter", FORMATS["safeailab"]())


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_folder_of_each_format_gets_its_engine_and_its_target(tmp_path: Path, target: Path, form: str):
    folder = write(tmp_path / "drafter", FORMATS[form]())
    found = read_drafter(folder)

    assert found is not None
    choice = draft_for(str(target), AUTO, str(folder), silent)
    assert choice._replace(note="") == DraftChoice(found.engine, folder, target=target)
    assert "was never checked" in choice.note


@pytest.mark.usefixtures("neural_engine")
@pytest.mark.parametrize("form", ["safeailab", "dspark", "dflash2"])
def test_a_trained_drafter_is_not_tried_on_the_neural_engine(tmp_path: Path, target: Path, form: str):
    folder = write(tmp_path / "drafter", FORMATS[form]())

    assert draft_for(str(target), AUTO, str(folder), silent).auto is None


def test_a_drafter_needs_no_tokenizer_and_a_target_does(drafter: Path, target: Path):
    assert resolve(str(drafter), "draft") == drafter
    with pytest.raises(InputError, match="holds a trained drafter, no language model"):
        resolve(str(drafter), "target")
    (target / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        resolve(str(target), "draft")


def test_the_target_s_own_mtp_head_drafts_for_it_and_a_smaller_relative_drafts_as_a_model(tmp_path: Path, target: Path):
    relative = tmp_path / "relative"
    shutil.copytree(target, relative)
    config = json.loads((relative / "config.json").read_text())
    (relative / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 4}))

    own = draft_for(str(target), AUTO, str(target), silent)
    assert (own.engine, own.folder, own.target) == ("mtp", target, target)
    assert draft_for(str(relative), AUTO, str(target), silent).engine == "mlx"
    assert draft_for(str(target), "mlx", str(target), silent).engine == "mlx"


@pytest.mark.parametrize(
    ("own_target", "engine", "form", "words"),
    [
        (False, AUTO, "safeailab", r"does not fit the target .*states of 16 numbers, and the target's have 256"),
        (True, "mlx", "dspark", r"a DSpark drafter, which the draft engine mlx can't run: .*choose block"),
        (False, "eagle3", None, "an ordinary language model, which the draft engine eagle3 can't run"),
    ],
)
def test_a_drafter_of_another_target_and_an_engine_that_can_t_run_it_are_refused_before_anything_starts(
    tmp_path: Path, target: Path, own_target: bool, engine: str, form: str | None, words: str
):
    draft = DEMO_DRAFT if form is None else write(tmp_path / "drafter", FORMATS[form]())

    with pytest.raises(InputError, match=words):
        draft_for(str(target if own_target else DEMO_TARGET), engine, str(draft), silent)


def test_bench_measures_a_drafter_and_a_measurement_of_a_language_model_names_it(drafter: Path, target: Path):
    with pytest.raises(InputError, match=r"an EAGLE-3 drafter, .*a language model.*`launch-pipeline bench --draft /"):
        measured_pair(str(DEMO_TARGET), str(drafter))
    assert bench_models(str(target), str(drafter)).engine == "eagle3"
    assert measured_pair(str(DEMO_TARGET), str(DEMO_DRAFT)).draft.engine == "mlx"


def test_a_lent_drafter_needs_its_target_s_name(drafter: Path, target: Path):
    with pytest.raises(InputError, match="uses the embedding of its target: name the target's folder"):
        draft_choice(AUTO, str(drafter))
    assert draft_choice(AUTO, str(drafter), target=target).target == target


def test_a_drafter_s_engine_is_left_to_its_kind_and_it_is_not_converted(drafter: Path):
    assert [first_engine(AUTO, name) for name in (str(drafter), str(DEMO_DRAFT))] == [AUTO, "mlx"]
    with pytest.raises(InputError, match="an EAGLE-3 drafter, which has no form for Core ML: use it as it is"):
        converted_draft(str(drafter))
