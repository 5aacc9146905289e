"""Writes the page of `--report`: one HTML file with its charts inside, which any browser shows
without a network. report.html.jinja is the page, charts.py draws the charts.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from jpaged.integrations.batch.charts import histogram, line_chart, number
from jpaged.integrations.batch.progress import duration
from jpaged.integrations.batch.replacement import Replacement
from jpaged.integrations.batch.stats import BatchStats, lines_of

LONGEST = 1500  # characters of a prompt and its answer that are shown, at most


def render(stats: BatchStats, *, title: str, settings: Mapping[str, Any]) -> str:
    """Return the page. settings: the settings of the run, by name."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters["cut"] = _cut
    reasons = stats.reasons.most_common()
    return pages.get_template("report.html.jinja").render(
        title=title,
        began=time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(stats.began_at)),
        took=duration(stats.seconds),
        tiles=_tiles(stats),
        charts=_charts(stats),
        errors=[
            *(_kind(stats, code, count) for code, count in stats.errors.most_common()),
            *_earlier_kinds(stats),
        ],
        reasons=[{"name": name, "count": count, "note": ""} for name, count in reasons],
        summary=stats.table(),
        settings=settings,
        samples=stats.samples,
    )


def write_report(path: str | Path, page: str) -> None:
    """Write the page, and replace an earlier one in one step. Raises OSError."""
    with Replacement(str(path)) as file:
        file.write(page.encode(errors="replace"))


def _charts(stats: BatchStats) -> list[dict[str, Any]]:
    """Return the charts that a run is long enough for."""
    edges, rates = stats.timeline.rates()
    charts: list[dict[str, Any]] = [{"title": "Throughput", "svg": None}]
    if len(edges) >= 2:
        computed = {"generated": rates["decode_tokens"]}
        computed["prompt tokens computed"] = rates["prefill_tokens"]
        charts = [line_chart("Throughput", edges, computed, "tokens/s")]
    answered, took = stats.answered, "Latency: from the start of a line in the engine to its answer"
    if len(answered):
        prompts, answers = answered.prompt_tokens, answered.completion_tokens
        charts.append(histogram(took, answered.latency, "latency, s"))
        charts.append(histogram("Length of the prompts", prompts, "tokens", whole=True))
        charts.append(histogram("Length of the answers", answers, "tokens", whole=True))
    return charts


def _tiles(stats: BatchStats) -> list[tuple[str, str, str]]:
    total = "" if stats.total is None else f"of {stats.told_total} "
    return [
        ("", str(stats.done), f"{total}lines done"),
        ("bad" if stats.all_failed else "", str(stats.all_failed), "failed"),
        ("", f"{number(stats.tokens_out / stats.seconds)} tok/s", "generated"),
        ("", f"{number(stats.tokens_in / stats.seconds)} tok/s", "prompts"),
        ("", f"{stats.cached_percent:.0f} %", "of prompt tokens from the cache"),
        ("", str(stats.preemptions), "preemptions"),
    ]


def _kind(stats: BatchStats, code: str, count: int) -> dict[str, Any]:
    note = f"{stats.where(code)}: {_cut(stats.first_messages[code])}"
    return {"name": code, "count": count, "note": note}


def _earlier_kinds(stats: BatchStats) -> list[dict[str, Any]]:
    """Return the errors of earlier runs, of which only codes and line numbers are known."""
    return [
        {"name": code, "count": count, "note": f"in an earlier run: {lines_of(count, first)}"}
        for code, (count, first) in stats.earlier_errors.items()
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _shown(value: Any) -> Any:
    """Return a value without control characters, which a page must not contain."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
