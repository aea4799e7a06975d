"""Writes a profile's files into a folder."""

from pathlib import Path

import msgspec

from orchestrator.tools.profile.analysis.episode import episodes
from orchestrator.tools.profile.analysis.excerpt import excerpt
from orchestrator.tools.profile.measure import MeasuredRun
from orchestrator.tools.profile.report.page import page
from orchestrator.tools.profile.report.perfetto_trace import perfetto_trace
from orchestrator.tools.profile.report.timeline import write_timeline
from protocol.errors import InputError

NAMES = ("report.html", "timeline.png", "trace.perfetto-trace", "profile.json")


def require_folder(folder: Path) -> None:
    """Make it. Raises InputError if that can't be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} can't be made ({error.strerror}): choose another folder for --out.") from error


def write_files(measured: MeasuredRun, folder: Path) -> list[Path]:
    """All files of `NAMES`; returns their paths."""
    profile, run = measured.profile, measured.run
    shown = [excerpt(run, episode) for episode in episodes(run)[-len(profile.accounts) :]]
    report, picture, trace, figures = (folder / name for name in NAMES)
    report.write_text(page(profile, shown), encoding="utf-8")
    write_timeline(profile, shown, picture)
    trace.write_bytes(perfetto_trace(run))
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    return [report, picture, trace, figures]
