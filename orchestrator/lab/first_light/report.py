"""What came of the stages of a first light: the report as data, and as a page. Pure."""

from collections.abc import Iterable
from html import escape
from typing import Literal, TypeAlias

import msgspec

from orchestrator.lab import report as shown
from orchestrator.lab.findings import Findings

Status: TypeAlias = Literal["done", "failed", "not here", "skipped"]
"""not here: this machine lacks what the stage needs; skipped: there was no time, or the user left it out."""


class StageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stage ended, and what it found."""

    stage: str
    title: str
    status: Status
    reason: str = ""
    """Why it is not done."""
    seconds: float = 0.0
    findings: Findings = Findings()

    @property
    def good(self) -> bool:
        """Nothing went wrong. What is not here is not wrong."""
        return self.status != "failed" and self.findings.good


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What made results: they stand in one report if all but `began` is the same."""

    format: int = 3
    """Raised if a field changes its meaning."""
    program: str
    """Version, and commit where it is known."""
    machine: tuple[str, ...]
    options: tuple[str, ...]
    began: str
    """Date and time, UTC."""


class LightReport(Run, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything, in the order of the stages."""

    stages: tuple[StageReport, ...]


_FOOTER = """\
measured: by this run on this machine. computed: from such numbers, by the formula beside it. reported: by others, \
elsewhere, for comparison. Prompts, names, paths and addresses were removed from every file of this folder before it \
was written."""


def page(report: LightReport) -> str:
    """The whole file."""
    heading = [report.program, *report.machine, f"begun {report.began}; {'; '.join(report.options)}"]
    cards = (_settled(report.stages), _summary(report.stages))
    body = "".join(f'<div class="card wide">{card}</div>' for card in cards if card)
    body += "".join(map(_stage, report.stages))
    return shown.page("First light", heading, body, _FOOTER)


def settled(stages: Iterable[StageReport]) -> list[str]:
    """What was open before this run and is known now, a sentence each."""
    return [sentence for stage in stages for sentence in stage.findings.settled]


def _settled(stages: Iterable[StageReport]) -> str:
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in settled(stages))
    return f"<h2>What this run settled</h2><ul>{found}</ul>" if found else ""


def _summary(stages: Iterable[StageReport]) -> str:
    rows = [
        f'<tr><td><a href="#{stage.stage}">{escape(stage.title)}</a></td>'
        f'<td class="{_look(stage)}">{_state(stage)}</td><td class="text faint">{escape(_result(stage))}</td></tr>'
        for stage in stages
    ]
    return f"<table>{''.join(rows)}</table>"


def _stage(stage: StageReport) -> str:
    reason = f"{_state(stage)}{': ' if stage.reason else ''}{escape(stage.reason)}"
    title = f'<h2 id="{stage.stage}">{escape(stage.title)}</h2><p class="{_look(stage)}">{reason}</p>'
    return f'<div class="card">{title}{shown.section(stage.findings)}</div>'


def _look(stage: StageReport) -> str:
    if stage.status in ("not here", "skipped"):
        return "absent"
    return "done" if stage.good else "failed"


def _state(stage: StageReport) -> str:
    if stage.status != "done":
        return stage.status
    return f"{'done' if stage.good else 'found something wrong'}, {stage.seconds:.0f} s"


def _result(stage: StageReport) -> str:
    """One line: the reason, what is wrong, or the first of this machine's numbers, or of its checks."""
    checks = stage.findings.checks
    wrong = [check for check in checks if check.status == "fail"]
    own = [value for value in stage.findings.values if value.origin != "reported"]
    if stage.reason or wrong:
        return stage.reason or f"{wrong[0].name}: {wrong[0].text}"
    if own:
        return f"{own[0].name}: {shown.shown(own[0].value)} {own[0].unit}"
    if len(checks) == 1:
        return checks[0].text
    warnings = sum(check.status == "warn" for check in checks)
    return f"{len(checks)} checks, {warnings} warnings" if checks else ""
