"""Forwards by width, type and company: whether their logits depend on it, and what they take, by context too."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, product

import msgspec

from orchestrator.lab.bench.plan import BenchModels, BenchPlan
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Answer, Cell, Findings, Table
from orchestrator.lab.first_light.pipelines import measured_pair, plan, prompts
from orchestrator.lab.first_light.stages import Asked
from orchestrator.lab.forwards import (
    TIE,
    Compared,
    ForwardOrder,
    ForwardReport,
    ForwardsReady,
    ForwardTimed,
    Precision,
    Shape,
    Ties,
    examined,
)
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import computes_on_gpu

_PROMPT = 32
_EVERY_WIDTH = (*range(1, 18), 32)
_FEW_WIDTHS = (1, 2, 5, 8)
_COLUMNS = ("width", "largest difference (std)", "flips", "positions", "gap at a flip (std)", "shape")
_CONTEXTS, _CONTEXTS_ON_GPU = (32, 512, 2048), (32, 4096, 16384)
_OF_LEVELS = (5, 9)
_TYPES: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
_KNOWN = 1024
"""Tokens of the mixture of experts."""
_CHEAP = 1.25
"""Times a forward of one token: so much does a forward cost at most whose further tokens are called cheap."""


def measure(asked: Asked) -> Findings:
    ours, gpu = plan(), computes_on_gpu()
    models = ours.models()
    widths = _FEW_WIDTHS if asked.settings.short else _EVERY_WIDTH
    order = ForwardOrder(
        folder=str(models.target),
        tokens=_text(ours, models, asked.sized(40, 256 if gpu else 96)),
        prompt=_PROMPT,
        compared=widths,
        timed=widths,
        contexts=_CONTEXTS_ON_GPU if gpu else _CONTEXTS[: asked.sized(1, 3)],
        samples=asked.sized(2, 8 if gpu else 4),
    )
    reports: list[ForwardReport] = []
    asked.notice("timing and comparing forwards")
    for report in examined(order):
        reports.append(report)
        asked.so_far(Findings(tables=tuple(report_tables("stored", reports)), notes=measured_pair(models)))
    return Findings(
        tables=tuple(report_tables("stored", reports)),
        checks=(check("stored", reports, gpu),),
        answers=tuple(sentences(reports)),
        notes=measured_pair(models),
    )


def levels(asked: Asked) -> Findings:
    """Of the default target and of a small mixture of experts, in each type that a GPU computes in."""
    ours, gpu = plan(), computes_on_gpu()
    models = ours.models()
    text = _text(ours, models, asked.sized(5, 96))
    found = Findings(notes=measured_pair(models))
    for name, precision in product(("default target", "mixture of experts"), _TYPES if gpu else _TYPES[:1]):
        title, folder = f"{name}, {precision}", "" if name.startswith("mix") else str(models.target)
        asked.notice(title)
        order = ForwardOrder(
            folder=folder,
            precision=precision,
            tokens=text if folder else tuple(token % _KNOWN for token in text),
            prompt=_PROMPT,
            compared=_OF_LEVELS[: asked.sized(1, 2)],
            joint=True,
        )
        reports = list(examined(order))
        found = msgspec.structs.replace(
            found,
            tables=(*found.tables, report_tables(title, reports)[0]),
            # Experts that are nearly tied explain larger differences.
            checks=(*found.checks, *([check(title, reports, gpu)] if folder else [])),
            answers=(*found.answers, *_levels(title, reports)),
        )
        asked.so_far(found)
    return found


def _levels(title: str, reports: Sequence[ForwardReport]) -> Iterator[Answer]:
    compared = [one for one in reports if isinstance(one, Compared)]
    far: dict[Shape, float] = {}
    for one in compared:
        far[one.shape] = max(far.get(one.shape, 0.0), one.difference)
    told = ", ".join(f"{shape} {worst:.2g}" for shape, worst in far.items())
    for ready in (one for one in reports if isinstance(one, ForwardsReady)):
        reason = f" ({ready.reason})" if ready.reason else ""
        yield Answer(
            "levels", f"{title}: level {ready.level}{reason}; deviations from single tokens: {told or 'none'}."
        )
    flips = sum(one.flips for one in compared if one.shape == "joint")
    joint = f"are off by {far['joint']:.2g} deviations, {flips} favourites change" if "joint" in far else "don't exist"
    yield Answer("joint forwards", f"{title}: rows that share a forward {joint}.")


def drafters(asked: Asked) -> Findings:
    """Rows of a trained drafter with random weights, in the two types that drafters are published in."""
    gpu = computes_on_gpu()
    answers: list[Answer] = []
    checks: list[Check] = []
    for precision in _TYPES[1 : asked.sized(2, 3)]:
        asked.notice(f"an EAGLE-3 drafter in {precision}")
        order = ForwardOrder(
            drafter=4096 if gpu else 256, precision=precision, timed=(1, 8), contexts=(32,), samples=asked.sized(2, 30)
        )
        kind, size, told = "", 0, list[str]()
        for one in examined(order):
            if isinstance(one, ForwardsReady):
                kind, size = one.activations, one.size
            elif isinstance(one, ForwardTimed):
                rate = size / one.milliseconds / 1e6
                told.append(f"width {one.width}: a forward in {one.milliseconds:.2f} ms ({rate:.1f} GB/s)")
        status = "ok" if kind == precision else "fail"
        checks.append(Check(f"drafter in {precision}", status, f"computes in {kind}"))
        answers.append(Answer("trained drafters", f"EAGLE-3, {precision}: computes in {kind}; {', '.join(told)}."))
    return Findings(checks=tuple(checks), answers=tuple(answers))


def _text(ours: BenchPlan, models: BenchModels, places: int) -> tuple[int, ...]:
    """The target's tokens of shipped prompts: so many behind a prompt."""
    length = _PROMPT + places
    return tuple(chain.from_iterable(encoded(prompts(models, length), ours)))[:length]


