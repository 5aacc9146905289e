"""What scripts/sweep.py makes of its rows: the results file, the table, summary.csv, ratios of two
sweeps, and plots.

A row is a dict of one line of results.jsonl: a point's settings, and either its figures or an
"error".
"""

import contextlib
import csv
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib is imported when something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
SIZES = {"num_prompts": "batch", "random_input_len": "input", "random_output_len": "output"}
# What makes a point, with a short name for labels ("" where the value speaks for itself).
SETTINGS = SIZES | {
    "model_id": "",
    "dtype": "",
    "attention": "attention",
    "block_size": "block",
    "decode_steps": "steps",
    "temperature": "temperature",
    "max_num_batched_tokens": "batched tokens",
    "num_blocks": "pool blocks",
}
COMPARED = {
    "output_throughput": "output tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "median_tpot_ms": "TPOT p50 ms",
}


class ReportError(Exception):
    """Results that cannot be read or compared."""


class Results:
    """A folder's results.jsonl: appended to row by row, the last row of a point counts. A torn last
    line is dropped.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "results.jsonl"
        self.rows, whole = read_rows(self.path)
        if self.path.exists():
            os.truncate(self.path, whole)
        self._marker = folder / "running.json"

    def is_wanted(self, point: str, *, retry_failed: bool) -> bool:
        row = self.rows.get(point)
        return row is None or (retry_failed and "error" in row)

    def append(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(
                    {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
                )
                + "\n"
            )
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["point"]] = row

    @contextlib.contextmanager
    def running(self, point: str) -> Iterator[bool]:
        """Note on disk which point runs. True if the process was killed in it twice, as for want of
        memory on Linux.
        """
        kills = 0
        if self._marker.exists():
            with contextlib.suppress(ValueError, AttributeError):  # torn by the kill
                before = json.loads(self._marker.read_text())
                kills = before.get("starts", 0) if before.get("point") == point else 0
        self._marker.write_text(json.dumps({"point": point, "starts": kills + 1}))
        try:
            yield kills >= 2
        finally:
            self._marker.unlink(missing_ok=True)

    def write_summary(self) -> None:
        """summary.csv: all rows, a column for each key that any of them has."""
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        with (self.folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows.values())


def read_rows(path: Path) -> tuple[dict[str, Row], int]:
    """The rows by point, and how many bytes of the file are whole lines."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    rows: dict[str, Row] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row["point"]] = row
        except (ValueError, KeyError, TypeError) as e:
            raise ReportError(f"{path}, line {number}: not a row of a sweep: {e!r}") from e
    return rows, len(whole)


# ---- tables ----


def number(value: float | None) -> str:
    """Three significant digits, but all that are before the point and at most two behind it."""
    if value is None:
        return "-"
    return f"{value:,.{0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2}f}"


