"""Forwards of random models beside mlx-lm's own, in one process, in turns: its arguments, reports and findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from orchestrator.lab.bench.figures import Ratio, paired_ratio
from orchestrator.lab.findings import Field, Findings, Listener, tabulated
from orchestrator.lab.report import machine_lines
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import worker_environment
from protocol.child_process import reports

LayerKind: TypeAlias = Literal["attention", "experts", "windows", "latent", "delta", "space", "convolution", "rwkv"]
"""Full attention; the same beside a mixture of experts; sliding windows; latent KV; Gated DeltaNet; state space; short
convolutions; a recurrence whose trees are not evaluated."""
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
ModelSize: TypeAlias = Literal["measured", "tiny"]
"""measured: a few layers in the shapes of models that people run; tiny: tests of the program."""


class ComparisonOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    kinds: tuple[LayerKind, ...] = LAYER_KINDS
    size: ModelSize = "measured"
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Tokens of a forward."""
    round: int = 8
    """Tokens of the round of which half are accepted."""
    contexts: tuple[int, ...] = (256,)
    """Committed tokens before a forward."""
    samples: int = 12
    """Forwards of each width."""


class Built(msgspec.Struct, frozen=True, tag="built", forbid_unknown_fields=True):
    """The random model of a kind is ready."""

    kind: LayerKind
    architecture: str
    level: str
    """tree, chain or plain."""
    parameters: int


class Sampled(msgspec.Struct, frozen=True, tag="sampled", forbid_unknown_fields=True):
    """One forward of each width by everyone, in turns. Milliseconds by width, logits included; on a processor they are
    processor time."""

    kind: LayerKind
    context: int
    stock: dict[int, float]
    """mlx-lm's own cache, a chain."""
    chain: dict[int, float]
    """Ours, the same tokens."""
    tree: dict[int, float]
    """Ours, the same tokens as a binary tree; empty below level tree."""
    round: float
    """Ours, a chain of `round` tokens."""
    undo: float
    """Milliseconds until half of that chain is committed and the rest undone. If the cache evaluates tokens again in
    the next forward, what that forward takes longer."""


ComparisonReport: TypeAlias = Built | Sampled
"""One JSON object a line of the process's standard output."""


MOST_FORWARD = 1.05
"""Times mlx-lm's forward of the same width that ours may take."""
PROMPT = 1024
"""Tokens that are prefilled: keys and values of a longer context repeat theirs."""
MOST_UNDO = 0.03
"""Of a round, that committing half of it and undoing the rest may take."""
_PROGRAM = "orchestrator.lab.bench.forwards_process"
_FORM: Any = ComparisonReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthFigures:
    """Medians over samples. Ratios are to mlx-lm's forward of the same sample."""

    milliseconds: float
    """mlx-lm's."""
    chain: Ratio
    tree: Ratio | None
    """None below level tree, and where a tree of so many tokens is a chain."""
    alone: Ratio
    """Our chain, as a ratio to our forward of the fewest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """One kind of layers behind one context."""

    built: Built
    context: int
    widths: Mapping[int, WidthFigures]
    undo: Ratio
    """Share of the round."""

    @property
    def missed(self) -> list[str]:
        """Names of the figures that are beyond their limits."""
        chains = [f"{width} tokens" for width, each in self.widths.items() if each.chain.median > MOST_FORWARD]
        return [*chains, *(["undo"] if self.undo.median > MOST_UNDO else [])]


def measure(order: ComparisonOrder, watch: Listener) -> Findings:
    """Raises PipelineError if the process fails."""
    watch.begin(len(order.kinds) * len(order.contexts) * order.samples, "the random models")
    return findings(measured(order, watch), order)


def measured(order: ComparisonOrder, watch: Listener) -> list[KindFigures]:
    """The figures of each kind behind each context.

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
            watch.finished(report.kind)
    return [
        figures_of(each, [one for one in samples if (one.kind, one.context) == (each.kind, context)])
        for each in built
        for context in order.contexts
    ]


def figures_of(built: Built, samples: Sequence[Sampled]) -> KindFigures:
    """Of at least one sample, all behind the same context."""
    fewest = min(samples[0].stock)
    widths = {
        width: WidthFigures(
            milliseconds=median(sample.stock[width] for sample in samples),
            chain=_ratio([sample.chain[width] / sample.stock[width] for sample in samples]),
            tree=_ratio([sample.tree[width] / sample.stock[width] for sample in samples])
            if width > 2 and samples[0].tree
            else None,
            alone=_ratio([sample.chain[width] / sample.chain[fewest] for sample in samples]),
        )
        for width in samples[0].stock
    }
    return KindFigures(
        built=built, context=samples[0].context, widths=widths, undo=_ratio([one.undo / one.round for one in samples])
    )


def _ratio(ratios: Sequence[float]) -> Ratio:
    found = paired_ratio(dict(enumerate(ratios)))
    assert found is not None
    return found


_FOOTNOTE = f"""\
context: tokens before the forward; behind {PROMPT:,} they repeat a prompt of so many. mlx-lm: milliseconds of a \
forward with its own caches, logits included. to one: our chain, as a ratio to our forward of the fewest tokens. \
chain: our forward over the same tokens, as a ratio to mlx-lm's; the aim is at most {MOST_FORWARD:g}. tree: the same \
tokens as a balanced binary tree, against mlx-lm's chain. undo: committing the first half of a chain and undoing the \
rest, states computed, as a share of our forward over that chain; the aim is at most {MOST_UNDO:.0%}. Where our next \
forward repeats accepted tokens, undo is what that takes longer.
Medians of ratios within a sample; in brackets their 95% bootstrap intervals. Random weights; everyone takes turns in \
one process. On a processor the milliseconds are the process's processor time."""


class _Row(NamedTuple):
    kind: KindFigures
    width: int
    figures: WidthFigures


_FIELDS: tuple[Field[_Row], ...] = (
    Field("layers", lambda row: row.kind.built.kind),
    Field("model", lambda row: f"{row.kind.built.architecture}, {row.kind.built.parameters / 1e6:.0f}M"),
    Field("level", lambda row: row.kind.built.level),
    Field("context", lambda row: row.kind.context),
    Field("tokens", lambda row: row.width),
    Field("mlx-lm, ms", lambda row: row.figures.milliseconds, ".1f"),
    Field("to one", lambda row: _estimate(row.figures.alone), ".2f"),
    Field("chain", lambda row: _estimate(row.figures.chain), ".2f"),
    Field("tree", lambda row: "" if row.figures.tree is None else _estimate(row.figures.tree), ".2f"),
    Field("undo", lambda row: _estimate(row.kind.undo), ".1%"),
)


def _estimate(ratio: Ratio) -> float | tuple[float, ...]:
    return ratio.median if ratio.interval is None else (ratio.median, *ratio.interval)


def findings(kinds: Sequence[KindFigures], order: ComparisonOrder) -> Findings:
    """A row a kind and width. A missed aim is a warning."""
    rows = [_Row(kind, width, figures) for kind in kinds for width, figures in kind.widths.items()]
    return Findings(
        title="forwards beside mlx-lm's own",
        conditions=(f"{order.samples} samples.", *machine_lines()),
        tables=(tabulated("", _FIELDS, rows, wrong=lambda row: row.figures.chain.median > MOST_FORWARD),),
        checks=tuple(
            Check(kind.built.kind, "warn", f"misses its aim behind {kind.context} tokens: {', '.join(kind.missed)}")
            for kind in kinds
            if kind.missed
        ),
        notes=(_FOOTNOTE,),
        figures={
            "machine": machine_lines(),
            "settings": order,
            "results": [
                {
                    **msgspec.to_builtins(kind.built),
                    "context": kind.context,
                    "widths": {str(width): _values(each) for width, each in kind.widths.items()},
                    "undo": kind.undo._asdict(),
                    "missed": kind.missed,
                }
                for kind in kinds
            ],
        },
    )


def _values(figures: WidthFigures) -> dict[str, Any]:
    named = (("chain", figures.chain), ("tree", figures.tree), ("to_one", figures.alone))
    ratios = {name: ratio and ratio._asdict() for name, ratio in named}
    return {"milliseconds": figures.milliseconds, **ratios}