def sentences(reports: Sequence[ForwardReport]) -> Iterator[Answer]:
    """How often rounding decides a token in the model's own type, where forwards become dearer, and first uses."""
    kind = next((one.activations for one in reports if isinstance(one, ForwardsReady)), "its own type")
    for one in reports:
        if isinstance(one, Ties):
            flips, places = _flips(reports)
            yield Answer(
                "ties",
                f"Ties ({kind}): the two best logits are equal at {one.equal} of {one.positions} places and within one "
                f"unit of the last place at {one.near}; {flips} of {places:,} favourites change with the width.",
            )
    times: dict[int, dict[int, float]] = {}
    for one in reports:
        if isinstance(one, ForwardTimed):
            times.setdefault(one.context, {})[one.width] = one.milliseconds
    for context, of_width in times.items():
        if len(of_width) > 1:
            yield Answer("width steps", _steps(context, of_width))
    timed = [one for one in reports if isinstance(one, ForwardTimed)]
    if timed:
        # Contexts come one after the other: behind the first one each width is new.
        worst = max((one for one in timed if one.context == timed[0].context), key=lambda one: one.first)
        yield Answer(
            "first use",
            f"The first forward of a new width takes at most {worst.first:.1f} ms, where later ones take "
            f"{worst.milliseconds:.1f} ms ({worst.width} tokens; widths that the proof at load has used are known).",
        )


def _flips(reports: Sequence[ForwardReport]) -> tuple[int, int]:
    compared = [one for one in reports if isinstance(one, Compared)]
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


def report_tables(precision: str, reports: Sequence[ForwardReport]) -> list[Table]:
    """Logits by width, and milliseconds by width with a column for each context."""
    kind = ", ".join(f"{one.activations} on the {one.device}" for one in reports if isinstance(one, ForwardsReady))
    logits: list[tuple[Cell, ...]] = [
        (one.width, one.difference, one.flips, one.positions, one.gap, one.shape)
        for one in reports
        if isinstance(one, Compared)
    ]
    times = {(one.width, one.context): one.milliseconds for one in reports if isinstance(one, ForwardTimed)}
    contexts = list(dict.fromkeys(context for _, context in times))
    firsts = {one.width: one.first for one in reversed(reports) if isinstance(one, ForwardTimed)}
    rows: list[tuple[Cell, ...]] = [
        (width, *(times.get((width, context)) for context in contexts), firsts[width])
        for width in dict.fromkeys(width for width, _ in times)
    ]
    return [
        Table(
            f"Logits by width, against width 1 ({precision}, {kind})",
            _COLUMNS,
            tuple(logits),
            "difference: the largest at any position, in standard deviations of the position's logits. flips: "
            "positions with another most probable token. gap: the largest between the two most probable tokens at "
            "a flip. joint: trees of three texts in one forward.",
        ),
        Table(
            f"Time of a forward by width ({precision}, {kind})",
            ("tokens", *(f"ms behind {context} tokens" for context in contexts), "first, ms"),
            tuple(rows),
            "Medians of a process that does nothing else; the logits are waited for. The context's KV is made up.",
        ),
    ]


def check(precision: str, reports: Sequence[ForwardReport], gpu: bool) -> Check:
    """On a processor no favourite changes with the width; on a GPU only one that is nearly tied does."""
    compared = [one for one in reports if isinstance(one, Compared)]
    flips, positions = _flips(reports)
    largest, gap = max(one.difference for one in compared), max((one.gap or 0.0 for one in compared), default=0.0)
    name = f"logits, {precision}"
    text = f"{flips} of {positions:,} favourites change with the width; logits differ by {largest:.2g} std at most"
    if not flips:
        return Check(name, "ok", text)
    text = f"{text}; the largest gap at a change is {gap:.2g} std"
    if gpu and gap < TIE:
        return Check(name, "warn", text)
    return Check(name, "fail", text, "please report this: rounding does not explain it")
