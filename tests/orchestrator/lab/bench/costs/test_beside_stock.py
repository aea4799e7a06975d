"""Laws of the comparison of forwards with mlx-lm's: ratios within a sample, aims, and the command in real processes."""

import json
from functools import partial

import pytest
from click.testing import CliRunner

from orchestrator.cli.commands.measurements import bench as command
from orchestrator.cli.commands.measurements.bench import bench
from orchestrator.lab.bench.forwards import Built, ComparisonOrder, Sampled, figures_of, findings, measure
from orchestrator.lab.findings import Listener
from protocol.errors import PipelineError
from tests.support.shown import shown

BUILT = Built(kind="delta", architecture="qwen3_5", level="tree", parameters=290_000_000)


def sampled(stock: float, chain: float, tree: float, undo: float) -> Sampled:
    """One forward of 2 and of 8 tokens."""
    by_name = {name: {2: time, 8: 2 * time} for name, time in (("stock", stock), ("chain", chain), ("tree", tree))}
    return Sampled(kind="delta", **by_name, round=100.0, undo=undo)


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


def test_a_missed_aim_is_named():
    assert figures_of(BUILT, [sampled(100.0, 106.0, 106.0, 4.0)]).missed == ["2 tokens", "8 tokens", "undo"]


@pytest.mark.thorough
def test_the_command_measures_random_models_in_a_process(monkeypatch: pytest.MonkeyPatch):
    tiny = partial(ComparisonOrder, size="tiny", widths=(1, 4), context=24, round=4)
    monkeypatch.setattr(command, "ComparisonOrder", tiny)
    arguments = ["forwards", "--kind", "delta", "--kind", "rwkv", "--repeats", "6"]
    printed = CliRunner().invoke(bench, [*arguments, "--json"], catch_exceptions=False)
    found = json.loads(printed.stdout)

    assert found["settings"]["samples"] == 6
    assert [(one["kind"], one["level"]) for one in found["results"]] == [("delta", "tree"), ("rwkv", "chain")]
    for one in found["results"]:
        assert one["undo"]["interval"] is not None
        for width, figures in one["widths"].items():
            assert figures["milliseconds"] > 0.0
            assert figures["chain"]["median"] > 0.0
            assert (figures["tree"] is not None) == (one["kind"] == "delta" and width == "4")


def test_every_kind_has_a_row_a_width():
    order = ComparisonOrder(widths=(2, 8), samples=6)
    found = findings([figures_of(BUILT, [sampled(100.0, 101.0, 110.0, 2.0)] * 6)], order)
    lines = shown(found).splitlines()

    named = "delta qwen3_5, 290M tree"
    chain, tree, undo = (f"{each} ({each} to {each})" for each in ("1.01", "1.10", "2.0%"))
    assert " ".join(lines[1].split()) == f"{named} 2 100.0 {chain} {undo}"
    assert " ".join(lines[2].split()) == f"{named} 8 200.0 {chain} {tree} {undo}"
    assert found.figures["results"][0]["missed"] == []
    assert found.checks == ()


@pytest.mark.thorough
def test_a_process_that_fails_is_an_error_with_its_last_line():
    with pytest.raises(PipelineError, match=r"comparison of forwards ended unexpectedly.*ValueError"):
        measure(ComparisonOrder(size="tiny", kinds=("attention",), context=0), Listener())
