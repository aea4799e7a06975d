"""Laws of the commands that keep a pipeline running: what one can do, the others can."""

import pytest

from orchestrator.cli.app import cli
from tests.orchestrator.cli.test_cli import run, sentence


def options(command: str) -> set[str]:
    return {flag for option in cli.commands[command].params for flag in option.opts}


def test_serve_has_every_option_of_a_pipeline():
    assert options("start") == options("serve-workers")
    assert options("start") - options("serve") == set()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["start", "serve"])
def test_nothing_is_announced_where_nobody_can_come(command: str):
    code, _, errors = run(command, "--announce", "studio")

    assert code == 2
    assert "add --listen HOST:PORT" in sentence(errors)
