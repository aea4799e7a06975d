"""The command line's `--pace`, the same for every command that runs models."""

import click

from orchestrator.machine.device_profiles import profile_names

pace_option = click.option(
    "--pace",
    metavar="PROFILE",
    help=f"Be as slow as another device: {', '.join(profile_names())}, or a file that `calibrate` wrote.",
)
