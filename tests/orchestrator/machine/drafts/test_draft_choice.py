"""Laws of the choice of a draft: what was asked for, a shipped draft beside a target that it fits, or none."""

from pathlib import Path

import pytest

from orchestrator.machine.drafts import draft_choice as draft_choice_module
from orchestrator.machine.drafts.draft_choice import DraftChoice, draft_choice, draft_for
from orchestrator.machine.recommended_pairs import pairs
from protocol.errors import InputError
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
    engine, folder, note = chosen(foreign, engine)

    assert (engine, folder) == ("none", None)
    assert f"fits the target {foreign}: choose a draft of the target's family or the draft engine ngram." in note
    assert "\n" not in note


def test_the_note_names_the_draft_of_a_recommended_pair_with_this_target(foreign: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "resolve", lambda *_: Path(foreign))
    pair = pairs()["qwen2.5-3b"]

    assert f"choose the draft {pair.draft.id} or the draft engine ngram." in chosen(pair.target.id).note


def test_the_note_names_no_pair_that_cannot_be_used(foreign: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "resolve", lambda *_: Path(foreign))

    pair = pairs()["gemma3-12b"]

    assert pair.draft.id not in chosen(pair.target.id).note


def test_a_draft_that_is_named_is_taken_whatever_the_target(foreign: str):
    assert chosen(foreign, draft=str(DEMO_DRAFT)) == DraftChoice("mlx", DEMO_DRAFT)


def test_a_program_of_ones_own_drafts_beside_any_target(foreign: str):
    assert chosen(foreign, own=True) == DraftChoice("mlx", None)


def test_an_engine_without_a_model_looks_at_none(foreign: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_choice_module, "resolve", None)

    assert (chosen(foreign, "ngram"), draft_choice("ngram", None)) == (NGRAM, NGRAM)
    assert chosen(foreign, "ngram", draft="no/such-draft") == NGRAM
    assert chosen(foreign, "none") == DraftChoice("none", None)


def test_an_engine_that_there_is_not_is_answered_with_the_choices():
    with pytest.raises(
        InputError, match=r"no draft engine called 'tarot': choose coreai, coreml, mlx, ngram or none\."
    ):
        draft_choice("tarot", None)
