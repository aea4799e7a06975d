"""Laws of a bench's rows: speeds over prompts, ratios with intervals by baseline, latencies, the best K of a line."""

import json
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import pytest

from orchestrator.lab.bench.contender import Measurement
from orchestrator.lab.bench.figures import (
    BURST_SECONDS,
    FEWEST_PROMPTS,
    BenchRow,
    best_of_each_line,
    bootstrap_interval,
    gaps,
    paired_ratio,
    percentile,
    quartiles,
    rows,
    rows_by_category,
)
from orchestrator.lab.bench.strategies import findings
from orchestrator.lab.bench.trials import Start
from orchestrator.lab.report import json_text
from tests.support.bench_measurements import bench_plan, measurement, pace
from tests.support.shown import complaints, shown

_NAMES = ["mlx-lm", "mlx-lm K=1", "mlx-lm K=2", "plain (ar)", "ssd K=1", "ssd K=2", "adaptive"]
_SPEEDS = {"mlx-lm K=2": 1.3, "mlx-lm K=1": 1.2, "ssd K=1": 1.5, "ssd K=2": 1.4, "adaptive": 1.6}
_CATEGORIES = ("chat", "code", "translation")


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
            arrivals=(0.1, 0.2, 0.2, 0.4),
        )
        for repeat in range(repeats)
        for prompt in range(prompts)
        for name in _NAMES
    ]


def _by_prompt(speeds: Mapping[str, Sequence[float]], temperature: float = 0.0) -> list[Measurement]:
    """Contenders' tokens/s on each prompt; the first prompt's category is code."""
    return [
        measurement(name, speed, prompt, temperature=temperature, category="chat" if prompt else "code")
        for name, each in speeds.items()
        for prompt, speed in enumerate(each)
    ]


def _row(found: list[BenchRow], name: str) -> BenchRow:
    return next(row for row in found if row.contender == name)


def _shown(found: list[BenchRow], by_category: dict[str, list[BenchRow]] | None = None, prompts: int = 9) -> str:
    return shown(findings(found, bench_plan(), prompts, by_category), width=128)


def test_figures_are_over_prompts_and_not_over_repeats():
    speeds = [(10.0, 10.0, 90.0), (20.0, 20.0, 20.0), (30.0, 1.0, 30.0)]
    found = [
        measurement("ar", speed, prompt, repeat=repeat)
        for prompt, each in enumerate(speeds)
        for repeat, speed in enumerate(each)
    ]
    (row,) = rows(found, ["ar"])

    assert (row.tokens_per_second, row.quartiles, len(row.generations)) == (20.0, (15.0, 25.0), 9)


def test_a_ratio_is_the_median_over_prompts_with_its_interval_to_each_line_of_the_baseline_at_its_best():
    adaptive = _row(rows(_run(), _NAMES), "adaptive")

    assert adaptive.ratios.keys() == {"mlx-lm", "mlx-lm K=2", "plain (ar)"}
    assert adaptive.best_baseline == "mlx-lm K=2"
    assert adaptive.over_best == adaptive.ratios["mlx-lm K=2"]
    for ratio in adaptive.ratios.values():
        assert ratio.interval is not None
        assert ratio.interval.low <= ratio.median <= ratio.interval.high
    assert adaptive.ratios["mlx-lm"].median == pytest.approx(1.6, rel=0.03)
    assert adaptive.ratios["mlx-lm K=2"].median == pytest.approx(1.6 / 1.3, rel=0.03)


def test_the_baseline_is_mlx_lm_at_its_best_plain_or_speculative():
    speeds = {"mlx-lm": [20.0] * 2, "mlx-lm K=2": [10.0] * 2, "ar": [30.0] * 2}
    ar = _row(rows(_by_prompt(speeds), list(speeds)), "ar")

    assert (ar.best_baseline, ar.over_best) == ("mlx-lm", (1.5, None))


def test_ratios_are_medians_over_pairs_and_not_ratios_of_medians():
    found = _by_prompt({"mlx-lm": (10.0, 100.0, 30.0), "plain (ar)": (20.0, 50.0, 90.0)})
    plain = _row(rows(found, ["mlx-lm", "plain (ar)"]), "plain (ar)")

    assert {name: ratio.median for name, ratio in plain.ratios.items()} == {"mlx-lm": 2.0, "plain (ar)": 1.0}


def test_the_best_baseline_has_the_highest_median_at_each_temperature_and_not_the_fastest_generation():
    one, two, ar = (20.0, 21.0, 22.0), (10.0, 12.0, 90.0), (30.0, 30.0, 30.0)
    found = [
        *_by_prompt({"mlx-lm K=1": one, "mlx-lm K=2": two, "ar": ar}, 0.0),
        *_by_prompt({"mlx-lm K=1": two, "mlx-lm K=2": one, "ar": ar}, 1.0),
    ]
    found = rows(found, ["mlx-lm K=1", "mlx-lm K=2", "ar"])

    assert [row.best_baseline for row in found if row.contender == "ar"] == ["mlx-lm K=1", "mlx-lm K=2"]


