"""Laws of the comparison of forwards with mlx-lm's: ratios within a sample, aims, and the command in real processes."""

import json
from functools import partial

import pytest
from click.testing import CliRunner

from orchestrator.cli.commands.measurements import bench as command
from orchestrator.cli.commands.measurements.bench import bench
from orchestrator.lab.bench.forwards import Built, ComparisonOrder, Sampled, figures_of

BUILT = Built(kind="delta", architecture="qwen3_5", level="tree", parameters=290_000_000)


def sampled(stock: float, chain: float, tree: float, undo: float) -> Sampled:
    """One forward of 2 and of 8 tokens."""
    by_name = {name: {2: time, 8: 2 * time} for name, time in (("stock", stock), ("chain", chain), ("tree", tree))}
    return Sampled(kind="delta", context=256, **by_name, round=100.0, undo=undo)


def test_ratios_are_taken_within_a_sample():
    # The machine is half as fast in every other sample.
    samples = [sampled(100.0 * slow, 101.0 * slow, 110.0 * slow, 2.0) for slow in (1.0, 2.0) * 3]
    figures = figures_of(BUILT, samples)

    assert figures.widths[8].milliseconds == pytest.approx(300.0)
    assert figures.widths[8].chain.median == pytest.approx(1.01)
    assert figures.widths[8].chain.interval == pytest.approx((1.01, 1.01))
    assert figures.undo.median == pytest.approx(0.02)
    assert figures.missed == []


def test_two_tokens_are_a_chain_in_any_tree():
    widths = figures_of(BUILT, [sampled(100.0, 100.0, 110.0, 2.0)]).widths

    assert widths[2].tree is None
    assert widths[8].tree is not None
    assert widths[8].tree.median == pytest.approx(1.1)
    assert widths[8].chain.interval is None
    assert widths[8].alone.median == pytest.approx(2.0)


def test_a_missed_aim_is_named():
    assert figures_of(BUILT, [sampled(100.0, 106.0, 106.0, 4.0)]).missed == ["2 tokens", "8 tokens", "undo"]


@pytest.mark.thorough
def test_the_command_measures_random_models_in_a_process(monkeypatch: pytest.MonkeyPatch):
    tiny = partial(ComparisonOrder, size="tiny", widths=(1, 4), round=4)
    monkeypatch.setattr(command, "ComparisonOrder", tiny)
    arguments = ["forwards", "--kind", "delta", "--kind", "rwkv", "--repeats", "6", "--context", "24"]
    printed = CliRunner().invoke(bench, [*arguments, "--json"], catch_exceptions=False)
    found = json.loads(printed.stdout)

    assert found["settings"]["samples"] == 6
    assert {one["context"] for one in found["results"]} == {24}
    assert [(one["kind"], one["level"]) for one in found["results"]] == [("delta", "tree"), ("rwkv", "chain")]
    for one in found["results"]:
        assert one["undo"]["interval"] is not None
        for width, figures in one["widths"].items():
            assert figures["milliseconds"] > 0.0
            assert figures["chain"]["median"] > 0.0
            assert (figures["tree"] is not None) == (one["kind"] == "delta" and width == "4")
