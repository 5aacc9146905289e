"""The report: what its charts say, what it escapes, and how a real browser shows it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.integrations.batch.charts import Axis, histogram, line_chart, number, round_step
from jpaged.integrations.batch.report import render, write_report
from jpaged.integrations.batch.stats import TIMED, BatchStats
from jpaged.integrations.batch.timeline import Timeline

NASTY = "<script>alert('x')</script>\x00&amp;\u202e"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BACKGROUND, BARS = (0xF5, 0xF6, 0xF8), (0x1D, 0x5F, 0xD1)


def make_stats(count: int = 2000, seconds: float = 600.0) -> BatchStats:
    """A run of so many lines, 37 of them failed."""
    rng, stats = np.random.default_rng(0), BatchStats(total=count, total_is_exact=True)
    stats.ended = stats.began + seconds
    stats.failed, stats.ok = 37, count - 37
    columns = stats.answered
    columns.latency.extend(rng.lognormal(1.2, 0.8, stats.ok).tolist())
    columns.finished.extend(np.sort(rng.uniform(0, seconds, stats.ok)).tolist())
    columns.prompt_tokens.extend(rng.integers(40, 900, stats.ok).tolist())
    columns.completion_tokens.extend(np.minimum(rng.geometric(1 / 120, stats.ok), 256).tolist())
    stats.tokens_in, stats.tokens_out = sum(columns.prompt_tokens), sum(columns.completion_tokens)
    stats.reasons.update(stop=stats.ok - 300, length=300)
    for code, lines in (("context_length_exceeded", 30), ("invalid_json", 7)):
        stats.errors[code], stats.first_lines[code] = lines, [3, 17, 400]
        stats.first_messages[code] = f"not JSON: {NASTY}"
    stats.timeline = Timeline(TIMED)
    for second in range(int(seconds) + 1):
        stats.timeline.add([600.0 * second, 400.0 * second], at=float(second))
    return stats


def page() -> str:
    settings = {"model": "/models/small", "input": f"prompts {NASTY}.jsonl", "temperature": 0.7}
    stats = make_stats()
    stats.samples = [f"=== line 1\ndef main(): {NASTY}\n--- answer\nreturn {NASTY}", "x" * 5000]
    return render(stats, title=f"answers {NASTY}", settings=settings)


class Reader(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_and_escapes_what_it_shows() -> None:
    found = Reader(page())
    tags = [tag for tag, _ in found.elements]
    assert "script" not in tags and tags.count("figure") == tags.count("svg") == 4
    names = {name for _, attrs in found.elements for name in attrs}
    assert not names & {"src", "href", "srcset"} and not any(
        name.startswith("on") for name in names
    )
    assert "://" not in page() and "url(" not in page() and "@import" not in page()
    shown = NASTY.replace("\x00", "\ufffd").replace("\u202e", "\ufffd")
    for text in ("answers ", "prompts ", "def main(): ", "return ", "not JSON: "):
        assert text + shown in found.text
    assert "x" * 750 in found.text and "x" * 751 not in found.text
    for part in (
        "Throughput",
        "Latency",
        "context_length_exceeded",
        "invalid_json",
        "stop",
        "/models/small",
        "0.7",
    ):
        assert part in found.text
    assert make_stats().table() in found.text


def test_a_run_in_which_nothing_was_answered_has_a_page_too() -> None:
    stats = BatchStats()
    stats.fail(1, "nothing works")
    text = render(stats, title="t", settings={})
    assert "nothing works" in text and "<svg" not in text and "Too short a run" in text


def test_a_report_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    for text in ("first \ud800", "second"):
        write_report(path, text)
    assert path.read_text() == "second" and os.listdir(tmp_path) == ["r.html"]


def test_numbers_are_short() -> None:
    values = {0: "0", 0.256: "0.256", 12: "12", 999.6: "1k", 1500: "1.5k", 2e6: "2M"}
    assert {value: number(value) for value in values} == values


def corners(path: str) -> list[tuple[float, float]]:
    """The points of a path."""
    points = re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path)
    return [(float(x), float(y)) for x, y in points]


def bars(svg: str) -> list[tuple[float, int]]:
    """(height, count) of each bar."""
    found = re.findall(r'<g class="bar"><title>[^:]*: (\d+)</title>\s*<path d="([^"]*)"', svg)
    shapes = [([y for _, y in corners(path)], int(count)) for count, path in found]
    return [(max(ys) - min(ys), count) for ys, count in shapes]


def keys(chart: dict[str, Any]) -> str:
    return ", ".join(key for _, key in chart["keys"])


def ticks(svg: str) -> list[str]:
    """What is written beside the axes."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def test_a_histogram_shows_every_value_in_proportion() -> None:
    values = np.array([3] * 40 + [4] * 20 + [9] * 10, np.uint32)
    chart = histogram("lengths", values, "tokens", whole=True)
    assert [count for _, count in bars(chart["svg"])] == [40, 20, 10]
    heights = [height for height, _ in bars(chart["svg"])]
    assert heights == pytest.approx([heights[0], heights[0] / 2, heights[0] / 4], abs=0.01)
    assert keys(chart) == "median 3, p99 9, 3 to 9"
    assert "tokens" in ticks(chart["svg"]) and "0" in ticks(chart["svg"])
    assert all(tick.isdecimal() for tick in ticks(chart["svg"]) if tick[0].isdecimal())
    latencies = np.random.default_rng(0).lognormal(0, 1.5, 500)
    chart = histogram("latency", latencies, "latency, s")
    assert sum(count for _, count in bars(chart["svg"])) == 500
    assert "latency, s, logarithmic" in ticks(chart["svg"])
    assert {"0.1", "1", "10"} <= set(ticks(chart["svg"]))
    few = (
        histogram("one", [7.0], "s")["svg"],
        histogram("zero", [0, 0, 1000], "n", whole=True)["svg"],
    )
    assert [sum(count for _, count in bars(svg)) for svg in few] == [1, 3]


