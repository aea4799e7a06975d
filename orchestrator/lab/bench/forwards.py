"""Forwards of random models beside mlx-lm's own, by kind of layer, width and context: measurement and findings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import msgspec

from orchestrator.lab.bench.figures import Ratio, paired_ratio
from orchestrator.lab.findings import Field, Findings, Listener, tabulated
from orchestrator.lab.forwards import ForwardOrder, ForwardsReady, ForwardTimed, LayerKind, Undone, examined
from orchestrator.lab.report import machine_lines
from orchestrator.machine.check import Check

ORDER = ForwardOrder(timed=(1, 2, 4, 8, 16), contexts=(256,), samples=12, undone=8)
"""Of a random model of each kind."""
MOST_FORWARD = 1.05
"""Times mlx-lm's forward of the same width that ours may take."""
MOST_UNDO = 0.03
"""Of a round, that committing half of it and undoing the rest may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """One kind of layers behind one context. Ratios are to mlx-lm's forward of the same sample."""

    kind: LayerKind
    model: ForwardsReady
    context: int
    timed: Sequence[ForwardTimed]
    """By rising width."""
    undo: Ratio
    """Share of the round."""

    @property
    def missed(self) -> list[str]:
        """Names of the figures that are beyond their limits."""
        chains = [f"{one.width} tokens" for one in self.timed if chain_ratio(one).median > MOST_FORWARD]
        return [*chains, *(["undo"] if self.undo.median > MOST_UNDO else [])]


def measure(kinds: Sequence[LayerKind], order: ForwardOrder, watch: Listener) -> Findings:
    """Raises PipelineError if the process fails."""
    watch.begin(len(kinds) * len(order.contexts) * len(order.timed), "the random models")
    return findings([figures for kind in kinds for figures in _measured(kind, order, watch)], order)


def _measured(kind: LayerKind, order: ForwardOrder, watch: Listener) -> Iterator[KindFigures]:
    """Behind each context."""
    model, timed = ForwardsReady("", ""), []
    for report in examined(msgspec.structs.replace(order, kind=kind)):
        match report:
            case ForwardsReady():
                model = report
            case ForwardTimed():
                timed.append(report)
                watch.finished(kind)
            case Undone():
                yield KindFigures(
                    kind=kind, model=model, context=report.context, timed=timed, undo=_ratio(report.undo, report.round)
                )
                timed = []
            case _:
                pass


def _ratio(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Within each sample."""
    found = paired_ratio({sample: one / other for sample, (one, other) in enumerate(zip(ours, others, strict=True))})
    assert found is not None
    return found


def chain_ratio(one: ForwardTimed) -> Ratio:
    """Our chain, as a ratio to mlx-lm's."""
    return _ratio(one.chain, one.stock)


def tree_ratio(one: ForwardTimed) -> Ratio | None:
    """None below level tree, and where a tree of so many tokens is a chain."""
    return _ratio(one.tree, one.stock) if one.width > 2 and one.tree else None


_FOOTNOTE = f"""\
context: tokens before the forward. mlx-lm: milliseconds of a forward with its own caches, logits included. chain: our \
forward over the same tokens, as a ratio to mlx-lm's; the aim is at most {MOST_FORWARD:g}. tree: the same tokens as a \
balanced binary tree, against mlx-lm's chain. undo: committing the first half of a chain and undoing the rest, states \
computed, as a share of our forward over that chain; the aim is at most {MOST_UNDO:.0%}. Where our next forward \
repeats accepted tokens, undo is what that takes longer.
Medians of ratios within a sample; in brackets their 95% bootstrap intervals. Random weights; everyone takes turns in \
one process. On a processor the milliseconds are the process's processor time."""


class _Row(NamedTuple):
    kind: KindFigures
    timed: ForwardTimed


_FIELDS: tuple[Field[_Row], ...] = (
    Field("layers", lambda row: row.kind.kind),
    Field("model", lambda row: f"{row.kind.model.architecture}, {row.kind.model.parameters / 1e6:.0f}M"),
    Field("level", lambda row: row.kind.model.level),
    Field("context", lambda row: row.kind.context),
    Field("tokens", lambda row: row.timed.width),
    Field("mlx-lm, ms", lambda row: median(row.timed.stock), ".1f"),
    Field("chain", lambda row: _estimate(chain_ratio(row.timed)), ".2f"),
    Field("tree", lambda row: _estimate(tree_ratio(row.timed)), ".2f"),
    Field("undo", lambda row: _estimate(row.kind.undo), ".1%"),
)


def _estimate(ratio: Ratio | None) -> float | tuple[float, ...] | str:
    if ratio is None:
        return ""
    return ratio.median if ratio.interval is None else (ratio.median, *ratio.interval)


def findings(kinds: Sequence[KindFigures], order: ForwardOrder) -> Findings:
    """A row a kind and width. A missed aim is a warning."""
    rows = [_Row(kind, timed) for kind in kinds for timed in kind.timed]
    return Findings(
        title="forwards beside mlx-lm's own",
        conditions=(f"{order.samples} samples.", *machine_lines()),
        tables=(tabulated("", _FIELDS, rows, wrong=lambda row: chain_ratio(row.timed).median > MOST_FORWARD),),
        checks=tuple(
            Check(kind.kind, "warn", f"misses its aim behind {kind.context} tokens: {', '.join(kind.missed)}")
            for kind in kinds
            if kind.missed
        ),
        notes=(_FOOTNOTE,),
        figures={"machine": machine_lines(), "settings": order, "results": list(map(_values, kinds))},
    )


def _values(kind: KindFigures) -> dict[str, Any]:
    return {
        "kind": kind.kind,
        **msgspec.to_builtins(kind.model),
        "context": kind.context,
        "widths": {
            str(one.width): {
                "milliseconds": median(one.stock),
                "chain": chain_ratio(one)._asdict(),
                "tree": (tree := tree_ratio(one)) and tree._asdict(),
            }
            for one in kind.timed
        },
        "undo": kind.undo._asdict(),
        "missed": kind.missed,
    }
