"""Draws the report's charts as inline SVG: lines over time, and histograms. Colours and fonts come
from the page (report.html.jinja), by the classes of a chart's parts.
"""

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

BINS = 45  # bars of a histogram, about
LOG_FROM = 12  # the axis is logarithmic if the largest value is at least this many times the median
WIDTH, HEIGHT = 396, 216  # of a chart, in the units of its coordinates
LEFT, RIGHT, TOP, BOTTOM = 40, 388, 24, 180  # the area of the data in it
STEPS = (1, 2, 2.5, 5, 10)  # round distances between ticks, times a power of ten
X_TICKS, Y_TICKS, LOG_TICKS = 6, 5, 7  # ticks of an axis at most, about


def number(value: float) -> str:
    """Return a number with three significant digits and k, M or G: 0.25, 12, 1.5k."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def line_chart(
    title: str, times: Sequence[float], series: Mapping[str, Sequence[float]], unit: str
) -> dict[str, Any]:
    """Draw rates over time as steps: series[name][i] holds between times[i] and times[i + 1], in
    seconds.
    """
    seconds = times[-1] - times[0]
    scale, time_unit = (3600, "h") if seconds >= 3 * 3600 else (60, "min")
    if seconds < 3 * 60:
        scale, time_unit = 1, "s"
    edges = [time / scale for time in times]
    across = Axis(edges[0], edges[-1], LEFT, RIGHT)
    up = upward(max((max(values) for values in series.values()), default=0.0))

    def parts() -> Iterator[str]:
        for i, (name, values) in enumerate(series.items()):
            points: list[tuple[float, float]] = []
            for left, right, value in zip(edges, edges[1:], values, strict=False):
                y = up.at(value)
                points += [(across.at(left), y), (across.at(right), y)]
            label = f"<title>{html.escape(name)}</title>"
            yield f'<g class="line s{i}">{_path(points)}{label}</g>'

    ticks = across.ticks(X_TICKS)
    keys = [(f"s{i}", name) for i, name in enumerate(series)]
    drawn = _drawn(title, unit, f"time, {time_unit}", across, ticks, up, parts())
    return {"title": title, "keys": keys, "svg": drawn}


def histogram(
    title: str, values: Sequence[float] | np.ndarray, unit: str, *, whole: bool = False
) -> dict[str, Any]:
    """Draw the frequencies of values, with the median and the 99th percentile. whole: the values
    are counts.
    """
    numbers = np.asarray(values, np.float64)
    low, median, p99, high = np.percentile(numbers, (0, 50, 99, 100)).tolist()
    is_log = low > 0 and high > LOG_FROM * median
    edges = _edges(low, high, is_log, whole)
    counts = np.histogram(numbers, edges)[0].tolist()
    across = Axis(float(edges[0]), float(edges[-1]), LEFT, RIGHT, is_log=is_log)
    up = upward(max(counts))

    def parts() -> Iterator[str]:
        for count, left, right in zip(counts, edges, edges[1:], strict=False):
            if not count:
                continue
            name = number(left + 0.5) if left % 1 == 0.5 else f"{number(left)} to {number(right)}"
            x0, x1, y = across.at(left), across.at(right), up.at(count)
            corners = [(x0, up.start), (x0, y), (x1, y), (x1, up.start)]
            yield f'<g class="bar"><title>{name}: {count}</title>{_path(corners, close=True)}</g>'
        for name, value in (("median", median), ("p99", p99)):
            x = across.at(value)
            yield f'<g class="mark {name}">{_path([(x, up.start), (x, up.end)])}</g>'

    suffix = "" if whole else f" {unit.rsplit(' ', 1)[-1]}"
    keys = [("median", f"median {number(median)}{suffix}"), ("p99", f"p99 {number(p99)}{suffix}")]
    keys.append(("", f"{number(low)} to {number(high)}{suffix}"))
    ticks = across.ticks(LOG_TICKS if is_log else X_TICKS, whole=whole)
    label = f"{unit}, logarithmic" if is_log else unit
    return {
        "title": title,
        "keys": keys,
        "svg": _drawn(title, "lines", label, across, ticks, up, parts()),
    }


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis: the values from `low` to `high` lie between the coordinates `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / ((high - low) or 1) * (self.end - self.start)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """Return round values on the axis, about `most` of them. whole: only whole ones."""
        if not self.is_log:
            step = round_step((self.high - self.low) / most, whole=whole)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        tens = [10.0**power for power in powers]
        for values in ([m * ten for ten in tens for m in (1, 3)], tens):
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) <= most:
                return inside
        return inside[:: -(-len(inside) // most)]


def upward(most: float) -> Axis:
    """Return the vertical axis of values from 0 to `most`, with a little room above."""
    return Axis(0.0, 1.05 * most or 1.0, BOTTOM, TOP)


def round_step(least: float, *, whole: bool = False) -> float:
    """Return the smallest round number that is at least this: 1, 2, 2.5 or 5 times a power of ten.
    whole: a whole one.
    """
    if whole and least <= 1:
        return 1.0
    ten = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    steps = (step * ten for step in STEPS)
    return next(s for s in steps if s >= least * (1 - 1e-9) and not (whole and s % 1))


def _edges(low: float, high: float, is_log: bool, whole: bool) -> np.ndarray:
    """Return the edges of about BINS bins. They are round numbers if the axis is linear. A few
    whole values get a bin each.
    """
    if is_log:
        return np.geomspace(low, high * (1 + 1e-9), BINS + 1)
    if whole and high - low <= BINS:
        beside = max(8 - int(high - low), 0) // 2
        return np.arange(max(low - beside, 0) - 0.5, high + beside + 1)
    if high == low:  # a bar among empty places
        step = round_step((abs(low) or 1) / BINS)
        return (math.floor(low / step) + np.arange(-4, 6)) * step
    step = round_step((high - low) / BINS, whole=whole)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return np.arange(first, last + 1) * step


def _path(points: Sequence[tuple[float, float]], *, close: bool = False) -> str:
    """Return a path through points."""
    text = " L ".join(f"{_short(x)} {_short(y)}" for x, y in points)
    return f'<path d="M {text}{" Z" if close else ""}"/>' if points else ""


def _short(coordinate: float) -> str:
    return f"{coordinate:.3f}".rstrip("0").rstrip(".")


def _text(text: str, x: float, y: float, anchor: str) -> str:
    place = f'x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _drawn(
    title: str,
    heading: str,
    label: str,
    across: Axis,
    ticks: Sequence[float],
    up: Axis,
    parts: Iterator[str],
) -> str:
    """Return an <svg> element: the grid under the parts, and the axes with their ticks. heading:
    what the vertical axis counts. label: what the horizontal one does.
    """
    values = up.ticks(Y_TICKS, whole=heading == "lines")
    grid = "".join(_path([(LEFT, up.at(v)), (RIGHT, up.at(v))]) for v in values if v)
    lines = [f'<g class="grid">{grid}</g>', *parts]
    lines.append(f'<g class="axis">{_path([(LEFT, BOTTOM), (RIGHT, BOTTOM)])}</g>')
    lines += [_text(number(v), LEFT - 5, up.at(v) + 3, "end") for v in values]
    lines += [_text(number(v), across.at(v), BOTTOM + 14, "middle") for v in ticks]
    lines.append(_text(heading, LEFT, TOP - 10, "start"))
    lines.append(_text(label, (LEFT + RIGHT) / 2, BOTTOM + 30, "middle"))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="9.5" fill="none"'
    return f'<svg {size} role="img" aria-label="{html.escape(title)}">{"".join(lines)}</svg>'