def test_the_marks_lie_at_their_values() -> None:
    svg = histogram("lengths", [*range(101)] * 3, "tokens", whole=True)["svg"]
    marks = dict(re.findall(r'<g class="mark (\w+)">\s*<path d="([^"]*)"', svg))
    shapes = re.findall(r'<g class="bar"><title>[^<]*</title>\s*<path d="([^"]*)"', svg)
    left, right = min(corners(shapes[0]))[0], max(corners(shapes[-1]))[0]
    at = {name: corners(path)[0][0] for name, path in marks.items()}
    assert at.keys() == {"median", "p99"}
    assert left + 0.45 * (right - left) < at["median"] < left + 0.55 * (right - left)
    assert left + 0.95 * (right - left) < at["p99"] <= right


def test_a_line_chart_has_a_step_for_each_interval() -> None:
    chart = line_chart("rates", [0, 60, 300], {"a": [10, 20], "b": [5, 0]}, "tokens/s")
    lines = re.findall(r'<g class="line s(\d)">\s*<path d="([^"]*)"', chart["svg"])
    assert [name for name, _ in lines] == ["0", "1"] and keys(chart) == "a, b"
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners(lines[0][1])
    assert y0 == y1 > y2 == y3 and x1 == x2 and (x1 - x0) * 4 == pytest.approx(x3 - x2, abs=1)
    assert {"time, min", "tokens/s"} <= set(ticks(chart["svg"]))
    assert "time, h" in ticks(line_chart("long", [0, 20_000], {"a": [1]}, "tokens/s")["svg"])


def test_charts_need_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page().count("<svg") == 4


def test_ticks_are_round_and_few() -> None:
    assert Axis(0, 105, 0, 1).ticks(5) == [0, 25, 50, 75, 100]
    assert Axis(3, 9, 0, 1).ticks(6, whole=True) == [3, 4, 5, 6, 7, 8, 9]
    assert Axis(0, 11, 0, 1).ticks(5, whole=True) == [0, 5, 10]
    assert Axis(0.05, 40, 0, 1, is_log=True).ticks(7) == pytest.approx([0.1, 0.3, 1, 3, 10, 30])
    assert Axis(1e-3, 1e9, 0, 1, is_log=True).ticks(7) == [10.0**i for i in (-3, -1, 1, 3, 5, 7, 9)]
    assert [round_step(x) for x in (0.9, 1, 2.1, 3, 30, 700)] == [1, 1, 2.5, 5, 50, 1000]
    assert [round_step(x, whole=True) for x in (0.01, 2.1, 21)] == [1, 5, 25]


@pytest.mark.parametrize("is_log", [False, True])
def test_an_axis_runs_from_end_to_end(is_log: bool) -> None:
    axis = Axis(1, 100, 40, 388, is_log=is_log)
    assert (axis.at(1), axis.at(100)) == (40, 388)
    assert axis.at(10) == pytest.approx(214 if is_log else 40 + 9 / 99 * 348)
    assert Axis(0, 1, 180, 24).at(0.5) == 102, "values grow upwards"


def test_a_timeline_keeps_its_course_in_bounded_memory() -> None:
    timeline = Timeline(["n"], most=50, every_s=1.0)
    for second in range(5000):
        timeline.add([3.0 * second], at=float(second))
    assert len(timeline.times) <= 50 and timeline.times[0] == 0 and timeline.times[-1] > 4800
    edges, rates = timeline.rates(points=10)
    assert len(edges) == len(rates["n"]) + 1 <= 12 and rates["n"] == pytest.approx(
        [3.0] * len(rates["n"])
    )
    assert Timeline(["n"]).rates() == ([], {"n": []})
    timeline = Timeline(["n"])
    for at in (0.0, 0.01, 1.0):
        timeline.add([at], at=at)
    assert timeline.times == [0.0, 1.0]


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, np.ndarray]]:
    """The page as a browser draws it, RGB [height, width, 3] by the window's width."""
    image = pytest.importorskip("PIL.Image")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is on the PATH")
    folder = tmp_path_factory.mktemp("report")
    write_report(folder / "r.html", page())
    drawn = {}
    for width, height in ((1100, 2400), (380, 4600)):
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
        ]
        flags += [f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'shot.png'}"]
        subprocess.run(
            [browser, *flags, (folder / "r.html").as_uri()],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with image.open(folder / "shot.png") as shot:
            drawn[width] = np.asarray(shot.convert("RGB"))
    yield drawn


@pytest.mark.parametrize("width", [1100, 380])
def test_a_browser_draws_it_and_nothing_is_wider_than_the_window(
    shots: dict[int, np.ndarray], width: int
) -> None:
    shot = shots[width]
    assert shot.shape[1] == width

    def share(colour: tuple[int, int, int], area: np.ndarray) -> float:
        return float((np.abs(area.astype(int) - colour).max(axis=-1) <= 2).mean())

    assert (
        share(BACKGROUND, shot[:, :12]) == share(BACKGROUND, shot[:, -12:]) == 1.0
    )  # the margins are empty
    assert 0.02 < share((255, 255, 255), shot) < 0.98 and share(BARS, shot) > 0.001
    assert share(BACKGROUND, shot[-40:]) == 1.0, "the page is longer than the picture"