def test_the_turns_of_a_prompt_are_one_run_of_tokens_and_seconds():
    """A turn that takes a third of the time counts for a quarter of the seconds, not for half of the speed."""
    found = [
        measurement("ar", speed, prompt, turn=turn) for prompt, turn, speed in ((0, 0, 10), (0, 1, 30), (1, 0, 50))
    ]

    (row,) = rows(found, ["ar"])

    assert (row.tokens_per_second, len(row.generations)) == (pytest.approx((15 + 50) / 2), 3)


def test_latencies_are_medians_of_first_tokens_and_percentiles_of_all_gaps():
    found = [
        measurement("ar", 1.0, 0, arrivals=(0.1, 0.2, 0.3)),
        measurement("ar", 1.0, 1, arrivals=(0.3, 0.3, 0.8, 1.8)),
    ]
    (row,) = rows(found, ["ar"])

    assert (row.median("time_to_first_token"), row.median("total_time")) == (pytest.approx(0.2), pytest.approx(1.05))
    assert row.inter_token(0.5) == pytest.approx(0.3)
    assert row.inter_token(0.95) == pytest.approx(np.quantile([0.1, 0.1, 0.5, 1.0], 0.95))


@pytest.mark.parametrize(
    "figures", [{}, {"arrivals": (0.1, 0.2), "compares_prefill": False}], ids=["none", "not paced"]
)
def test_a_contender_without_arrivals_or_with_another_prefill_has_no_time_to_its_first_token(figures: dict):
    (row,) = rows([measurement("ar", 1.0, **figures)], ["ar"])

    assert (row.median("time_to_first_token"), row.median("total_time")) == (None, None)
    assert (row.inter_token(0.95) is None) == (not figures)


def test_the_rows_of_a_category_are_those_of_its_prompts_alone_and_only_if_there_are_categories():
    found = _run()
    alone = rows([one for one in found if one.setting.category == "code"], _NAMES)

    assert rows_by_category(found, _NAMES)["code"] == alone
    assert rows_by_category([measurement("ar", 1.0)], ["ar"]) == {}


def test_no_category_chooses_a_baseline_of_its_own():
    speeds = {"mlx-lm K=1": (10.0, 30.0, 30.0), "mlx-lm K=2": (20.0, 20.0, 20.0), "ar": (20.0, 20.0, 20.0)}
    ar = _row(rows_by_category(_by_prompt(speeds), list(speeds))["code"], "ar")

    assert (ar.best_baseline, ar.over_best) == ("mlx-lm K=1", (2.0, None))


def test_the_table_has_the_best_k_of_each_line_and_all_that_is_wrong_or_invalid():
    found = [
        measurement("sd K=1", 10.0),
        measurement("sd K=2", 20.0, tokens=(3, 4)),
        measurement("sd K=3", 15.0, pace=pace(50)),
        measurement("sd K=4", 5.0),
    ]
    best = best_of_each_line(rows(found, [f"sd K={count}" for count in range(1, 5)]))

    assert [(row.contender, row.valid) for row in best] == [("sd K=1", True), ("sd K=2", False), ("sd K=3", False)]
    assert [row.contender for row in best_of_each_line(rows(_run(), _NAMES))] == [
        *("mlx-lm", "mlx-lm K=2", "plain (ar)", "ssd K=1", "adaptive")
    ]


def test_many_categories_with_long_names_fit_into_128_columns():
    names = [*_NAMES, "without lookup", "lookup alone", "blind draft", "llama.cpp ngram-simple, trigrams"]
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
    start: dict[str, Start] = {"mlx-lm": {"weights": 2.25}, "adaptive": {"weights": 1.25, "warm-up and costs": 0.25}}
    told = findings(rows(found, _NAMES), bench_plan(), 9, by_category, start=start)
    values = json.loads(json_text(told))

    assert [row["contender"] for row in values["results"]] == _NAMES
    groups = {name: len(group) for name, group in values["by_category"].items()}
    assert groups == dict.fromkeys(_CATEGORIES, len(_NAMES))
    adaptive = values["results"][-1]
    assert adaptive["quartiles"]["low"] <= adaptive["tokens_per_second"] <= adaptive["quartiles"]["high"]
    ratio = adaptive["ratios"]["mlx-lm K=2"]
    assert (adaptive["best_baseline"], adaptive["over_best"]) == ("mlx-lm K=2", ratio)
    assert ratio["interval"]["low"] <= ratio["median"] <= ratio["interval"]["high"]
    assert values["start"] == start
    assert " ".join(shown(told, width=128).split()).count("warm-up and costs - 0.25") == 1


