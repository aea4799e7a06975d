"""Forwards by width: whether their logits depend on it, and what they take, by context too."""

from collections.abc import Sequence
from itertools import chain, pairwise

from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Cell, Findings, Table
from orchestrator.lab.first_light.pipelines import larger_plan, measured_pair, plan, prompts
from orchestrator.lab.first_light.stages import Asked
from orchestrator.lab.forwards import (
    TIE,
    Compared,
    ForwardOrder,
    ForwardReport,
    ForwardsReady,
    ForwardTimed,
    Head,
    Precision,
    Ties,
    examined,
)
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import computes_on_gpu

_PROMPT = 32
_EVERY_WIDTH = (*range(1, 18), 32)
_FEW_WIDTHS = (1, 2, 5, 8)
_COLUMNS = ("head", "width", "largest difference (std)", "flips", "positions", "gap at a flip (std)", "shape")
_CONTEXTS, _CONTEXTS_ON_GPU = (32, 512, 2048), (32, 4096, 16384)
_CHEAP = 1.25
"""Times a forward of one token: so much does a forward cost at most whose further tokens are called cheap."""


def measure(asked: Asked) -> Findings:
    gpu = computes_on_gpu()
    return _measured(asked, plan(), gpu, asked.sized(40, 256 if gpu else 96))


def measure_larger(asked: Asked) -> Findings:
    """Of the second pair's target. Its float32 copy would not fit."""
    return _measured(asked, larger_plan(asked), True, asked.sized(40, 96), precisions=("stored",))


def _measured(
    asked: Asked, ours: BenchPlan, gpu: bool, places: int, precisions: tuple[Precision, ...] = ("stored", "float32")
) -> Findings:
    models = ours.models()
    length = _PROMPT + places
    tokens = tuple(chain.from_iterable(encoded(prompts(models, length), ours)))[:length]
    widths = _FEW_WIDTHS if asked.settings.short else _EVERY_WIDTH
    tables: list[Table] = []
    checks: list[Check] = []
    settled: list[str] = []
    for precision in precisions if gpu and not asked.settings.short else ("stored",):
        reports: list[ForwardReport] = []
        order = ForwardOrder(
            folder=str(models.target),
            precision=precision,
            tokens=tokens,
            prompt=_PROMPT,
            compared=widths,
            heads=("own", "float32") if precision == "stored" else ("own",),
            timed=widths,
            contexts=_CONTEXTS_ON_GPU if gpu else _CONTEXTS[: asked.sized(1, 3)],
            samples=asked.sized(2, 8 if gpu else 4),
        )
        for report in examined(order):
            reports.append(report)
            asked.notice(_words(precision, report))
            asked.so_far(Findings(tables=(*tables, *report_tables(precision, reports)), notes=measured_pair(models)))
        tables += report_tables(precision, reports)
        checks.append(check(precision, reports, gpu))
        if precision == "stored":
            settled += sentences(reports)
    return Findings(tables=tuple(tables), checks=tuple(checks), settled=tuple(settled), notes=measured_pair(models))


def sentences(reports: Sequence[ForwardReport]) -> list[str]:
    """How often rounding decides a token in the model's own type, and where forwards become dearer."""
    found: list[str] = []
    kind = next((one.activations for one in reports if isinstance(one, ForwardsReady)), "its own type")
    for one in reports:
        if isinstance(one, Ties):
            flips, places = _flips(reports, one.head)
            type = f"{kind}, by the model's own head" if one.head == "own" else "float32, by the same head in 32 bits"
            found.append(
                f"Ties ({type}): the two best logits are equal at {one.equal} of {one.positions} places and within one "
                f"unit of the last place at {one.near}; {flips} of {places:,} favourites change with the width."
            )
    times: dict[int, dict[int, float]] = {}
    for one in reports:
        if isinstance(one, ForwardTimed):
            times.setdefault(one.context, {})[one.width] = one.milliseconds
    return found + [_steps(context, of_width) for context, of_width in times.items() if len(of_width) > 1]


def _flips(reports: Sequence[ForwardReport], head: Head) -> tuple[int, int]:
    compared = [one for one in reports if isinstance(one, Compared) and one.head == head]
    return sum(one.flips for one in compared), sum(one.positions for one in compared)


def _steps(context: int, times: dict[int, float]) -> str:
    """`times`: milliseconds by rising width."""
    alone = times[min(times)]
    cheap = max(width for width in times if all(times[each] <= _CHEAP * alone for each in times if each <= width))
    narrow, wide = max(pairwise(times), key=lambda step: times[step[1]] / times[step[0]])
    return (
        f"Width steps behind {context:,} tokens: a forward of up to {cheap} tokens takes at most {_CHEAP:g} times that "
        f"of a single one ({alone:.2f} ms); the largest step is from {narrow} to {wide} tokens, "
        f"{times[wide] / times[narrow]:.2f} times."
    )


def report_tables(precision: Precision, reports: Sequence[ForwardReport]) -> list[Table]:
    """Logits by width, and milliseconds by width with a column for each context."""
    kind = ", ".join(f"{one.activations} on the {one.device}" for one in reports if isinstance(one, ForwardsReady))
    logits: list[tuple[Cell, ...]] = [
        (one.head, one.width, one.difference, one.flips, one.positions, one.gap, one.shape)
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
            "a flip. head: the model's own, or the same in 32 bits behind the same states.",
        ),
        Table(
            f"Time of a forward by width ({precision}, {kind})",
            ("tokens", *(f"ms behind {context} tokens" for context in contexts)),
            tuple(rows),
            "Medians of a process that does nothing else; the logits are waited for. The context's KV is made up.",
        ),
    ]


def check(precision: Precision, reports: Sequence[ForwardReport], gpu: bool) -> Check:
    """On a processor no favourite changes with the width; on a GPU only one that is nearly tied does."""
    compared = [one for one in reports if isinstance(one, Compared) and one.head == "own"]
    flips, positions = _flips(reports, "own")
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
        case Ties(head):
            return f"{precision}: ties, {head} head"
        case ForwardTimed(width, context):
            return f"{precision}: width {width} behind {context} tokens"
        case _:
            return precision
