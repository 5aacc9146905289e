"""Reports of scripts/sweep.py: the results file, the table, summary.csv, ratios of two sweeps, and
plots.

A row is a dict of one line of results.jsonl: a point's settings, and either its figures or an
"error".
"""

import contextlib
import csv
import itertools
import json
import os
import statistics
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common as common
from _common import number

if TYPE_CHECKING:  # matplotlib is imported when something is drawn
    from matplotlib.figure import Figure

Row = dict[str, Any]
SIZES = {"num_prompts": "batch", "random_input_len": "input", "random_output_len": "output"}
# What makes a point, with a short name for labels ("" where the value speaks for itself). A row
# from before there was a setting lacks it, which is as if the engine had chosen.
SETTINGS = SIZES | {
    "model_id": "",
    "dtype": "",
    "attention": "attention",
    "block_size": "block",
    "decode_steps": "steps",
    "temperature": "temperature",
    "max_num_seqs": "rows",
    "max_num_batched_tokens": "batched tokens",
    "num_blocks": "pool blocks",
}
COMPARED = {
    "output_throughput": "output tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "median_tpot_ms": "TPOT p50 ms",
}
# Columns of the table: head, and the figure. Other units than the row's: see `table`.
COLUMNS = {
    "run\nspread": "duration_spread",
    "output\ntok/s": "output_throughput",
    "prefill\ntok/s": "prefill_tok_s",
    "decode\ntok/s": "decode_tok_s",
    "TTFT\np50 ms": "median_ttft_ms",
    "\np99 ms": "p99_ttft_ms",
    "TPOT\np50 ms": "median_tpot_ms",
    " \np99 ms": "p99_tpot_ms",
    "padding\nwaste %": "waste_percent",
    "compiled\nsteps": "num_compiles",
    "\nin s": "compile_s",
    "peak\nMiB": "peak_mib",
    "decode\nGB/s": "decode_read_gb_s",
    "of\npeak %": "read_percent",
}


class ReportError(Exception):
    """Says which results cannot be read or compared, and why."""


class Results:
    """The results.jsonl of a folder. Rows are appended one by one, and the last row of a point
    counts. A torn last line is dropped.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "results.jsonl"
        self.rows, whole = read_rows(self.path)
        if self.path.exists():
            os.truncate(self.path, whole)

    def is_wanted(self, point: str, *, retry_failed: bool) -> bool:
        """Return whether a point is to run: it has no row, it was killed once (see `attempt`), or
        it is wanted again.
        """
        row = self.rows.get(point, {"starts": 0})
        return row.get("starts", 2) < 2 or (retry_failed and "error" in row)

    def append(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(common.json_line(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["point"]] = row

    @contextlib.contextmanager
    def attempt(self, row: Row) -> Iterator[None]:
        """Write a row that says that the process was killed in this point, and take it back when
        the block ends. So it stays only if Linux kills the process there, as for want of memory.
        """
        before = self.rows.get(row["point"])
        whole = self.path.stat().st_size if self.path.exists() else 0
        starts = 1 + (before or {}).get("starts", 0)
        killed = {"error": "the process was killed in this point", "out_of_memory": None}
        self.append(row | killed | {"starts": starts})
        try:
            yield
        finally:
            os.truncate(self.path, whole)
            self.rows.pop(row["point"])
            if before is not None:
                self.rows[row["point"]] = before

    def write_summary(self) -> None:
        """Write summary.csv: all rows, with a column for each key that any of them has."""
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        with (self.folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows.values())


def read_rows(path: Path) -> tuple[dict[str, Row], int]:
    """Return the rows by point, and how many bytes of the file are whole lines."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    rows: dict[str, Row] = {}
    for i, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row["point"]] = row
        except (ValueError, KeyError, TypeError) as e:
            raise ReportError(f"{path}, line {i}: not a row of a sweep: {e!r}") from e
    return rows, len(whole)


# ---- tables ----


