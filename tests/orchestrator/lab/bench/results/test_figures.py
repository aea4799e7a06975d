"""Laws of a bench's rows: speeds over prompts, ratios by baseline, latencies, categories, the best K of a line."""

import json

import numpy as np
import pytest

from orchestrator.lab.bench.figures import BenchRow, best_of_each_line, rows, rows_by_category
from orchestrator.lab.bench.measurement import Measurement
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.strategies import findings
from orchestrator.lab.report import json_text
from protocol.messages.client import Pace
from tests.support.bench_measurements import measurement
from tests.support.shown import shown

_NAMES = ["mlx-lm", "mlx-lm K=1", "mlx-lm K=2", "mlx-lm, target's cores", "ar", "ssd K=1", "ssd K=2", "adaptive"]
_SPEEDS = {"mlx-lm K=2": 1.3, "mlx-lm K=1": 1.2, "ssd K=1": 1.5, "ssd K=2": 1.4, "adaptive": 1.6}
_CATEGORIES = ("chat", "code", "translation")


def _plan() -> BenchPlan:
    options = {"target": None, "draft": None, "repeats": 2, "max_tokens": 8, "controls": False}
    return BenchPlan.of(draft_tokens="1-2", strategies="ar,adaptive", temperature=(), **options)


def _run(prompts: int = 9, repeats: int = 2) -> list[Measurement]:
    """Every contender on every prompt; a third of the prompts in each category."""
    random = np.random.default_rng(1)
    return [
        measurement(
            name,
            (30.0 + 5 * prompt) * _SPEEDS.get(name, 1.0) * random.uniform(0.98, 1.02),
            prompt,
            repeat=repeat,
            category=_CATEGORIES[prompt % 3],
            time_to_first_token=0.1 + prompt / 100,
            total_time=2.0,
            arrivals=(0.1, 0.2, 0.2, 0.4),
        )
        for repeat in range(repeats)
        for prompt in range(prompts)
        for name in _NAMES
    ]


def _row(found: list[BenchRow], name: str) -> BenchRow:
    return next(row for row in found if row.contender == name)


def _shown(found: list[BenchRow], by_category: dict[str, list[BenchRow]] | None = None, prompts: int = 9) -> str:
    return shown(findings(found, _plan(), prompts, by_category), width=128)


def test_quartiles_are_over_prompts_and_not_over_repeats():
    found = [measurement("ar", speed, prompt, repeat=repeat)
             for prompt, speeds in enumerate([(10.0, 10.0, 90.0), (20.0, 20.0, 20.0), (30.0, 1.0, 30.0)])
             for repeat, speed in enumerate(speeds)]  # fmt: skip

    (row,) = rows(found, ["ar"])

    assert (row.tokens_per_second, row.quartiles) == (20.0, (15.0, 25.0))
    assert (row.slowest, row.fastest, row.generations) == (1.0, 90.0, 9)


def test_a_ratio_is_the_median_over_prompts_with_its_interval():
    found = rows(_run(), _NAMES)

    adaptive = _row(found, "adaptive")

    assert adaptive.best_baseline == "mlx-lm K=2"
    assert adaptive.over_best == adaptive.ratios["mlx-lm K=2"]
    for ratio in adaptive.ratios.values():
        assert ratio.interval is not None
        assert ratio.interval.low <= ratio.median <= ratio.interval.high
    assert adaptive.over_plain == adaptive.ratios["mlx-lm"].median == pytest.approx(1.6, rel=0.03)
    assert adaptive.over_speculative == adaptive.ratios["mlx-lm K=2"].median == pytest.approx(1.6 / 1.3, rel=0.03)


def test_each_line_of_the_baseline_is_compared_with_its_best_number_of_draft_tokens():
    assert set(_row(rows(_run(), _NAMES), "ar").ratios) == {"mlx-lm", "mlx-lm K=2", "mlx-lm, target's cores", "ar"}


def test_the_baseline_is_mlx_lm_on_all_cores_at_its_best_and_no_other_line():
    speeds = {"mlx-lm": 20.0, "mlx-lm K=2": 10.0, "mlx-lm, target's cores": 90.0, "ar": 30.0}
    found = [measurement(name, speed, prompt) for name, speed in speeds.items() for prompt in range(2)]
    ar = _row(rows(found, list(speeds)), "ar")

    assert ar.best_baseline == "mlx-lm"
    assert ar.over_best == (1.5, None)


