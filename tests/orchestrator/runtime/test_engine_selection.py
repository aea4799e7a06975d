"""Laws of the engine of the pipeline's own draft: MLX at once, the faster one in the end, MLX whatever fails."""

import pytest

from orchestrator.core.commands import TrialDecided
from orchestrator.runtime.engine_selection import (
    LOADING_SECONDS,
    EndDraft,
    EngineSelection,
    Prepare,
    RecordTrial,
    SelectionAction,
    StartDraft,
    Tell,
)
from protocol.contracts.coreml import EngineChoice, EngineRates

MLX, CORE_ML, REMOTE = 2, 3, 9
"""Incarnations."""


def without_words(actions: list[SelectionAction]) -> list[SelectionAction]:
    return [action for action in actions if not isinstance(action, Tell)]


def told(actions: list[SelectionAction]) -> str:
    (tell,) = (action for action in actions if isinstance(action, Tell))
    return tell.text


def on_trial() -> EngineSelection:
    selection = EngineSelection("mlx", 0.0)
    selection.draft_up("mlx", MLX, 8192)
    selection.pipeline_ready()
    selection.prepared()
    selection.draft_up("coreml", CORE_ML, 2048)
    return selection


def test_the_neural_engine_is_prepared_once_all_models_are_loaded_beside_a_target_that_verifies_guesses():
    selection = EngineSelection("mlx", 0.0)

    assert EngineSelection("mlx", 0.0).pipeline_ready("plain") == []
    assert EngineSelection("mlx", 0.0).pipeline_ready("chain") == [Prepare()]
    assert selection.draft_up("mlx", MLX, 8192) == []
    assert selection.pipeline_ready() == [Prepare()]
    assert selection.pipeline_ready() == []
    assert selection.prepared() == [StartDraft("coreml")]


@pytest.mark.parametrize(
    ("decided", "winner", "loser"),
    [
        (TrialDecided(CORE_ML, MLX, 40.0, 30.0), "coreml", "mlx"),
        (TrialDecided(MLX, CORE_ML, 40.0, 30.0), "mlx", "coreml"),
    ],
)
def test_the_loser_of_the_trial_is_ended_and_the_winner_recorded(
    decided: TrialDecided, winner: EngineChoice, loser: EngineChoice
):
    actions = on_trial().trial_decided(decided)
    rates = EngineRates(coreml=40.0, mlx=30.0) if winner == "coreml" else EngineRates(coreml=30.0, mlx=40.0)

    reason = f"{rates.coreml:.1f} tokens/s on the Neural Engine and {rates.mlx:.1f} in MLX, by a trial"

    assert without_words(actions) == [EndDraft(loser), RecordTrial(winner, reason, rates)]
    assert told(actions).startswith(f"The draft runs {'on the Neural Engine' if winner == 'coreml' else 'in MLX'}")


def test_a_trial_of_other_drafts_decides_nothing_here():
    selection = on_trial()

    assert selection.trial_decided(TrialDecided(REMOTE, MLX, 50.0, 30.0)) == []
    assert selection.trial_decided(TrialDecided(REMOTE, CORE_ML, 50.0, 30.0)) == []


def test_a_preparation_that_fails_leaves_mlx_and_is_told_and_counted():
    selection = EngineSelection("mlx", 0.0)
    selection.pipeline_ready()
    actions = selection.declined("The model has sliding windows.")

    assert without_words(actions) == []
    assert told(actions) == "The draft runs in MLX, not on the Neural Engine: The model has sliding windows."
    assert selection.warnings == 1


def test_a_core_ml_worker_that_is_lost_leaves_mlx():
    selection = on_trial()
    actions = selection.draft_lost("coreml", "ended by signal 11.")

    assert without_words(actions) == []
    assert told(actions) == "The draft runs in MLX: on the Neural Engine its worker ended by signal 11."
    assert selection.trial_decided(TrialDecided(CORE_ML, MLX, 40.0, 30.0)) == []


def test_when_mlx_is_lost_during_the_trial_core_ml_drafts_and_mlx_is_the_way_back():
    selection = on_trial()

    assert selection.draft_lost("mlx", "died three times.") == []
    assert selection.trial_decided(TrialDecided(CORE_ML, MLX, 40.0, 30.0)) == []
    assert without_words(selection.draft_lost("coreml", "died")) == [StartDraft("mlx")]


def test_a_known_winner_is_begun_with_and_replaced_if_it_can_not_be_loaded():
    selection = EngineSelection("coreml", 0.0)
    lost = EngineSelection("coreml", 0.0)

    assert selection.draft_up("coreml", CORE_ML, 2048) == []
    assert selection.pipeline_ready() == []
    assert without_words(lost.draft_lost("coreml", "died")) == [StartDraft("mlx")]


def test_a_known_winner_that_loads_for_long_keeps_nobody_waiting():
    """The system has lost its prepared copy, and compiles for minutes: MLX drafts, and both are compared again."""
    selection = EngineSelection("coreml", 100.0)
    assert selection.deadline() == 100.0 + LOADING_SECONDS
    assert selection.tick(100.0) == []
    assert without_words(selection.tick(100.0 + LOADING_SECONDS)) == [StartDraft("mlx")]
    assert selection.deadline() is None
    selection.draft_up("mlx", MLX, 8192)
    selection.draft_up("coreml", CORE_ML, 2048)

    assert EndDraft("mlx") in selection.trial_decided(TrialDecided(CORE_ML, MLX, 40.0, 30.0))


def test_a_prompt_beyond_the_converted_context_brings_mlx_back_for_good():
    """Core ML's context was chosen at the conversion. From then on both stay, and nothing is recorded."""
    selection = on_trial()
    assert selection.submitted(5000) == []
    selection.trial_decided(TrialDecided(CORE_ML, MLX, 40.0, 30.0))
    assert selection.submitted(2047) == []
    assert without_words(selection.submitted(2048)) == [StartDraft("mlx")]
    assert selection.submitted(5000) == []
    selection.draft_up("mlx", 4, 8192)

    assert selection.trial_decided(TrialDecided(4, CORE_ML, 40.0, 30.0)) == []


def test_without_any_draft_the_target_decodes_alone_and_that_is_told():
    selection = EngineSelection("mlx", 0.0)
    selection.draft_up("mlx", MLX, 8192)

    assert "decodes alone" in told(selection.draft_lost("mlx", "died three times."))