def describe(row: Row, names: Iterable[str]) -> str:
    """Return some of a row's settings as words, such as "input 64, block 16", without those that
    were left to the engine.
    """
    present = (name for name in names if row.get(name) is not None)
    return ", ".join(f"{SETTINGS[name]} {row[name]}".strip() for name in present)


def varying(rows: Iterable[Row]) -> list[str]:
    """Return the settings that are not the same in all rows."""
    rows = list(rows)
    return [name for name in SETTINGS if len({row.get(name) for row in rows}) > 1]


def one_line(row: Row, names: Iterable[str]) -> str:
    """Return a row as a line of the log, with these settings."""
    start = describe(row, names)
    if "error" in row:
        return f"{start}: {row['error']}"
    figures = f"{number(row['output_throughput'])} tok/s, TTFT {number(row['median_ttft_ms'])} ms"
    compiled = f"compiled {number(row['compile_s'])} s"
    return f"{start}: {figures}, TPOT {number(row['median_tpot_ms'])} ms, {compiled}"


def table(rows: list[Row]) -> str:
    """Return the rows as text for a person, in 120 columns: a block of lines for each engine."""
    if not rows:
        return "no rows"
    cells = []
    for row in (row for row in rows if "error" not in row):
        share, peak = row.get("read_bandwidth_fraction"), row.get("peak_memory_bytes")
        units = {"waste_percent": 100 * row["padding_waste"]}
        units["read_percent"] = None if share is None else 100 * share
        units["peak_mib"] = None if peak is None else peak / 2**20
        shown = [(row | units).get(name) for name in (*SIZES, *COLUMNS.values())]
        cells.append([str(n) if isinstance(n, int) else number(n) for n in shown])
    lines = common.aligned([*SIZES.values(), *COLUMNS], cells)
    printed, body, engine = lines[:2], iter(lines[2:]), ""
    for row in rows:
        if (this := describe(row, (name for name in SETTINGS if name not in SIZES))) != engine:
            engine = this
            printed += ["", *textwrap.wrap(engine, 120)]
        said = f"{describe(row, SIZES)}: {row['error']}"[:120] if "error" in row else next(body)
        printed.append(said)
    return "\n".join(printed)


def compare(folder_a: str, folder_b: str) -> str:
    """Return the figures of B over those of A for the points that both measured, and the geometric
    means of the ratios.

    A setting that has one value in A and another one in B is what is compared; points are matched
    by the other settings.
    """
    a, b = (measured_rows(Path(folder)) for folder in (folder_a, folder_b))
    constant = set(SETTINGS) - {*varying(a), *varying(b)}
    alone = [name for name in SETTINGS if name in constant and a[0].get(name) != b[0].get(name)]
    matched = [name for name in SETTINGS if name not in alone]
    of_b = {tuple(map(row.get, matched)): row for row in b}
    pairs = [(row, of_b[key]) for row in a if (key := tuple(map(row.get, matched))) in of_b]
    if not pairs:
        raise ReportError(f"{folder_a} and {folder_b} have no measured point in common")
    shown = list(dict.fromkeys([*SIZES, *varying(row for row, _ in pairs)]))
    heads = [SETTINGS[name] or name for name in shown]
    lines = [[str(row.get(name)) for name in shown] for row, _ in pairs]
    lines.append(["mean", *[""] * (len(shown) - 1)])
    for name, title in COMPARED.items():
        heads += [f"{title}\nA", "\nB", "\nB/A"]
        ratios = []
        for line, (row, other) in zip(lines, pairs, strict=False):
            x, y = row[name], other[name]
            ratios += [y / x] if x and y else []
            line += [number(x), number(y), f"{y / x:.3f}" if x and y else "-"]
        lines[-1] += ["", "", f"{statistics.geometric_mean(ratios):.3f}" if ratios else "-"]
    sides = (("A", folder_a, a[0]), ("B", folder_b, b[0]))
    said = [f"{side}: {folder}  {describe(row, alone)}".rstrip() for side, folder, row in sides]
    left = f"{len(a) - len(pairs)} measured points are in A alone, {len(b) - len(pairs)} in B alone"
    return "\n".join([*said, "", *common.aligned(heads, lines), "", f"mean: geometric. {left}"])


