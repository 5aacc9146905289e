"""Small charts as inline SVG: lines over time and histograms. Colours and fonts are the page's
(report.py).

A chart is drawn at 400 x 220 and scaled to its place; legends are HTML beside it, so that they
wrap.
"""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 20, 22, 40  # margins of the plot
BINS = 45  # of a histogram, about
LOG_FROM = 12  # a largest value of so many medians is shown on a logarithmic axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """From low to high, linear or logarithmic, with round ticks; is_whole: at whole numbers
    alone.
    """

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    def at(self, value: float) -> float:
        """0 at low, 1 at high."""
        low, high, value = (
            (math.log(x) for x in (self.low, self.high, value))
            if self.is_log
            else (self.low, self.high, value)
        )
        return (value - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """At most so many round values between low and high."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for mantissas in ((1, 2, 5), (1, 3), (1,)):
                found = [
                    m * 10.0**p
                    for p in powers
                    for m in mantissas
                    if self.low <= m * 10.0**p <= self.high
                ]
                if len(found) <= most:
                    return found
            return found[:: math.ceil(len(found) / most)]
        step = round_up((self.high - self.low) / most)
        step = max(step, 1.0) if self.is_whole else step
        return [
            i * step
            for i in range(
                math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
            )
        ]


def round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... and their fractions."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def number(value: float) -> str:
    """Three significant digits and k, M or G: 0.25, 12, 1.5k."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def line_chart(
    title: str, times: Sequence[float], series: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Rates over time as steps: series[name][i] held between times[i] and times[i + 1], in
    seconds.
    """
    scale, time_unit = next(
        (s, u)
        for s, u in ((3600, "h"), (60, "min"), (1, "s"))
        if times[-1] - times[0] >= 3 * s or s == 1
    )
    x = Axis(low=0, high=max(times[-1], 1e-3) / scale)
    y = Axis(low=0, high=1.05 * max([*(v for values in series.values() for v in values), 1e-9]))
    body = _frame(x, y, f"time, {time_unit}", unit)
    for i, values in enumerate(series.values()):
        points = [(t / scale, v) for j, v in enumerate(values) for t in (times[j], times[j + 1])]
        path = " ".join(f"{_x(x, t):.1f},{_y(y, v):.1f}" for t, v in points)
        body += f'<polyline class="line s{i}" points="{path}"/>'
    keys = "".join(
        f'<li><i class="s{i}"></i>{html.escape(name)}</li>' for i, name in enumerate(series)
    )
    return _figure(title, body, keys)


def histogram(
    title: str, values: Sequence[float] | np.ndarray, unit: str, *, whole: bool = False
) -> str:
    """How often which value came, with the median and the 99th percentile; whole: the values are
    counts.
    """
    found = np.asarray(values, np.float64)
    low, median, p99, high = np.percentile(found, (0, 50, 99, 100))
    is_log = low > 0 and high > LOG_FROM * median
    edges = _edges(float(low), float(high), is_log, whole)
    counts, _ = np.histogram(found, edges)
    x = Axis(low=edges[0], high=edges[-1], is_log=is_log, is_whole=whole and not is_log)
    y = Axis(low=0, high=1.05 * counts.max(), is_whole=True)
    body = _frame(x, y, f"{unit}, logarithmic" if is_log else unit, "lines")
    for count, left, right in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        if count:
            left_px, right_px, top = _x(x, left), _x(x, right), _y(y, count)
            width, height = max(right_px - left_px - 1, 0.5), HEIGHT - BOTTOM - top
            where = f'x="{left_px:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
            name = number(left + 0.5) if left % 1 == 0.5 else f"{number(left)} to {number(right)}"
            body += f'<rect class="bar" {where}><title>{name}: {count}</title></rect>'
    for name, value in (("median", median), ("p99", p99)):
        at = _x(x, min(max(value, edges[0]), edges[-1]))
        body += (
            f'<line class="mark {name}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" '
            f'y2="{HEIGHT - BOTTOM}"/>'
        )
    shown = {"median": median, "p99": p99}
    suffix = "" if whole else f" {unit.rsplit(' ', 1)[-1]}"
    keys = "".join(
        f'<li><i class="{name}"></i>{name} {number(v)}{suffix}</li>' for name, v in shown.items()
    )
    return _figure(title, body, f"{keys}<li>{number(low)} to {number(high)}{suffix}</li>")


def _edges(low: float, high: float, is_log: bool, whole: bool) -> list[float]:
    """About BINS bins, round ones where the axis is linear; a bin around each where the values are
    few whole ones.
    """
    if is_log:
        return np.geomspace(low, high * (1 + 1e-9), BINS + 1).tolist()
    if whole and high - low <= BINS:
        beside = max(8 - int(high - low), 0) // 2
        return [i - 0.5 for i in range(max(int(low) - beside, 0), int(high) + beside + 2)]
    step = round_up((high - low) / BINS if high > low else max(abs(low), 1e-9) / 10)
    first, last = math.floor(low / step), math.floor(high / step) + 1
    return [i * step for i in range(first, last + 1)]


def _x(axis: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * axis.at(value)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * axis.at(value)


def _frame(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    """Grid, ticks and the names of both axes."""
    parts = [f'<text class="name" x="4" y="12">{html.escape(y_label)}</text>']
    for value in y.ticks(5):
        at = _y(y, value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" '
            f'text-anchor="end">{number(value)}</text>'
        )
    for value in x.ticks():
        at, base = _x(x, value), HEIGHT - BOTTOM
        parts.append(
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
        )
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{base + 17}" '
            f'text-anchor="middle">{number(value)}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
        f'y2="{HEIGHT - BOTTOM}"/>'
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="name" x="{middle}" y="{HEIGHT - 5}" '
        f'text-anchor="middle">{html.escape(x_label)}</text>'
    )
    return "".join(parts)


def _figure(title: str, body: str, keys: str) -> str:
    name = html.escape(title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{body}</svg>'
    return f"<figure><figcaption>{name}</figcaption><ul>{keys}</ul>{svg}</figure>"
