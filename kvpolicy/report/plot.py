"""Small line charts as inline SVG: a few policies over a few budgets, no dependency, no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 460, 300
RIGHT, TOP, BOTTOM = 14, 14, 46
CHARACTER = 7.2
"""Width of a character of a label, for room to be left."""
DODGE = 5
"""Pixels between policies at the same budget, where intervals would hide each other."""

_MARKERS = [
    '<circle r="4.5" class="dot"/>',
    '<rect x="-4" y="-4" width="8" height="8" class="dot"/>',
    '<path d="M0-5.5 5 4H-5Z" class="dot"/>',
    '<path d="M0-5.8 5.8 0 0 5.8-5.8 0Z" class="dot"/>',
    '<path d="M0 5.5 5-4H-5Z" class="dot"/>',
    '<path d="M-4.5-4.5 4.5 4.5M-4.5 4.5 4.5-4.5"/>',
    '<path d="M0-5.5V5.5M-5.5 0H5.5"/>',
    '<circle r="4.5" class="hollow"/>',
]
STYLES = len(_MARKERS)
"""Colours and markers before they repeat; the style sheet of the page has the colours."""


@dataclass(frozen=True)
class Point:
    """One measurement; `low` and `high` are the ends of its interval, `title` is shown by hovering."""

    x: float
    y: float
    title: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """The points of one policy, in the style of that number."""

    style: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Scale:
    """From values to a share of an axis; ticks in order of importance, as some may find no room."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    bend: Callable[[float], float] = float

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high = self.bend(self.low), self.bend(self.high)
        return (self.bend(min(max(value, self.low), self.high)) - low) / (high - low)


def linear(values: Sequence[float], label: Callable[[float], str]) -> Scale:
    """From zero to a round number above all `values`, about five ticks."""
    step = _round_step((max(values) or 1) / 5)
    count = ceil(max(values) / step - 1e-9) or 1
    return Scale(0, count * step, [(i * step, label(i * step)) for i in range(count + 1)])


def logarithmic(values: Sequence[float], label: Callable[[float], str]) -> Scale:
    """Around `values`, with powers of ten and twos and fives between them."""
    positive = [value for value in values if value > 0] or [1.0]
    powers = range(floor(log10(min(positive))), ceil(log10(max(positive))) + 2)
    return fitted(positive, [step * 10.0**power for step in (1, 2, 5) for power in powers], label, log10)


def fitted(
    values: Sequence[float],
    ticks: Sequence[float],
    label: Callable[[float], str],
    bend: Callable[[float], float],
) -> Scale:
    """From the tick below all `values` to the tick above them; `ticks` in order of importance."""
    low = max((tick for tick in ticks if tick <= min(values)), default=min(ticks))
    high = min((tick for tick in ticks if tick >= max(values) and tick > low), default=max(ticks))
    return Scale(low, high, [(tick, label(tick)) for tick in ticks if low <= tick <= high], bend)


def budgets_scale(budgets: Sequence[int]) -> Scale:
    """Budgets on a logarithmic axis, each labelled, a little air at both ends."""
    low, high = min(budgets) / 1.15, max(budgets) * 1.15
    return Scale(low, high, [(budget, str(budget)) for budget in sorted(set(budgets))], log10)


def marker(style: int) -> str:
    """A legend's sample of a style."""
    return _key(f"s{style % STYLES}", _MARKERS[style % STYLES])


def flat_marker() -> str:
    """A legend's sample of the line all across."""
    return _key("flat")


def _key(kind: str, symbol: str = "") -> str:
    line = '<path d="M-14 0H14"/>'
    return f'<svg viewBox="-14 -8 28 16" class="key {kind}" aria-hidden="true">{line}{symbol}</svg>'


def chart(
    title: str,
    y_label: str,
    series: Sequence[Series],
    x: Scale,
    y: Scale,
    flat: Point | None = None,
) -> str:
    """A chart of `series`; `flat` is a line all across, for what does not depend on the budget."""
    frame = _Frame(x, y, left=30 + CHARACTER * max(len(label) for _, label in y.ticks))
    parts = frame.grid(y_label)
    if flat is not None:
        line = f'<path d="M{frame.left:.1f} {frame.down(flat.y):.1f}H{WIDTH - RIGHT}"/>'
        parts.append(f'<g class="flat"><title>{escape(flat.title)}</title>{line}</g>')
    whiskers = any(point.low is not None for one in series for point in one.points)
    for index, one in enumerate(series):
        shift = DODGE * (index - (len(series) - 1) / 2) if whiskers else 0.0
        parts.append(frame.line(one, shift))
    name = escape(title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{name}</figcaption>{svg}</figure>\n"


@dataclass(frozen=True)
class _Frame:
    """Two scales in pixels."""

    x: Scale
    y: Scale
    left: float

    @property
    def bottom(self) -> float:
        return HEIGHT - BOTTOM

    def across(self, value: float) -> float:
        return self.left + self.x.share(value) * (WIDTH - self.left - RIGHT)

    def down(self, value: float) -> float:
        return self.bottom - self.y.share(value) * (self.bottom - TOP)

    def grid(self, y_label: str) -> list[str]:
        parts = []
        for height, label in _with_room([(self.down(value), text) for value, text in self.y.ticks], lambda _: 15):
            parts.append(f'<path class="grid" d="M{self.left:.1f} {height:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(self.left - 7, height + 4, label, "end"))
        ticks = [(self.across(value), text) for value, text in self.x.ticks]
        parts += [f'<path class="tick" d="M{across:.1f} {self.bottom}v5"/>' for across, _ in ticks]
        for across, label in _with_room(ticks, lambda text: CHARACTER * (len(text) + 1)):
            parts.append(_text(across, self.bottom + 19, label))
        parts.append(f'<path class="axis" d="M{self.left:.1f} {self.bottom}H{WIDTH - RIGHT}"/>')
        parts.append(_text((self.left + WIDTH - RIGHT) / 2, HEIGHT - 8, "budget in tokens"))
        turned = f'transform="translate(13 {(TOP + self.bottom) / 2}) rotate(-90)"'
        parts.append(f'<text {turned} text-anchor="middle">{escape(y_label)}</text>')
        return parts

    def line(self, series: Series, shift: float) -> str:
        """The points of a policy, moved `shift` pixels aside."""
        style = series.style % STYLES
        points = sorted(series.points, key=lambda point: point.x)
        places = [(self.across(point.x) + shift, self.down(point.y)) for point in points]
        path = "L".join(f"{across:.1f} {down:.1f}" for across, down in places)
        parts = [f'<g class="s{style}"><path d="M{path}"/>']
        for point, (across, down) in zip(points, places, strict=True):
            whisker = ""
            if point.low is not None and point.high is not None:
                ends = f"{self.down(point.high):.1f}V{self.down(point.low):.1f}"
                whisker = f'<path class="whisker" d="M{across:.1f} {ends}"/>'
            symbol = f'<circle r="11" class="target"/>{_MARKERS[style]}'
            placed = f'<g transform="translate({across:.1f} {down:.1f})">{symbol}</g>'
            parts.append(f"<g><title>{escape(point.title)}</title>{whisker}{placed}</g>")
        return "".join(parts) + "</g>"


def _with_room(ticks: Sequence[tuple[float, str]], needed: Callable[[str], float]) -> list[tuple[float, str]]:
    """The ticks, in pixels, that do not touch one of more importance."""
    shown: list[tuple[float, str]] = []
    for place, label in ticks:
        if all(abs(place - other) >= needed(label) for other, _ in shown):
            shown.append((place, label))
    return shown


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_step(rough: float) -> float:
    power = 10.0 ** floor(log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