def measured_rows(folder: Path) -> list[Row]:
    """Return the rows that have figures. ReportError where there is none."""
    path = folder / "results.jsonl"
    if not path.exists():
        raise ReportError(f"{path}: no such file")
    rows = [row for row in read_rows(path)[0].values() if "error" not in row]
    if not rows:
        raise ReportError(f"{path}: no point is measured")
    return rows


# ---- plots ----

AXIS_LABELS = {
    "num_prompts": "batch (requests submitted at once)",
    "output_throughput": "throughput (output tokens / s)",
    "random_input_len": "input (prompt tokens a request)",
    "median_ttft_ms": "TTFT: time to first token, median (ms)",
    "user_tok_s": "per user: 1 / median TPOT (output tokens / s)",
    "device_tok_s": "per device (output tokens / s)",
    "waste_percent": "padding waste (% of the token rows computed)",
    "compile_s": "compile time of steps first met at this point (s)",
}
MARKERS = "os^Dv<>Pp*"


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Draw each plot into a PNG. Return the paths."""
    paths = []
    for name, figure in plots(rows).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def plots(rows: list[Row]) -> "dict[str, Figure]":
    """Return the four plots by name; none without a measured row."""
    rows = [row for row in rows if "error" not in row]
    users = [r | {"user_tok_s": 1e3 / r["median_tpot_ms"]} for r in rows if r["median_tpot_ms"]]
    users = [row | {"device_tok_s": row["output_throughput"] / row["num_devices"]} for row in users]
    wasted = [row | {"waste_percent": 100 * row["padding_waste"]} for row in rows]
    series = {
        "throughput": plot(rows, "num_prompts", "output_throughput"),
        "ttft": plot(rows, "random_input_len", "median_ttft_ms", log_y=True),
        "users": plot(users, "user_tok_s", "device_tok_s", dots="num_prompts"),
        "compile": plot(wasted, "waste_percent", "compile_s", dots="num_prompts", line="none"),
    }
    return {name: figure for name, figure in series.items() if figure is not None}


def plot(
    rows: list[Row],
    x: str,
    y: str,
    *,
    dots: str | None = None,
    log_y: bool = False,
    line: str = "-",
) -> "Figure | None":
    """Plot y against x, with a series for each combination of the other settings that vary, except
    `dots`, which labels the points.
    """
    from matplotlib.figure import Figure  # by itself it needs no display, and leaves no state
    from matplotlib.ticker import LogFormatter

    if not rows:
        return None
    vary, labelled, label = varying(rows), dots is not None, dots or x
    apart = [name for name in vary if name not in (x, dots)]
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[label]):
        series.setdefault(tuple(map(row.get, apart)), []).append(row)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    ordered = sorted(series, key=lambda values: [(value is not None, value) for value in values])
    for key, marker in zip(ordered, itertools.cycle(MARKERS), strict=False):
        points = series[key]
        xs, ys = [p[x] for p in points], [p[y] for p in points]
        axes.plot(xs, ys, linestyle=line, marker=marker, label=describe(points[0], apart))
        for p in points if labelled else ():
            axes.annotate(
                str(p[label]), (p[x], p[y]), (5, 5), textcoords="offset points", fontsize=8
            )
    axes.set(xlabel=AXIS_LABELS[x], ylabel=AXIS_LABELS[y])
    axes.grid(alpha=0.3)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter())
    else:  # with 0 in sight; a dot that lies on it is seen whole
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if x in SETTINGS:  # ticks at the values that were measured, and nowhere else
        values = sorted({row[x] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.set_xticks([], minor=True)
    else:
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    same = describe(rows[0], (name for name in SETTINGS if name not in (*vary, x, dots)))
    note = f"\nnumbers at the dots: {SETTINGS[dots]}" if dots is not None else ""
    axes.set_title(f"{same}, on {rows[0]['device']}{note}", fontsize=9, loc="left", wrap=True)
    if len(series) > 1:
        figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure
