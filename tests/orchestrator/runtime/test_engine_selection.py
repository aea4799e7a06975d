"""Laws of the engine of the pipeline's own draft: MLX at once, the faster one in the end, MLX whatever fails."""

from typing import Any

import pytest

from orchestrator.core.commands import TrialDecided
from orchestrator.runtime.engine_selection import LOADING_SECONDS, EngineSelection
from protocol.contracts.coreml import EngineChoice, EngineRates

MLX, CORE_ML, REMOTE = 2, 3, 9
"""Incarnations."""
WON, LOST = TrialDecided(CORE_ML, MLX, 40.0, 30.0), TrialDecided(MLX, CORE_ML, 40.0, 30.0)


class Selection(EngineSelection):
    """Notes what the runtime is asked to do, and apart from that what it tells the user."""

    def __init__(self, first: EngineChoice = "mlx", now: float = 0.0) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.told: list[str] = []
        super().__init__(first, now, self)

    def prepare(self) -> None:
        self.done.append(("prepare",))

    def start_draft(self, engine: EngineChoice) -> None:
        self.done.append(("start", engine))

    def end_draft(self, engine: EngineChoice) -> None:
        self.done.append(("end", engine))

    def record_trial(self, choice: EngineChoice, reason: str, rates: EngineRates) -> None:
        self.done.append(("record", choice, reason, rates))

    def tell(self, text: str, warning: bool = False) -> None:
        self.told.append(text)

    def does(self, *actions: tuple[Any, ...]) -> bool:
        """These, and nothing else since it was asked before."""
        done, self.done = self.done, []
        return done == [*actions]


@pytest.fixture
def on_trial() -> Selection:
    selection = Selection()
    selection.draft_up("mlx", MLX, 8192)
    selection.pipeline_ready()
    selection.prepared()
    selection.draft_up("coreml", CORE_ML, 2048)
    assert selection.does(("prepare",), ("start", "coreml"))
    selection.told.clear()
    return selection


def test_the_neural_engine_is_prepared_once_all_models_are_loaded_beside_a_target_that_verifies_guesses():
    selection = Selection()
    selection.pipeline_ready("plain")
    assert selection.does()
    selection.pipeline_ready("chain")
    selection.pipeline_ready("tree")

    assert selection.does(("prepare",))


@pytest.mark.parametrize(
    ("decided", "winner", "loser"), [(WON, "coreml", "mlx"), (LOST, "mlx", "coreml")], ids=["Core ML", "MLX"]
)
def test_the_loser_of_the_trial_is_ended_and_the_winner_recorded(
    on_trial: Selection, decided: TrialDecided, winner: EngineChoice, loser: EngineChoice
):
    on_trial.trial_decided(decided)
    rates = EngineRates(coreml=40.0, mlx=30.0) if winner == "coreml" else EngineRates(coreml=30.0, mlx=40.0)
    reason = f"{rates.coreml:.1f} tokens/s on the Neural Engine and {rates.mlx:.1f} in MLX, by a trial"

    assert on_trial.does(("end", loser), ("record", winner, reason, rates))
    (told,) = on_trial.told
    assert told.startswith(f"The draft runs {'on the Neural Engine' if winner == 'coreml' else 'in MLX'}")


@pytest.mark.parametrize("loser", [MLX, CORE_ML])
def test_a_trial_of_other_drafts_decides_nothing_here(on_trial: Selection, loser: int):
    on_trial.trial_decided(TrialDecided(REMOTE, loser, 50.0, 30.0))

    assert on_trial.does()


def test_a_preparation_that_fails_leaves_mlx_and_is_told():
    selection = Selection()
    selection.pipeline_ready()
    selection.declined("The model has sliding windows.")

    assert selection.does(("prepare",))
    assert selection.told == ["The draft runs in MLX, not on the Neural Engine: The model has sliding windows."]


def test_a_core_ml_worker_that_is_lost_leaves_mlx(on_trial: Selection):
    on_trial.draft_lost("coreml", "ended by signal 11.")
    on_trial.trial_decided(WON)

    assert on_trial.does()
    assert on_trial.told == ["The draft runs in MLX: on the Neural Engine its worker ended by signal 11."]


def test_when_mlx_is_lost_during_the_trial_core_ml_drafts_and_mlx_is_the_way_back(on_trial: Selection):
    on_trial.draft_lost("mlx", "died three times.")
    on_trial.trial_decided(WON)
    assert on_trial.does()

    on_trial.draft_lost("coreml", "died")
    assert on_trial.does(("start", "mlx"))


def test_a_known_winner_is_begun_with_and_replaced_if_it_can_not_be_loaded():
    selection = Selection("coreml")
    selection.draft_up("coreml", CORE_ML, 2048)
    selection.pipeline_ready()
    assert selection.does()

    selection.draft_lost("coreml", "died")
    assert selection.does(("start", "mlx"))


def test_a_known_winner_that_loads_for_long_keeps_nobody_waiting():
    """The system has lost its prepared copy, and compiles for minutes: MLX drafts, and both are compared again."""
    selection = Selection("coreml", 100.0)
    due = 100.0 + LOADING_SECONDS
    assert selection.deadline() == due
    selection.tick(due - 1)
    assert selection.does()
    selection.tick(due)
    assert selection.does(("start", "mlx"))
    assert selection.deadline() is None
    selection.draft_up("mlx", MLX, 8192)
    selection.draft_up("coreml", CORE_ML, 2048)
    selection.trial_decided(WON)

    assert selection.done[0] == ("end", "mlx")


def test_a_prompt_beyond_the_converted_context_brings_mlx_back_for_good(on_trial: Selection):
    """Core ML's context was chosen at the conversion. From then on both stay, and nothing is recorded."""
    on_trial.submitted(5000)
    assert on_trial.does()
    on_trial.trial_decided(WON)
    on_trial.done.clear()
    for tokens, does in ((2047, []), (2048, [("start", "mlx")]), (5000, [])):
        on_trial.submitted(tokens)
        assert on_trial.does(*does)
    on_trial.draft_up("mlx", 4, 8192)
    on_trial.trial_decided(TrialDecided(4, CORE_ML, 40.0, 30.0))

    assert on_trial.does()


def test_without_any_draft_the_target_decodes_alone_and_that_is_told():
    selection = Selection()
    selection.draft_up("mlx", MLX, 8192)
    selection.draft_lost("mlx", "died three times.")

    assert "decodes alone" in selection.told[0]
