"""Laws of the names that other programs give to commands: the same command with the same settings, never listed."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli

NAMES = {"benchmark": "bench", "list-models": "pairs"}


@pytest.mark.parametrize(("other", "own"), NAMES.items())
def test_a_command_has_its_own_name_and_settings_by_any_name(
    other: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found: list[tuple[str | None, object]] = []
    context = click.get_current_context
    command = cli.commands[own]
    # Without a measurement's name, `bench` is that of the strategies.
    monkeypatch.setattr(
        command.commands["strategies"] if isinstance(command, click.Group) else command,
        "callback",
        lambda **given: found.append((context().command_path.split()[1], given["as_json"])),
    )
    file = tmp_path / "config.toml"
    file.write_text(f"[{own}]\njson = true\n")

    for name in (own, other):
        CliRunner().invoke(cli, ["--config", str(file), name], catch_exceptions=False)

    assert found == [(own, True)] * 2


def test_help_lists_each_command_once():
    listed = CliRunner().invoke(cli, ["--help"], catch_exceptions=False).output

    assert not any(f"  {name} " in listed for name in NAMES)
    assert all(f"  {name} " in listed for name in NAMES.values())
