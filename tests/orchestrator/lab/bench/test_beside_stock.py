"""Laws of the comparison of forwards with mlx-lm's: ratios within a sample, aims, and the command in real processes."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.cli.commands.measurements import bench as command
from orchestrator.cli.commands.measurements.bench import bench
from orchestrator.lab.bench.figures import Ratio
from orchestrator.lab.bench.forwards import KindFigures, chain_ratio, tree_ratio
from orchestrator.lab.forwards import ForwardsReady, ForwardTimed


def timed(width: int, stock: float, chain: float, tree: float) -> ForwardTimed:
    """The machine is half as fast in every other sample."""
    slow = (1.0, 2.0) * 3
    return ForwardTimed(width, 256, *(tuple(time * each for each in slow) for time in (chain, tree, stock)))


def test_ratios_are_taken_within_a_sample_and_two_tokens_are_a_chain_in_any_tree():
    wide, narrow = timed(8, 100.0, 101.0, 110.0), timed(2, 100.0, 101.0, 110.0)

    assert chain_ratio(wide).median == pytest.approx(1.01)
    assert chain_ratio(wide).interval == pytest.approx((1.01, 1.01))
    assert tree_ratio(narrow) is None
    found = tree_ratio(wide)
    assert found is not None
    assert found.median == pytest.approx(1.1)


@pytest.mark.parametrize(("chain", "undo", "missed"), [(104.0, 0.02, []), (106.0, 0.04, ["2 tokens", "undo"])])
def test_a_missed_aim_is_named(chain: float, undo: float, missed: list[str]):
    figures = KindFigures(
        kind="delta",
        model=ForwardsReady("GPU", "float16"),
        context=256,
        timed=[timed(2, 100.0, chain, 0.0)],
        undo=Ratio(undo, None),
    )
    assert figures.missed == missed


@pytest.mark.thorough
def test_the_command_measures_random_models_in_a_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "ORDER", msgspec.structs.replace(command.ORDER, size="tiny", timed=(1, 4), undone=4))
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
