"""Pictures as inline SVG whose colours a style sheet decides: light and dark are the same picture."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from orchestrator.lab.profile.analysis.excerpt import Bar, Excerpt, Use

WIDTH = 1000
"""Units of every picture; the page scales them."""
_LEFT = 64
_LANE = 34
_GAP = 46
"""Between the lanes, for the arrows."""
_PALE = ("idle", "for_draft")
"""Parts whose colour is close to the page's, so that text on them has the page's ink."""


def timeline(excerpt: Excerpt) -> str:
    """Draft above, target below, arrows from growth to the verdict that used it, a scale in milliseconds."""
    scale = (WIDTH - _LEFT - 8) / excerpt.length
    draft, target = 8, 8 + _LANE + _GAP
    bottom = target + _LANE
    parts = [
        *_scale(excerpt.length, scale, bottom),
        _lane("draft", draft),
        _lane("target", target),
        *(_bar(bar, draft, scale) for bar in excerpt.draft),
        *(_bar(bar, target, scale) for bar in excerpt.target),
        *(_arrow(use, draft + _LANE, target, scale) for use in excerpt.uses),
    ]
    return _picture(bottom + 30, f"Timeline at temperature {excerpt.temperature:g}", parts)


def shares(rows: Sequence[tuple[str, Mapping[str, float]]], words: Mapping[str, str]) -> str:
    """A bar a row, divided among the names of `words`; a title tells each part's size (seconds) and share."""
    parts: list[str] = []
    for index, (label, times) in enumerate(rows):
        top, left, whole = 6 + index * 40, float(_LEFT), sum(times.values()) or 1.0
        parts.append(_text(_LEFT - 10, top + 20, label, "end"))
        for name, word in words.items():
            width = times[name] / whole * (WIDTH - _LEFT - 8)
            tooltip = f"{word}: {times[name] * 1e3:.1f} ms, {times[name] / whole:.1%}"
            parts.append(_box(left, top, width, 28, name, tooltip))
            if width > 44:
                look = "label" if name in _PALE else "on"
                parts.append(_text(left + width / 2, top + 19, f"{times[name] / whole:.0%}", "middle", look))
            left += width
    return _picture(10 + 40 * len(rows), "Shares of the time", parts)


def columns(groups: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[str], title: str) -> str:
    """Groups of columns between 0 and 1, one column a name; what is None is left out."""
    height, top, left = 190, 22, 44
    parts = [_rule(left, top + height * (1 - level), f"{level:.0%}") for level in (0.0, 0.5, 1.0)]
    slot = (WIDTH / 2 - left) / max(1, len(groups))
    width = min(38.0, slot * 0.8 / max(1, len(names)))
    for index, (label, values) in enumerate(groups):
        begin = left + slot * (index + 0.5) - width * len(values) / 2
        for place, value in enumerate(values):
            if value is not None:
                tall, tooltip = height * value, f"{names[place]}, {label}: {value:.0%}"
                parts.append(
                    _box(begin + place * width, top + height - tall, width - 2, tall, f"series{place}", tooltip)
                )
                if len(names) == 1:
                    parts.append(_text(begin + width / 2, top + height - tall - 5, f"{value:.0%}", "middle"))
        parts.append(_text(left + slot * (index + 0.5), top + height + 20, label, "middle"))
    return _picture(top + height + 30, title, parts, WIDTH // 2)


def _scale(length: float, scale: float, bottom: int) -> Iterable[str]:
    tick = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if length / step <= 14)
    for index in range(int(length / tick) + 1):
        x = _LEFT + index * tick * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom + 6}"/>'
        yield _text(x, bottom + 22, f"{index * tick:g}", "middle", "faint")
    yield _text(_LEFT - 10, bottom + 22, "ms", "end", "faint")


def _lane(name: str, top: int) -> str:
    lane = f'<rect class="lane" x="{_LEFT}" y="{top}" width="{WIDTH - _LEFT - 8}" height="{_LANE}"/>'
    return lane + _text(_LEFT - 10, top + _LANE / 2 + 5, name, "end")


def _bar(bar: Bar, top: int, scale: float) -> str:
    return _box(_LEFT + bar.begin * scale, top, (bar.end - bar.begin) * scale, _LANE, bar.look, bar.text)


def _arrow(use: Use, top: int, bottom: int, scale: float) -> str:
    begin, end = _LEFT + use.grown * scale, _LEFT + use.chosen * scale
    middle = (top + bottom) / 2
    return (
        f'<path class="use" d="M{begin:.1f} {top + 1} C{begin:.1f} {middle:.1f} {end:.1f} {middle:.1f} '
        f'{end:.1f} {bottom - 2}"/><circle class="end" cx="{end:.1f}" cy="{bottom - 2}" r="2.4"/>'
    )


def _box(left: float, top: float, width: float, height: float, look: str, tooltip: str) -> str:
    place = f'x="{left:.2f}" y="{top:.1f}" width="{max(0.0, width):.2f}" height="{height:.1f}"'
    return f'<rect class="{look}" {place} rx="1.5"><title>{escape(tooltip)}</title></rect>'


def _rule(left: float, y: float, label: str) -> str:
    line = f'<line class="grid" x1="{left}" x2="{WIDTH // 2}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(left - 6, y + 5, label, "end", "faint")


def _text(x: float, y: float, text: str, anchor: str, look: str = "label") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _picture(height: float, title: str, parts: Iterable[str], width: int = WIDTH) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'
