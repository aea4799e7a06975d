"""How speed falls with the distance to the draft, as a picture. Loads matplotlib when called."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.runtime.link_emulation import EmulatedLink
from orchestrator.tools.bench.figures import AUTOREGRESSIVE, BenchRow
from orchestrator.tools.bench.plot import panels_of, save
from orchestrator.tools.bench.trials import far_name

_PROMISED = 0.97
"""Of our own plain decoding: a draft that is too far away to help must not hinder."""
_HERE = 0.1
"""Milliseconds: where a draft on this machine stands on a logarithmic axis."""


def draw_distances(
    rows: Sequence[BenchRow], strategies: Sequence[str], links: Sequence[EmulatedLink], subtitle: str, path: Path
) -> None:
    """Write a PNG: the ratio to plain decoding by delay, a panel a temperature; the whole table has the rest."""
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure, panels = panels_of(len(temperatures))
    for panel, temperature in zip(panels, temperatures, strict=True):
        by_name = {row.contender: row for row in rows if row.temperature == temperature}
        for strategy in (name for name in strategies if name != AUTOREGRESSIVE):
            _line(panel, strategy, links, by_name)
        panel.axhline(_PROMISED, color="#d64545", linewidth=0.8, linestyle="--", label=f"{_PROMISED:g}")
        panel.set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
        panel.set_xlabel(f"delay one way, ms, {max(link.loss for link in links):.0%} lost ({_HERE:g}: no link)")
        panel.set_ylabel("tokens/s relative to ar")
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False)
    figure.suptitle(subtitle, x=0.01, ha="left", fontsize=10)
    save(figure, path)


def _line(panel: Any, strategy: str, links: Sequence[EmulatedLink], by_name: dict[str, BenchRow]) -> None:
    names = [(_HERE, strategy), *((1000 * link.delay or _HERE, far_name(strategy, link)) for link in links)]
    points = [(delay, by_name[name].over_autoregressive) for delay, name in names if name in by_name]
    known = [(delay, ratio) for delay, ratio in points if ratio is not None]
    panel.plot([delay for delay, _ in known], [ratio for _, ratio in known], marker="o", label=strategy)