def test_the_parts_of_adaptive_are_compared_by_the_medians_of_whole_requests_in_each_category():
    whole = {"mlx-lm": 8.0, "plain (ar)": 6.0, "adaptive": 3.0, "without lookup": 4.0, "lookup alone": 4.5}
    found = [
        measurement(name, 9.0, prompt, category=category, arrivals=(0.1, seconds * (1 + prompt)))
        for name, seconds in whole.items()
        for prompt, category in enumerate(("chat", "code", "code"))
    ]
    told = findings(rows(found, list(whole)), bench_plan(), 3, rows_by_category(found, list(whole)))

    shares = [{"temperature": 0.0, "category": each, "draft": 1.5, "lookup": 4 / 3} for each in ("chat", "code", "all")]
    assert [{name: each[name] for name in shares[0]} for each in told.figures["parts"]] == shares
    assert told.figures["parts"][2]["over_each"]["adaptive"] == 2.0
    (line,) = (line for line in shown(told, width=128).splitlines() if "1.50" in line and "all" in line)
    assert line.split() == ["all", "0.75", "1.00", "2.00", "1.50", "1.33", "1.50", "1.33"]
    alone = [one for one in found if one.contender != "adaptive"]
    assert findings(rows(alone, list(whole)), bench_plan(), 3).figures["parts"] == []


# Contenders that are wrong, or too slow --------------------------------------------------------------


def test_overruns_are_counted_over_all_forwards_and_reported_as_invalid():
    overruns = {"ar": (0, 0, 3), "adaptive": (1, 1, 2)}
    found = rows(
        [measurement(name, 9.0, n, pace=pace(each)) for name, many in overruns.items() for n, each in enumerate(many)],
        ["ar", "adaptive"],
    )
    told = findings(found, bench_plan(), prompts=1)

    assert [(row.overruns, row.representative) for row in found] == [
        (pytest.approx(0.01), True),
        (pytest.approx(4 / 300), False),
    ]
    assert found[1].median("stretch") == 0.001
    (sentence,) = complaints(told, "warn")
    assert sentence.startswith("adaptive at temperature 0: invalid: 1.3% of its forwards took longer")
    assert told.figures["representative"] is False


def test_a_wrong_contender_is_shown_without_a_speed():
    found = [measurement("mlx-lm", 123.0), measurement("ar", 456.0, tokens=(1, 3))]
    told = findings(rows(found, ["mlx-lm", "ar"]), bench_plan(), prompts=1)
    text = shown(told, width=100)

    assert [words in text for words in ("123.0", "WRONG", "456")] == [True, True, False]
    assert complaints(told) == ["ar at temperature 0: 1 of 1 generations differ from the reference"]
    assert told.figures["exact"] is False


def test_the_legend_explains_what_is_shown_alone():
    text = _shown(rows([measurement("mlx-lm", 10.0)], ["mlx-lm"]), prompts=1)

    assert not any(words in text for words in ("blind draft", "rej:", "overran:", "busy:", "differ only in K"))


# Statistics ------------------------------------------------------------------------------------------


def _ratios(count: int, seed: int) -> list[float]:
    return np.random.default_rng(seed).lognormal(0.2, 0.3, count).tolist()


@pytest.mark.parametrize("count", [6, 7, 33, 198])
def test_an_interval_contains_the_median_of_the_ratios(count: int):
    for ratios in (_ratios(count, seed) for seed in (1, 2, 3)):
        low, high = bootstrap_interval(ratios)
        assert min(ratios) <= low <= median(ratios) <= high <= max(ratios)


def test_a_shuffled_pairing_widens_the_interval():
    random = np.random.default_rng(7)
    baseline = random.uniform(20.0, 80.0, 40)
    ours = 1.3 * baseline * random.uniform(0.97, 1.03, 40)
    paired, shuffled = (
        bootstrap_interval((ours / other).tolist()) for other in (baseline, random.permutation(baseline))
    )

    assert shuffled.high - shuffled.low > 5 * (paired.high - paired.low)


def test_95_of_100_intervals_contain_the_median_of_the_population():
    intervals = [bootstrap_interval(_ratios(33, seed)) for seed in range(200)]
    covered = sum(interval.low <= np.exp(0.2) <= interval.high for interval in intervals)

    assert 0.90 <= covered / len(intervals) <= 0.99


@pytest.mark.parametrize(("count", "known"), [(FEWEST_PROMPTS, True), (FEWEST_PROMPTS - 1, False)])
def test_a_ratio_of_few_prompts_has_no_interval(count: int, known: bool):
    found = paired_ratio(dict(enumerate(_ratios(count, seed=9))))

    assert found is not None
    assert (found.interval is not None) == known
    assert paired_ratio({}) is None


def test_half_of_the_values_are_between_the_quartiles_and_a_percentile_is_above_its_share():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)
    assert quartiles([3.0]) == (3.0, 3.0)
    assert percentile(list(range(101)), 0.95) == 95.0
    assert percentile([], 0.95) is None


def test_tokens_of_a_burst_arrive_at_once_and_one_token_has_no_gap():
    near = BURST_SECONDS / 10

    assert gaps([1.0, 1.0, 1.0 + near, 1.5, 1.5 + near, 1.7]) == pytest.approx([0.5, 0.2], abs=3 * near)
    assert gaps([1.0]) == gaps([]) == []
