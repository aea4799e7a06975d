"""`launch-pipeline bench forwards`: forwards of random models beside mlx-lm's own, in one process, in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from orchestrator.lab.bench.forward_comparison.messages import Built, ComparisonOrder, ComparisonReport, Sampled
from orchestrator.lab.bench.results.intervals import Ratio, paired_ratio
from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.reporting_process import reports

MOST_FORWARD = 1.05
"""Times mlx-lm's forward of the same width that ours may take."""
MOST_UNDO = 0.03
"""Of a round, that committing half of it and undoing the rest may take."""
_PROGRAM = "orchestrator.lab.bench.forward_comparison"
_FORM: Any = ComparisonReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthFigures:
    """Medians over samples. Ratios are to mlx-lm's forward of the same sample."""

    milliseconds: float
    """mlx-lm's."""
    chain: Ratio
    tree: Ratio | None
    """None below level tree, and where a tree of so many tokens is a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """One kind of layers."""

    built: Built
    widths: Mapping[int, WidthFigures]
    undo: Ratio
    """Share of the round."""

    @property
    def missed(self) -> list[str]:
        """Names of the figures that are beyond their limits."""
        chains = [f"{width} tokens" for width, each in self.widths.items() if each.chain.median > MOST_FORWARD]
        return [*chains, *(["undo"] if self.undo.median > MOST_UNDO else [])]


def measured(order: ComparisonOrder, finished: Callable[[str], None] = lambda _: None) -> list[KindFigures]:
    """The figures of each kind. `finished` is called behind each sample with the kind's name.

    Raises PipelineError if the process fails.
    """
    built: list[Built] = []
    samples: list[Sampled] = []
    variables = worker_environment("target", ())
    for report in reports(_PROGRAM, order, _FORM, name="The comparison of forwards", grace=10.0, variables=variables):
        if isinstance(report, Built):
            built.append(report)
        else:
            samples.append(report)
            finished(report.kind)
    return [figures_of(each, [one for one in samples if one.kind == each.kind]) for each in built]


def figures_of(built: Built, samples: Sequence[Sampled]) -> KindFigures:
    """Of at least one sample."""
    widths = {
        width: WidthFigures(
            milliseconds=median(sample.stock[width] for sample in samples),
            chain=_ratio([sample.chain[width] / sample.stock[width] for sample in samples]),
            tree=_ratio([sample.tree[width] / sample.stock[width] for sample in samples])
            if width > 2 and samples[0].tree
            else None,
        )
        for width in samples[0].stock
    }
    return KindFigures(built=built, widths=widths, undo=_ratio([one.undo / one.round for one in samples]))


def _ratio(ratios: Sequence[float]) -> Ratio:
    found = paired_ratio(dict(enumerate(ratios)))
    assert found is not None
    return found
