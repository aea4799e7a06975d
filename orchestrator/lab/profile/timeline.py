"""A profile as one PNG: some rounds of each temperature, and what came of the draft's guesses."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from orchestrator.lab.profile.analysis.excerpt import Excerpt, TimelineBar
from orchestrator.lab.profile.analysis.figures import ProfileFigures, RequestProfile

DRAFT_WORDS = {
    "used": "hidden and used",
    "discarded": "hidden but discarded",
    "exposed": "exposed",
    "prefill": "prefill",
    "idle": "idle",
}
"""What the draft's time is spent on."""
_COLOURS = {
    "verify": "#2f6fb5",
    "tidy": "#8fb8e0",
    "prefill": "#a88bc9",
    "used": "#1a9070",
    "discarded": "#e2a33d",
    "exposed": "#cf5a35",
    "wait": "#c9ced6",
    "idle": "#e3e5e8",
}
_LEGEND = {
    "verify": "target verifies",
    "wait": "awaits growth",
    "used": "growth, used",
    "discarded": "growth, discarded",
    "exposed": "growth, target idle",
    "prefill": "prefill",
}
_SERIES = ("#2f6fb5", "#e2a33d", "#1a9070", "#cf5a35", "#a88bc9")
_DRAFT, _TARGET = 1.0, 0.0
_HEIGHT = 0.62


def write_timeline(profile: ProfileFigures, excerpts: Sequence[Excerpt], path: Path) -> None:
    """`excerpts`: one a temperature."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        drafted = any(request.overlapped_share is not None for request in profile.requests)
        figure = Figure(figsize=(13, 2.1 * len(excerpts) + (3.4 if drafted else 0.6)), layout="constrained")
        grid = figure.add_gridspec(len(excerpts) + drafted, 3, height_ratios=[2.0] * len(excerpts) + [3.0] * drafted)
        for row, excerpt in enumerate(excerpts):
            axes = figure.add_subplot(grid[row, :])
            _rounds(axes, excerpt, profile.requests[row])
            if row == 0:
                _legend(axes)
        if drafted:
            _acceptance(figure.add_subplot(grid[-1, 0]), profile.requests)
            _hits(figure.add_subplot(grid[-1, 1]), profile.requests)
            _draft_time(figure.add_subplot(grid[-1, 2]), profile.requests)
        figure.suptitle(_title(profile), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130)


def _title(profile: ProfileFigures) -> str:
    speeds = (
        f"{request.tokens_per_second:.1f} tokens/s at T = {request.temperature:g}" for request in profile.requests
    )
    return "\n".join([f"{profile.strategy}: {', '.join(speeds)}", *profile.machine[:1]])


def _legend(axes: Axes) -> None:
    handles = [Patch(color=_COLOURS[look], label=word) for look, word in _LEGEND.items()]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.96), "ncols": len(handles)}
    axes.legend(handles=handles, frameon=False, fontsize=9, handlelength=1.0, borderaxespad=0.2, **place)


def _rounds(axes: Axes, excerpt: Excerpt, request: RequestProfile) -> None:
    for lane, bars in ((_DRAFT, excerpt.draft), (_TARGET, excerpt.target)):
        for bar in bars:
            _bar(axes, bar, lane)
    for use in excerpt.uses:
        axes.annotate(
            "",
            (use.chosen, _TARGET + _HEIGHT / 2),
            (use.grown, _DRAFT - _HEIGHT / 2),
            arrowprops={"arrowstyle": "-|>", "color": _COLOURS["used"], "lw": 0.9, "alpha": 0.7, "mutation_scale": 7},
        )
    axes.set(xlim=(0, excerpt.length), ylim=(-0.45, 1.45), yticks=(_TARGET, _DRAFT), yticklabels=("target", "draft"))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms", loc="right", labelpad=-2)
    hidden = (
        "" if request.overlapped_share is None else f"; {request.overlapped_share:.0%} of the draft's time overlaps"
    )
    last = excerpt.first + excerpt.count - 1
    axes.set_title(f"T = {excerpt.temperature:g}, rounds {excerpt.first} to {last}{hidden}", loc="left", fontsize=10)


def _bar(axes: Axes, bar: TimelineBar, lane: float) -> None:
    axes.barh(lane, bar.end - bar.begin, _HEIGHT, bar.begin, color=_COLOURS[bar.look], edgecolor="white", linewidth=0.4)


def _acceptance(axes: Axes, requests: Sequence[RequestProfile]) -> None:
    for request, colour in zip(requests, _SERIES, strict=False):
        shares = request.acceptance_by_depth[:12]
        label = f"T = {request.temperature:g}"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", color=colour, label=label, clip_on=False)
    axes.set(ylim=(0, 1.05), title="acceptance by depth below the root")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)


def _hits(axes: Axes, requests: Sequence[RequestProfile]) -> None:
    names = [f"T = {request.temperature:g}" for request in requests]
    bars = axes.bar(names, [request.hit_rate or 0.0 for request in requests], 0.5, color=_SERIES[0])
    axes.bar_label(bars, ["-" if request.hit_rate is None else f"{request.hit_rate:.0%}" for request in requests])
    axes.set(ylim=(0, 1.1), title="hit rate by temperature")


def _draft_time(axes: Axes, requests: Sequence[RequestProfile]) -> None:
    names = [f"T = {request.temperature:g}" for request in requests]
    left = [0.0] * len(requests)
    for name, word in DRAFT_WORDS.items():
        parts = [request.draft[name] / (sum(request.draft.values()) or 1.0) for request in requests]
        if any(parts):
            bars = axes.barh(names, parts, 0.5, left, color=_COLOURS[name], label=word)
            axes.bar_label(bars, [f"{part:.0%}" if part > 0.06 else "" for part in parts], label_type="center")
        left = [begin + part for begin, part in zip(left, parts, strict=True)]
    axes.set(xlim=(0, 1), xticks=(), title="where the draft's time went")
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=9)
