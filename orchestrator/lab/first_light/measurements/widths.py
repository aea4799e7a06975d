"""Forwards by width: whether their logits depend on it, and what they take, by context too."""

from collections.abc import Sequence

from orchestrator.lab.bench.ties import TIE
from orchestrator.lab.findings import Cell, Findings, Table
from orchestrator.lab.first_light.forwards import (
    Compared,
    ForwardOrder,
    ForwardReport,
    ForwardsReady,
    ForwardTimed,
    Precision,
    examined,
)
from orchestrator.lab.first_light.measurements.texts import measured_pair, plan, text
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import computes_on_gpu

_PROMPT = 32
_EVERY_WIDTH = (*range(1, 18), 32)
_FEW_WIDTHS = (1, 2, 5, 8)
_COLUMNS = ("width", "largest difference (std)", "flips", "positions", "gap at a flip (std)", "shape")


def measure(asked: Asked) -> Findings:
    ours = plan()
    models = ours.models()
    gpu = computes_on_gpu()
    tokens = text(models, ours, _PROMPT + asked.sized(40, 256 if gpu else 96))
    widths = _FEW_WIDTHS if asked.settings.short else _EVERY_WIDTH
    tables: list[Table] = []
    checks: list[Check] = []
    precisions: tuple[Precision, ...] = ("stored", "float32") if gpu and not asked.settings.short else ("stored",)
    for precision in precisions:
        reports: list[ForwardReport] = []
        order = ForwardOrder(
            folder=str(models.target),
            precision=precision,
            tokens=tokens,
            prompt=_PROMPT,
            compared=widths,
            timed=widths,
            contexts=(64,) if asked.settings.short else (64, 512, 2048) if not gpu else (64, 512, 2048, 6144),
            samples=asked.sized(2, 8 if gpu else 4),
        )
        for report in examined(order):
            reports.append(report)
            asked.notice(_words(precision, report))
            asked.so_far(Findings(tables=(*tables, *report_tables(precision, reports)), notes=measured_pair(models)))
        tables += report_tables(precision, reports)
        checks.append(check(precision, reports, gpu))
    return Findings(tables=tuple(tables), checks=tuple(checks), notes=measured_pair(models))


def report_tables(precision: Precision, reports: Sequence[ForwardReport]) -> list[Table]:
    """Logits by width, and milliseconds by width with a column for each context."""
    kind = ", ".join(f"{one.activations} on the {one.device}" for one in reports if isinstance(one, ForwardsReady))
    logits: list[tuple[Cell, ...]] = [
        (one.width, one.difference, one.flips, one.positions, one.gap, one.shape)
        for one in reports
        if isinstance(one, Compared)
    ]
    times = {(one.width, one.context): one.milliseconds for one in reports if isinstance(one, ForwardTimed)}
    contexts = list(dict.fromkeys(context for _, context in times))
    rows: list[tuple[Cell, ...]] = [
        (width, *(times.get((width, context)) for context in contexts)) for width in dict.fromkeys(w for w, _ in times)
    ]
    return [
        Table(
            f"Logits by width, against width 1 ({precision}, {kind})",
            _COLUMNS,
            tuple(logits),
            "difference: the largest at any position, in standard deviations of the position's logits. flips: "
            "positions with another most probable token. gap: the largest between the two most probable tokens at "
            "a flip.",
        ),
        Table(
            f"Time of a forward by width ({precision}, {kind})",
            ("tokens", *(f"ms behind {context} tokens" for context in contexts)),
            tuple(rows),
            "Medians of a process that does nothing else; the logits are waited for.",
        ),
    ]


def check(precision: Precision, reports: Sequence[ForwardReport], gpu: bool) -> Check:
    """On a processor no favourite changes with the width; on a GPU only one that is nearly tied does."""
    compared = [one for one in reports if isinstance(one, Compared)]
    flips, positions = sum(one.flips for one in compared), sum(one.positions for one in compared)
    largest, gap = max(one.difference for one in compared), max((one.gap or 0.0 for one in compared), default=0.0)
    name = f"logits, {precision}"
    text = f"{flips} of {positions:,} favourites change with the width; logits differ by {largest:.2g} std at most"
    if not flips:
        return Check(name, "ok", text)
    text = f"{text}; the largest gap at a change is {gap:.2g} std"
    if gpu and gap < TIE:
        return Check(name, "warn", text)
    return Check(name, "fail", text, "please report this: rounding does not explain it")


def _words(precision: Precision, report: ForwardReport) -> str:
    match report:
        case ForwardsReady():
            return f"{precision}: comparing logits"
        case Compared(width):
            return f"{precision}: logits of width {width}"
        case ForwardTimed(width, context):
            return f"{precision}: width {width} behind {context} tokens"
