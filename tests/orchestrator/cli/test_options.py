"""Laws of the options that several commands share: the help of each says what that command does."""

import click
import pytest

from orchestrator.cli.commands.attach import attach
from orchestrator.cli.commands.generate import generate
from orchestrator.cli.commands.measurements.calibrate import calibrate


@pytest.mark.parametrize(
    ("command", "automatic"),
    [
        (attach, "auto: coreml for a folder that `convert` made, otherwise mlx; "),
        (generate, "auto: mlx, and on Apple silicon the faster of mlx and coreml; "),
        (calibrate, ""),
    ],
)
def test_only_a_pipeline_promises_the_faster_engine(command: click.Command, automatic: str):
    option = next(each for each in command.params if "--draft-engine" in each.opts or each.name == "engine")

    assert isinstance(option, click.Option)
    assert option.help is not None
    assert option.help.partition("block: ")[0] == automatic
