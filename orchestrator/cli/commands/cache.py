"""`launch-pipeline cache`: what `--disk-cache` keeps, and how to remove it."""

import json
import time

import click
from rich.table import Table
from rich.text import Text

from orchestrator.cli.report import print_whole
from orchestrator.machine.disk_cache import CachedModel, cached_models, clear_disk_cache
from protocol.kv.cache_files import disk_cache_folder
from protocol.shown_names import model_name


@click.group()
def cache() -> None:
    """Keys and values of finished turns that `--disk-cache` keeps on disk."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_cache(as_json: bool) -> None:
    """List what is kept, by model."""
    models = cached_models()
    if as_json:
        click.echo(json.dumps([{**model._asdict(), "folder": str(model.folder)} for model in models]))
    elif models:
        print_whole(cache_table(models, time.time()))
        click.echo(f"In {disk_cache_folder()}")
    else:
        click.echo("Nothing is kept: start `launch-pipeline serve --disk-cache GB` to keep finished turns.")


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove all of it. Requests then read their prompts anew."""
    kept = sum(model.bytes for model in cached_models())
    if not yes and kept:
        click.confirm(f"Remove {kept / 1e9:.2f} GB in {disk_cache_folder()}?", abort=True)
    click.echo(f"{clear_disk_cache() / 1e9:.2f} GB removed.")


def cache_table(models: list[CachedModel], now: float) -> Table:
    """`now`: seconds since 1970."""
    table = Table(box=None, padding=(0, 2))
    for title in ("model", "GB", "files", "last used"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for model in models:
        name = model_name(model.model) or model.folder.name
        used = _age(now - model.used) if model.chunks else ""
        table.add_row(Text(name), f"{model.bytes / 1e9:.2f}", str(model.chunks), used)
    return table


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
