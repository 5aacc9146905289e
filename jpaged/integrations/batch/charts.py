"""Draws the report's charts with matplotlib as inline SVG: lines over time, and histograms. Colours
and fonts come from the page (report.html.jinja), by the classes of a chart's parts.
"""

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BINS = 45  # bars of a histogram, about
LOG_FROM = 12  # the axis is logarithmic if the largest value is at least this many times the median
# Text is kept as text, so that the page's fonts and colours apply.
STYLE: Any = {"svg.fonttype": "none", "font.size": 9.5, "axes.spines.right": False}
STYLE |= {"axes.spines.top": False, "axes.spines.left": False, "axes.axisbelow": True}


def number(value: float, _: Any = None) -> str:
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

    def draw(axes: Any) -> None:
        for i, values in enumerate(series.values()):
            axes.stairs(values, np.asarray(times) / scale, gid=f"line s{i}", baseline=None)
        axes.set_ylim(bottom=0)
        axes.set(xlabel=f"time, {time_unit}", title=unit)

    keys = [(f"s{i}", name) for i, name in enumerate(series)]
    return {"title": title, "keys": keys, "svg": _drawn(title, draw)}


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
    counts, _ = np.histogram(numbers, edges)

    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

        if is_log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=7))
            axes.xaxis.set_minor_locator(NullLocator())
        elif whole:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        bars = axes.bar(edges[:-1], counts, np.diff(edges), align="edge")
        for bar, count, left, right in zip(bars, counts, edges, edges[1:], strict=False):
            name = number(left + 0.5) if left % 1 == 0.5 else f"{number(left)} to {number(right)}"
            bar.set(gid=f"bar {name}: {count}", visible=bool(count))
        for name, value in (("median", median), ("p99", p99)):
            axes.axvline(value, gid=f"mark {name}")
        axes.set(xlabel=f"{unit}, logarithmic" if is_log else unit, title="lines")

    suffix = "" if whole else f" {unit.rsplit(' ', 1)[-1]}"
    keys = [("median", f"median {number(median)}{suffix}"), ("p99", f"p99 {number(p99)}{suffix}")]
    keys.append(("", f"{number(low)} to {number(high)}{suffix}"))
    return {"title": title, "keys": keys, "svg": _drawn(title, draw)}


def _edges(low: float, high: float, is_log: bool, whole: bool) -> np.ndarray:
    """Return the edges of about BINS bins. They are round numbers if the axis is linear. A few
    whole values get a bin each.
    """
    if is_log:
        return np.geomspace(low, high * (1 + 1e-9), BINS + 1)
    if whole and high - low <= BINS:
        beside = max(8 - int(high - low), 0) // 2
        return np.arange(max(low - beside, 0) - 0.5, high + beside + 1)
    from matplotlib.ticker import MaxNLocator

    return np.asarray(MaxNLocator(BINS).tick_values(low, math.nextafter(high, math.inf)))


def _drawn(title: str, draw: Any) -> str:
    """Return an <svg> element of what `draw` puts on the axes. The gids of its parts become
    classes.

    The gid of a bar is "bar" and the text that a pointer on it shows. Raises ImportError without
    matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 3.0), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.title.set(horizontalalignment="left", x=0)
        axes.grid(axis="y", gid="grid")
        axes.tick_params(length=0, which="both")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(number))
        for part in figure.findobj():
            part.set_clip_on(False)
        file = io.StringIO()
        # No metadata, which would name a date, a creator and other sites.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = re.sub(r"<svg [^>]*>", _root(title), svg[svg.index("<svg ") :], count=1)
    svg = re.sub(r'<g id="bar ([^"]*)">', r'<g class="bar"><title>\1</title>', svg)
    svg = re.sub(r'<g id="((?:line|mark|grid)[^"]*)">', r'<g class="\1">', svg)
    return re.sub(r' id="[^"]*"', "", svg)


def _root(title: str) -> str:
    return f'<svg viewBox="0 0 396 216" role="img" aria-label="{html.escape(title)}">'
