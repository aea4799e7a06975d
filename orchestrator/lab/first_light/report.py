"""What came of the stages of a first light: the report as data, and as a page. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Literal, TypeAlias

import msgspec

from orchestrator.lab import report as shown
from orchestrator.lab.findings import Answer, Findings
from orchestrator.machine.conditions import Conditions

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
    before: Conditions | None = None
    after: Conditions | None = None
    """None: it did not run."""
    findings: Findings = Findings()

    @property
    def good(self) -> bool:
        """Nothing went wrong. What is not here is not wrong."""
        return self.status != "failed" and self.findings.good


class QuestionRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question and what is known."""

    question: str
    stage: str
    asks: str
    answers: tuple[str, ...] = ()
    reason: str = ""
    """Why there is no answer."""


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What made results: they stand in one report if all but `began` is the same."""

    format: int = 4
    """Raised if a field changes its meaning."""
    program: str
    """Version, and commit where it is known."""
    machine: tuple[str, ...]
    options: tuple[str, ...]
    began: str
    """Date and time, UTC."""


class LightReport(Run, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything, in the order of the questions and of the stages."""

    questions: tuple[QuestionRow, ...]
    stages: tuple[StageReport, ...]


_FOOTER = "Prompts, names, paths and addresses were removed from every file of this folder before it was written."


def page(report: LightReport) -> str:
    """The whole file."""
    heading = [report.program, *report.machine, f"begun {report.began}; {'; '.join(report.options)}"]
    body = f'<div class="card wide">{_questions(report.questions)}</div>{"".join(map(_stage, report.stages))}'
    return shown.page("First light", heading, body, _FOOTER)


def question_rows(questions: Iterable[tuple[str, str, str]], reports: Sequence[StageReport]) -> Iterator[QuestionRow]:
    """Each question with the answers of its stage. `questions`: name, stage, and what is asked. `reports`: of all."""
    by_stage = {report.stage: report for report in reports}
    for name, stage, asks in questions:
        report = by_stage[stage]
        found = [*report.findings.answers, *([_conditions(reports)] if name == "conditions" else [])]
        answers = tuple(each.text for each in found if each.question == name)
        reason = "" if answers else report.reason or " ".join(report.findings.notes) or "its stage does not tell"
        yield QuestionRow(question=name, stage=stage, asks=asks, answers=answers, reason=reason)


def _conditions(reports: Sequence[StageReport]) -> Answer:
    """Of all stages that ran."""
    seen = [each for report in reports for each in (report.before, report.after) if each is not None]
    swap = [each.swap for each in seen if each.swap is not None]
    swapped = f"; swap from {min(swap):,.0f} to {max(swap):,.0f} MiB" if swap else ""
    kinds = "; ".join(sorted({each.speed for each in seen}))
    return Answer("conditions", f"{kinds or 'no stage ran'}{swapped}.")


def _questions(rows: Iterable[QuestionRow]) -> str:
    shown = "".join(
        f'<tr><td class="text"><a href="#{row.stage}">{escape(row.asks)}</a></td>'
        f'<td class="text{"" if row.answers else " absent"}">{escape(" ".join(row.answers) or row.reason)}</td></tr>'
        for row in rows
    )
    return f"<h2>What was asked, and what this run found</h2><table>{shown}</table>"


def _stage(stage: StageReport) -> str:
    reason = f"{_state(stage)}{': ' if stage.reason else ''}{escape(stage.reason)}"
    title = f'<h2 id="{stage.stage}">{escape(stage.title)}</h2><p class="{_look(stage)}">{reason}</p>'
    pair = f"Before: {stage.before}. After: {stage.after}." if stage.before else ""
    conditions = f'<p class="faint">{escape(pair)}</p>' if pair else ""
    return f'<div class="card">{title}{conditions}{shown.section(stage.findings)}</div>'


def _look(stage: StageReport) -> str:
    if stage.status in ("not here", "skipped"):
        return "absent"
    return "done" if stage.good else "failed"


def _state(stage: StageReport) -> str:
    if stage.status != "done":
        return stage.status
    return f"{'done' if stage.good else 'found something wrong'}, {stage.seconds:.0f} s"
