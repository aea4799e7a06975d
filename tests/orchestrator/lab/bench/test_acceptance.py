"""What drafts guess alone: the texts of a bench, and the process that is asked."""

from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.lab.bench.acceptance import ExaminedDrafter, TargetText, examined, written_texts
from orchestrator.lab.bench.contender import TimedGeneration
from orchestrator.lab.bench.measurement import BenchRequest, Measurement, Setting
from orchestrator.lab.bench.models import BenchModels
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.strategies import findings
from protocol.errors import InputError
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.shown import shown

PROMPT = tuple(range(300, 320))
PAIR = BenchModels(DEMO_TARGET, DEMO_DRAFT)


@pytest.fixture(scope="module")
def texts() -> list[TargetText]:
    """Of the target alone, with shared noise."""
    with Pipeline(str(DEMO_TARGET), strategy="ar") as pipeline:
        return [
            TargetText(
                tokens=(*PROMPT, *pipeline.generate(PROMPT, params).tokens),
                prompt=len(PROMPT),
                temperature=params.temperature or 0.0,
                seed=params.seed or 0,
            )
            for params in (
                SamplingParams(temperature=0, max_tokens=24),
                SamplingParams(temperature=1, seed=7, max_tokens=24),
            )
        ]


def drafters(texts: list[TargetText], *folders: Path) -> dict[str, ExaminedDrafter]:
    calls: list[tuple[str, int, int]] = []
    found = examined(PAIR, folders, texts, lambda *call: calls.append(call), 1)
    assert [call[1:] for call in calls] == [(done + 1, len(calls)) for done in range(len(calls))]
    return {each.found.name: each for each in found}


@pytest.mark.thorough
def test_the_target_guesses_its_own_text_and_lookup_does_not(texts: list[TargetText], tmp_path: Path):
    (tmp_path / "itself").symlink_to(DEMO_TARGET)
    exit_ = tmp_path / "exit"
    exit_.mkdir()
    (exit_ / "config.json").write_text('{"model_type": "exit", "layers": 3}')

    found = drafters(texts, tmp_path / "itself", exit_)

    assert list(found) == [DEMO_DRAFT.name, "itself", "exit", "lookup"]
    for each in found["itself"].found.acceptance:
        assert each.rates == ((1.0,) * 5,)
    first = {name: each.found.acceptance[0].rates[0][0] or 0.0 for name, each in found.items()}
    assert first["lookup"] < first["itself"]
    assert first[DEMO_DRAFT.name] > 0.1
    assert [found[name].parameters is None for name in found] == [False, False, False, True]
    assert all(each.found.seconds_per_guess > 0 for each in found.values())
    options = {"target": None, "draft": None, "repeats": 1, "max_tokens": 8, "temperature": (0.0,)}
    told = findings([], BenchPlan.of(draft_tokens="0", strategies="ar", **options), 2, guesses=list(found.values()))
    assert [each["name"] for each in told.figures["drafters"]] == list(found)
    assert "1.000" in shown(told)


@pytest.mark.thorough
def test_a_draft_that_does_not_fit_is_told(texts: list[TargetText], tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "exit", "layers": 60}')

    with pytest.raises(InputError, match="choose an exit"):
        drafters(texts, tmp_path)


def test_texts_are_the_target_s_of_the_first_repeat_with_shared_noise():
    def measured(repeat: int, temperature: float, family: str, *tokens: int) -> Measurement:
        generation = TimedGeneration(tokens=tokens, tokens_per_second=1.0, tokens_per_round=1.0)
        return Measurement(Setting(repeat, 0, temperature), "any", family, generation)  # type: ignore[arg-type]

    measurements = [
        measured(0, 0.0, "rival", 9, 9),
        measured(0, 0.0, "mlx-lm", 1, 2),
        measured(0, 0.0, "coupled", 1, 2),
        measured(0, 1.0, "mlx-lm", 3, 4),
        measured(0, 1.0, "rejection", 5, 6),
        measured(0, 1.0, "coupled", 7, 8),
        measured(1, 1.0, "coupled", 8, 8),
    ]

    found = written_texts(measurements, [BenchRequest((5, 6, 7), 0)])

    assert [(text.tokens, text.prompt, text.temperature) for text in found] == [
        ((5, 6, 7, 1, 2), 3, 0.0),
        ((5, 6, 7, 7, 8), 3, 1.0),
    ]