def test_latencies_are_medians_of_first_tokens_and_percentiles_of_all_gaps():
    found = [
        measurement("ar", 1.0, 0, time_to_first_token=0.1, total_time=1.0, arrivals=(0.1, 0.2, 0.3)),
        measurement("ar", 1.0, 1, time_to_first_token=0.3, total_time=3.0, arrivals=(0.3, 0.3, 0.8, 1.8)),
    ]

    (row,) = rows(found, ["ar"])

    assert (row.time_to_first_token, row.total_time) == (pytest.approx(0.2), pytest.approx(2.0))
    assert row.inter_token_p50 == pytest.approx(0.3)
    assert row.inter_token_p95 == pytest.approx(np.quantile([0.1, 0.1, 0.5, 1.0], 0.95))


def test_a_contender_without_arrivals_has_no_latency():
    (row,) = rows([measurement("ar", 1.0)], ["ar"])

    assert (row.time_to_first_token, row.total_time, row.inter_token_p50, row.inter_token_p95) == (None,) * 4


def test_the_rows_of_a_category_are_those_of_its_prompts_alone():
    found = _run()
    alone = rows([one for one in found if one.setting.category == "code"], _NAMES)

    assert rows_by_category(found, _NAMES)["code"] == alone


def test_no_category_chooses_a_baseline_of_its_own():
    names = ["mlx-lm K=1", "mlx-lm K=2", "ar"]
    speeds = {"mlx-lm K=1": (10.0, 30.0, 30.0), "mlx-lm K=2": (20.0, 20.0, 20.0), "ar": (20.0, 20.0, 20.0)}
    found = [
        measurement(name, speed, prompt, category="code" if prompt == 0 else "chat")
        for name in names
        for prompt, speed in enumerate(speeds[name])
    ]

    code = rows_by_category(found, names)["code"]

    assert _row(code, "ar").best_baseline == "mlx-lm K=1"
    assert _row(code, "ar").over_speculative == 2.0


def test_prompts_without_categories_have_no_rows_by_category():
    assert rows_by_category([measurement("ar", 1.0)], ["ar"]) == {}


def test_the_table_has_the_best_k_of_each_line():
    best = best_of_each_line(rows(_run(), _NAMES))

    assert [row.contender for row in best] == [
        *("mlx-lm", "mlx-lm K=2", "mlx-lm, target's cores", "ar", "ssd K=1", "adaptive")
    ]


def test_a_wrong_or_invalid_contender_is_always_shown_and_never_the_best_of_its_line():
    overran = Pace(profile="m4", forwards=100, overruns=50, stretch=0.1, valid=False)
    found = [
        measurement("sd K=1", 10.0),
        measurement("sd K=2", 20.0, tokens=(3, 4)),
        measurement("sd K=3", 15.0, pace=overran),
    ]

    best = best_of_each_line(rows(found, ["sd K=1", "sd K=2", "sd K=3"]))

    assert [row.contender for row in best] == ["sd K=1", "sd K=2", "sd K=3"]
    assert [row.valid for row in best] == [True, False, False]


def test_many_categories_with_long_names_fit_into_128_columns():
    names = [*_NAMES, "adaptive, no lookup", "lookup", "random draft", "llama.cpp ngram-simple, trigrams"]
    categories = [f"question answering {number}" for number in range(13)]
    found = [
        measurement(name, 30.0, prompt, category=category)
        for name in names
        for prompt, category in enumerate(categories)
    ]

    lines = _shown(rows(found, names), rows_by_category(found, names)).splitlines()

    assert max(map(len, lines)) <= 128
    table = [line for line in lines if line.startswith("question answering")]
    assert [line.split()[3:] for line in table] == [["1.00"] * (len(names) - 2)] * 13


def test_json_has_every_contender_and_category_with_intervals_by_name():
    found = _run()
    by_category = rows_by_category(found, _NAMES)

    values = json.loads(json_text(findings(rows(found, _NAMES), _plan(), 9, by_category)))

    assert [row["contender"] for row in values["results"]] == _NAMES
    assert {name: len(group) for name, group in values["by_category"].items()} == dict.fromkeys(
        _CATEGORIES, len(_NAMES)
    )
    adaptive = values["results"][-1]
    assert adaptive["quartiles"]["low"] <= adaptive["tokens_per_second"] <= adaptive["quartiles"]["high"]
    ratio = adaptive["ratios"]["mlx-lm K=2"]
    assert (adaptive["best_baseline"], adaptive["over_best"]) == ("mlx-lm K=2", ratio)
    assert ratio["interval"]["low"] <= ratio["median"] <= ratio["interval"]["high"]