def aligned(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Right-aligned columns; a head may have several lines."""
    stacked = [head.split("\n") for head in heads]
    depth = max(map(len, stacked))
    cells = [[head[i] if i < len(head) else "" for head in stacked] for i in range(depth)] + [
        list(x) for x in lines
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        " ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def describe(row: Row, names: Iterable[str]) -> str:
    """Some of a row's settings as words, such as "input 64, block 16"; those left to the engine are
    left out.
    """
    return ", ".join(
        f"{SETTINGS[name]} {row[name]}".strip() for name in names if row[name] is not None
    )


def varying(rows: Iterable[Row]) -> list[str]:
    """The settings that are not the same in all rows."""
    rows = list(rows)
    return [name for name in SETTINGS if len({row[name] for row in rows}) > 1]


def one_line(row: Row, names: Iterable[str]) -> str:
    """A row for the log, with these settings."""
    start = describe(row, names)
    if "error" in row:
        return f"{start}: {row['error']}"
    figures = f"{number(row['output_throughput'])} tok/s, TTFT {number(row['median_ttft_ms'])} ms"
    return (
        f"{start}: {figures}, TPOT {number(row['median_tpot_ms'])} ms, compiled "
        f"{number(row['compile_s'])} s"
    )


def table(rows: list[Row]) -> str:
    """The rows for a person, in 120 columns: a block of lines for each engine."""
    if not rows:
        return "no rows"
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("batch", lambda r: str(r["num_prompts"])),
        ("input", lambda r: str(r["random_input_len"])),
        ("output", lambda r: str(r["random_output_len"])),
        ("run\nspread", lambda r: number(r.get("duration_spread"))),
        ("output\ntok/s", lambda r: number(r["output_throughput"])),
        ("prefill\ntok/s", lambda r: number(r["prefill_tok_s"])),
        ("decode\ntok/s", lambda r: number(r["decode_tok_s"])),
        ("TTFT\np50 ms", lambda r: number(r["median_ttft_ms"])),
        ("\np99 ms", lambda r: number(r["p99_ttft_ms"])),
        ("TPOT\np50 ms", lambda r: number(r["median_tpot_ms"])),
        ("\np99 ms", lambda r: number(r["p99_tpot_ms"])),
        ("padding\nwaste", lambda r: f"{100 * r['padding_waste']:.0f}%"),
        ("compiled\nsteps", lambda r: str(r["num_compiles"])),
        ("\nin s", lambda r: number(r["compile_s"])),
        ("peak\nMiB", lambda r: number(r["peak_memory_bytes"] and r["peak_memory_bytes"] / 2**20)),
        ("decode\nGB/s", lambda r: number(r["decode_read_gb_s"])),
        (
            "of\npeak",
            lambda r: (
                "-"
                if r["decode_read_gb_s"] is None
                else f"{100 * r['read_bandwidth_fraction']:.0f}%"
            ),
        ),
    ]
    measured = [row for row in rows if "error" not in row]
    lines = aligned(
        [head for head, _ in columns], [[cell(row) for _, cell in columns] for row in measured]
    )
    printed, body, engine = lines[:2], iter(lines[2:]), ""
    for row in rows:
        if (this := describe(row, (name for name in SETTINGS if name not in SIZES))) != engine:
            engine = this
            printed += ["", *textwrap.wrap(engine, 120)]
        printed.append(
            f"{describe(row, SIZES)}: {row['error']}"[:120] if "error" in row else next(body)
        )
    return "\n".join(printed)


def compare(folder_a: str, folder_b: str) -> str:
    """Figures of B over those of A for the points that both measured, and the geometric means of
    the ratios.

    A setting that has one value in each folder, another in B than in A, is what is compared: points
    are matched by the others.
    """
    a, b = (measured_rows(Path(folder)) for folder in (folder_a, folder_b))
    alone = [
        n
        for n in SETTINGS
        if len({r[n] for r in a}) == len({r[n] for r in b}) == 1 and a[0][n] != b[0][n]
    ]
    matched = [name for name in SETTINGS if name not in alone]
    of_b = {tuple(row[name] for name in matched): row for row in b}
    pairs = [(row, of_b[key]) for row in a if (key := tuple(row[name] for name in matched)) in of_b]
    if not pairs:
        raise ReportError(f"{folder_a} and {folder_b} have no measured point in common")
    shown = list(dict.fromkeys([*SIZES, *varying(row for row, _ in pairs)]))
    heads = [SETTINGS[name] or name for name in shown]
    heads += [
        f"{title if side == 'A' else ''}\n{side}"
        for title in COMPARED.values()
        for side in ("A", "B", "B/A")
    ]
    lines, logs = [], {name: list[float]() for name in COMPARED}
    for row, other in pairs:
        line = [str(row[name]) for name in shown]
        for name in COMPARED:
            x, y = row[name], other[name]
            line += [number(x), number(y), f"{y / x:.3f}" if x and y else "-"]
            logs[name] += [math.log(y / x)] if x and y else []
        lines.append(line)
    means = [f"{math.exp(sum(each) / len(each)):.3f}" if each else "-" for each in logs.values()]
    lines.append(
        ["mean", *[""] * (len(shown) - 1), *(cell for mean in means for cell in ("", "", mean))]
    )
    said = [
        f"{side}: {folder}  {describe(rows[0], alone)}".rstrip()
        for side, folder, rows in (("A", folder_a, a), ("B", folder_b, b))
    ]
    left = f"{len(a) - len(pairs)} measured points are in A alone, {len(b) - len(pairs)} in B alone"
    return "\n".join([*said, "", *aligned(heads, lines), "", f"mean: geometric. {left}"])


def measured_rows(folder: Path) -> list[Row]:
    if not (folder / "results.jsonl").exists():
        raise ReportError(f"{folder / 'results.jsonl'}: no such file")
    return [row for row in read_rows(folder / "results.jsonl")[0].values() if "error" not in row]


# ---- plots ----


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """One PNG a plot; the paths."""
    paths = []
    for name, figure in plots(rows).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def plots(rows: list[Row]) -> "dict[str, Figure]":
    """The four plots by name; none without a measured row."""
    rows = [row for row in rows if "error" not in row]
    users = [
        row | {"user_tok_s": 1e3 / row["median_tpot_ms"]} for row in rows if row["median_tpot_ms"]
    ]
    users = [row | {"device_tok_s": row["output_throughput"] / row["num_devices"]} for row in users]
    wasted = [row | {"waste_percent": 100 * row["padding_waste"]} for row in rows]
    found = {
        "throughput": plot(rows, "num_prompts", "output_throughput"),
        "ttft": plot(rows, "random_input_len", "median_ttft_ms", log_y=True),
        "users": plot(users, "user_tok_s", "device_tok_s", dots="num_prompts"),
        "compile": plot(wasted, "waste_percent", "compile_s", dots="num_prompts", line="none"),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


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


def plot(
    rows: list[Row],
    x: str,
    y: str,
    *,
    dots: str | None = None,
    log_y: bool = False,
    line: str = "-",
) -> "Figure | None":
    """y against x: a series for each combination of the other settings that vary, but for `dots`,
    which labels them.
    """
    from matplotlib.figure import (
        Figure,  # by itself it draws without a display, and leaves no state behind
    )

    if not rows:
        return None
    vary = varying(rows)
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[dots or x]):
        series.setdefault(
            describe(row, (name for name in vary if name not in (x, dots))), []
        ).append(row)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, label in enumerate(sorted(series, key=natural)):
        points, marker = series[label], MARKERS[i % len(MARKERS)]
        axes.plot(
            [p[x] for p in points],
            [p[y] for p in points],
            linestyle=line,
            marker=marker,
            label=label,
        )
        for p in points if dots is not None else ():
            axes.annotate(
                str(p[dots or x]),
                (p[x], p[y]),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set(xlabel=AXIS_LABELS[x], ylabel=AXIS_LABELS[y])
    axes.grid(alpha=0.3)
    if log_y:
        log_ticks(axes)
    else:
        axes.set_ylim(bottom=margin(rows, y))
    if x in SETTINGS:
        power_ticks(axes, sorted({row[x] for row in rows}))
    else:
        axes.set_xlim(left=margin(rows, x))
    same = describe(rows[0], (name for name in SETTINGS if name not in (*vary, x, dots)))
    note = f"\nnumbers at the dots: {SETTINGS[dots]}" if dots is not None else ""
    axes.set_title(f"{same}, on {rows[0]['device']}{note}", fontsize=9, loc="left", wrap=True)
    if len(series) > 1:
        figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def margin(rows: list[Row], name: str) -> float:
    """Where an axis that shows 0 begins: a little below it if there is a dot at 0, which is to be
    seen whole.
    """
    values = [row[name] for row in rows]
    return 0.0 if min(values) > 0.05 * max(values) else -0.05 * (max(values) or 1.0)


def natural(label: str) -> list[tuple[bool, int, str]]:
    """A key that sorts "input 64" before "input 256"."""
    return [
        (word.isdigit(), int(word) if word.isdigit() else 0, word)
        for word in label.replace(",", " ").split()
    ]


def power_ticks(axes: "Axes", values: list[int]) -> None:
    """A base-2 axis with ticks at the values that were measured, and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_xticks([], minor=True)


def log_ticks(axes: "Axes") -> None:
    """A log axis with plain numbers, several to a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
