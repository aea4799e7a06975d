"""`launch-pipeline cache`: what `--disk-cache` keeps, and how to remove it.

Knows no contents of files.
Several processes may use one folder: files appear whole, are never changed, and may vanish.
"""

import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import click
from rich.table import Table
from rich.text import Text

from orchestrator.cli.help import Group
from orchestrator.cli.printing import print_whole
from orchestrator.cli.sentences import say
from protocol.errors import PipelineError
from protocol.kv.cache_files import disk_cache_folder, files_of, label_of, model_entries, model_folders
from protocol.shown_names import model_name

_TRIES = 3


class CachedModel(NamedTuple):
    """What is kept of one model."""

    folder: Path
    model: str
    """The model's folder or id, as it was when its KV was kept."""
    chunks: int
    bytes: int
    used: float
    """Time of the last use, in seconds since 1970."""


def cached_models() -> list[CachedModel]:
    """What the disk cache holds, the model that was used last first."""
    found = []
    for folder in model_folders(disk_cache_folder()):
        files = list(files_of(folder))
        used = max((when for *_, when in files), default=0.0)
        found.append(CachedModel(folder, label_of(folder), len(files), sum(size for _, size, _ in files), used))
    return sorted(found, key=lambda model: -model.used)


def clear_disk_cache() -> int:
    """Remove all of it; the number of bytes. A server that is at work goes on and keeps new turns.

    The cache's folder may be a link, but no link in it is followed. Raises PipelineError if something is left.
    """
    root = disk_cache_folder()
    try:
        entries = model_entries(root)
    except OSError as error:
        raise PipelineError(f"{root} can't be read ({error.strerror}): remove what is in it by hand.") from error
    sizes = {model.folder: model.bytes for model in cached_models()}
    left = {entry: reason for entry in entries if (reason := _removed(entry))}
    removed = sum(size for folder, size in sizes.items() if folder not in left)
    if left:
        reasons = "; ".join(f"{entry} ({reason})" for entry, reason in left.items())
        raise PipelineError(f"{removed / 1e9:.2f} GB removed, but these are left, to be removed by hand: {reasons}.")
    return removed


def _removed(entry: Path) -> str:
    """Remove a model's folder. Why that failed; empty if it is gone."""
    if entry.is_symlink():
        return f"a link to {entry.readlink()}, which is not followed"
    reason = ""
    for _ in range(_TRIES):
        # A server that is at work may add a file meanwhile, or remove one.
        try:
            shutil.rmtree(entry)
        except OSError as error:
            reason = error.strerror or str(error)
        if not entry.exists():
            return ""
    return reason


@click.group(cls=Group)
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
        say(f"In {disk_cache_folder()}")
    else:
        say("Nothing is kept: start `launch-pipeline serve --disk-cache GB` to keep finished turns.")


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove all of it. Requests then read their prompts anew."""
    kept = sum(model.bytes for model in cached_models())
    if not yes and kept:
        click.confirm(f"Remove {kept / 1e9:.2f} GB in {disk_cache_folder()}?", abort=True)
    say(f"{clear_disk_cache() / 1e9:.2f} GB removed.")


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
