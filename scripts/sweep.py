"""Sweep batch x input x output x engine settings: a JSON line a point, a table, summary.csv and
plots.

    python scripts/sweep.py CHECKPOINT --batch 1 8 32 --input 128 512 --output 64 --out results/
    python scripts/sweep.py --random 60m --batch 1 8 32 --block-size 16 64 --out results/
    python scripts/sweep.py --config sweep.yaml        # flags by name, as YAML or JSON
    python scripts/sweep.py --compare results/ other/  # ratios of two sweeps, point by point

A point is one call: `batch` requests of `input` random tokens, all submitted at once, each to
generate `output` tokens. It runs once to compile and --repeat times measured; every figure is the
median of those runs. results.jsonl names them as `vllm bench serve` does; docs/sweep.md says what
each is. A point that runs out of memory or is refused is a row with an "error", and the sweep goes
on. The same command again goes on where a broken sweep ended. Points of equal engine settings share
an engine, whose steps compile when they are first met: so only the first point of a shape compiles
it. Flags given here win over those of --config's file.

Exit status 0: all points are measured; 2: some are errors; 1: nothing could run; 130: interrupted,
what is done kept.
"""

import argparse
import datetime
import hashlib
import importlib.util
import itertools
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import _common as common
import jax
import numpy as np
import sweep_report as report
import yaml

import jpaged
from jpaged.errors import CapacityError, CheckpointError, ConfigError, JpagedError
from jpaged.models.config import ModelConfig

Point = dict[str, Any]  # a value for each of report.SETTINGS
SIZES = {"output": [64], "input": [128], "batch": [1, 8, 32]}
ENGINE = {"dtype": ["bfloat16"], "attention": ["auto"], "block_size": [64], "decode_steps": [1]}
ENGINE |= {"max_num_seqs": [None], "max_num_batched_tokens": [None], "num_blocks": [None]}
AXES = ENGINE | {"temperature": [1.0]} | SIZES  # with their defaults; the last varies fastest
VLLM_NAMES = {"batch": "num_prompts", "input": "random_input_len", "output": "random_output_len"}


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser("sweep", __doc__)
    add = parser.add_argument
    add("--config", metavar="FILE", help="a YAML or JSON file of these flags: batch: [1, 8]")
    add("--out", metavar="FOLDER", default="sweep-results", help="default: sweep-results")
    add("--repeat", type=int, default=3, help="measured runs a point (default: 3)")
    add("--retry-failed", action="store_true", help="run the points again whose row is an error")
    add("--no-plots", action="store_true", help="draw no plots, which need matplotlib")
    add("--compare", nargs=2, metavar=("A", "B"), help="print the ratios B/A of two folders")
    common.add_model_flags(parser)
    add = parser.add_argument_group("axes: every combination is a point").add_argument
    kinds = {"dtype": str, "attention": str, "temperature": float}
    for name, default in AXES.items():
        options: dict[str, Any] = {"type": kinds.get(name, int), "nargs": "+", "default": default}
        shown = ", ".join("chosen by the engine" if v is None else str(v) for v in default)
        add(f"--{name.replace('_', '-')}", help=f"default: {shown}", **options)
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; they win over those of --config's file."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.compare is not None:
        return args
    if args.config is not None:
        model = (args.checkpoint, args.random)
        args = parser.parse_args(argv, namespace=parser.parse_args(file_flags(parser, args.config)))
        if any(model):  # whichever of the two it is, it stands for the file's
            args.checkpoint, args.random = model
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "repeat", *SIZES, "block_size", "decode_steps")
    if unknown := set(args.dtype) - common.ITEMSIZE.keys():
        parser.error(f"--dtype {', '.join(unknown)}: choose from {', '.join(common.ITEMSIZE)}")
    if not args.no_plots and importlib.util.find_spec("matplotlib") is None:  # not hours later
        parser.error("the plots need matplotlib: pip install -e '.[plot]', or pass --no-plots")
    return args


def file_flags(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """Return a YAML (or JSON) mapping as the command line that means the same, so that argparse
    checks both alike.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:
        parser.error(f"--config {path}: {e}")
    if not isinstance(settings, dict):
        parser.error(f"--config {path}: must be a mapping of flags by name")
    known = vars(parser.parse_args([])).keys() - {"config", "compare"}
    flags: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in known:
            names = ", ".join(sorted(known))
            parser.error(f"--config {path}: {key!r} is not a flag; the flags are {names}")
        if name == "checkpoint":  # after a list it would be taken for one of it
            flags.insert(0, str(value))
        elif value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags


# ---- points ----


def make_points(args: argparse.Namespace) -> list[Point]:
    """Return every combination of settings, those of one engine in a row; a value that is named
    twice counts once.
    """
    points = []
    for values in itertools.product(*(dict.fromkeys(getattr(args, name)) for name in AXES)):
        axes = {VLLM_NAMES.get(name, name): value for name, value in zip(AXES, values, strict=True)}
        named = axes | {"model_id": common.model_name(args)}
        points.append({name: named[name] for name in report.SETTINGS})
    return points


def point_id(point: Point) -> str:
    """Return the key of a row, by which a sweep that goes on finds it: a hash of all settings that
    could change its figures.
    """
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:12]


class Engines:
    """Holds one engine at a time, and keeps it as long as the next points ask for the same
    settings.
    """

    def __init__(self, args: argparse.Namespace, config: ModelConfig, points: list[Point]):
        self.args = args
        # One size for all engines, from all points: a resumed sweep then makes the engines that an
        # unbroken one makes. A point too long for the model is left out, since it would fail the
        # others along with itself; see `get`.
        lengths = [p["random_input_len"] + p["random_output_len"] for p in points]
        self.longest = config.max_position_embeddings
        fitting = [n for n in lengths if n <= self.longest]
        self.max_model_len = max(fitting, default=self.longest)
        self.max_num_seqs = max(p["num_prompts"] for p in points)
        self._llm: Any = None
        self._settings: dict[str, Any] = {}
        self._params: Any = None

    def get(self, point: Point) -> Any:
        """Return the LLM for a point. Raise ConfigError for a point longer than the model's
        context, which would cut it short.
        """
        length, longest = point["random_input_len"] + point["random_output_len"], self.longest
        if length > longest:
            raise ConfigError(f"{length} tokens: the model has max_position_embeddings={longest}")
        settings = {name: point[name] for name in ENGINE if point[name] is not None}
        if self._llm is not None and settings == self._settings:
            return self._llm
        self.close()
        if self._params is None or self._settings.get("dtype") != point["dtype"]:
            self._params = None  # before the others are made: both may not fit
            self._params = common.load_model(self.args, point["dtype"])
        self._settings = settings
        sizes = {"max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs}
        # Without the prefix cache: the runs repeat their prompts.
        self._llm = jpaged.LLM(self._params, enable_prefix_caching=False, **sizes | settings)
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._llm = None


# ---- measuring ----


def run_once(llm: Any, prompts: list[list[int]], point: Point) -> dict[str, Any]:
    """Make one call through `stream`. Return its seconds, when the tokens of each request came, and
    by how much the engine's counters grew.
    """
    temperature, output = point["temperature"], point["random_output_len"]
    params = jpaged.SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True)
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    before, began = counters(llm), time.perf_counter()
    for chunk in llm.stream(prompts, params):
        if count := len(chunk.token_ids_delta):
            arrivals[chunk.request_index].append((time.perf_counter() - began, count))
    seconds = time.perf_counter() - began
    after = counters(llm)
    generated = sum(count for request in arrivals for _, count in request)
    if generated != output * len(prompts):
        raise RuntimeError(f"{generated} tokens came, not {output} for each of {len(prompts)}")
    went = {name: after[name] - before[name] for name in after}
    return {"seconds": seconds, "arrivals": arrivals} | went


def counters(llm: Any) -> dict[str, Any]:
    """Return the engine's totals and `device_decode_steps`: one dispatch may hold several decode
    steps, and each of them reads the weights.
    """
    totals = {name: value for name, value in llm.stats().items() if isinstance(value, int | float)}
    decode = [bucket for bucket in llm.buckets() if bucket.phase == "decode"]
    return totals | {"device_decode_steps": sum(bucket.hits * bucket.steps for bucket in decode)}


def latencies(arrivals: list[list[tuple[float, int]]]) -> dict[str, list[float]]:
    """Return the latencies of requests in milliseconds, from the (second, tokens) pairs of each
    request; itl has one for each chunk, as a client sees them come.

    Tokens of one chunk come at once, so tpot spreads the time after the first chunk over the tokens
    after it.
    """
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for request in arrivals:
        (first, at_first), (last, _) = request[0], request[-1]
        later = sum(count for _, count in request) - at_first
        samples["ttft"].append(1e3 * first)
        samples["tpot"] += [1e3 * (last - first) / later] if later else []
        samples["itl"] += [1e3 * (b - a) for (a, _), (b, _) in itertools.pairwise(request)]
        samples["e2el"].append(1e3 * last)
    return samples


def figures(
    run: dict[str, Any], point: Point, weight_bytes: int, token_bytes: float
) -> dict[str, float | None]:
    """Return the figures of one run. weight_bytes: bytes of the weights that a decode step reads.
    token_bytes: bytes of the keys and values of one token.
    """
    batch, length, output = (point[VLLM_NAMES[name]] for name in ("batch", "input", "output"))
    row: dict[str, float | None] = {
        "duration": run["seconds"],
        "request_throughput": batch / run["seconds"],
        "output_throughput": batch * output / run["seconds"],
        "total_token_throughput": batch * (length + output) / run["seconds"],
    }
    for name, values in latencies(run["arrivals"]).items():
        known = values or [np.nan]
        row |= {f"mean_{name}_ms": np.mean(known), f"median_{name}_ms": np.median(known)}
        row |= {f"std_{name}_ms": np.std(known), f"p99_{name}_ms": np.percentile(known, 99)}
    computed = run["prefill_tokens"] + run["decode_tokens"]
    # The step that draws a request's token i + 1 reads the keys and values of its prompt and of i
    # tokens.
    kv_tokens = batch * sum(length + i for i in range(1, output))
    read = weight_bytes * run["device_decode_steps"] + token_bytes * kv_tokens
    prefill_s, decode_s = run["prefill_time_s"] or np.nan, run["decode_time_s"] or np.nan
    row |= {
        "prefill_tok_s": run["prefill_tokens"] / prefill_s,
        "decode_tok_s": run["decode_tokens"] / decode_s,
        "padding_waste": 1 - computed / run["padded_tokens"],
        "preemptions": run["preemptions"],
        "decode_read_gb_s": read / decode_s / 1e9,
    }
    return {k: None if v is None or np.isnan(v) else float(v) for k, v in row.items()}


def measure(llm: Any, point: Point, repeat: int) -> dict[str, Any]:
    """Return a point's figures: medians of the measured runs, and their memory; compiling is
    counted over all runs.
    """
    batch, config = point["num_prompts"], llm.model_config
    prompts = common.random_ids(batch, point["random_input_len"], config.vocab_size)
    weight_bytes = common.num_weights(config) * common.ITEMSIZE[point["dtype"]]
    token_bytes = llm.stats()["block_bytes"] / point["block_size"]
    runs = [run_once(llm, prompts, point)]
    is_own_peak = reset_peak_memory()
    runs += [run_once(llm, prompts, point) for _ in range(repeat)]
    rows = [figures(run, point, weight_bytes, token_bytes) for run in runs[1:]]
    row: dict[str, Any] = {"completed": batch, "failed": 0, "num_devices": 1}
    for kind in ("input", "output"):
        row[f"total_{kind}_tokens"] = batch * point[f"random_{kind}_len"]
    for name in rows[0]:
        values = [value for run in rows if (value := run[name]) is not None]
        row[name] = statistics.median(values) if values else None
    seconds = [run["seconds"] for run in runs]
    row |= {"first_s": seconds[0], "duration_spread": max(seconds[1:]) / min(seconds[1:])}
    row["compile_s"] = sum(run["compile_time_s"] for run in runs)
    row["num_compiles"] = sum(run["num_compiles"] for run in runs)
    return row | peak_memory(is_own_peak) | {"attention_used": llm.stats()["attention"]}


def reset_peak_memory() -> bool:
    """Have Linux forget the process's peak of resident memory. Return whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory(is_own: bool) -> dict[str, Any]:
    """Return the peak memory in bytes: the device's since the process began, or the process's
    resident peak if the device keeps none.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    peak, whose = stats.get("peak_bytes_in_use"), "device, since the start"
    if peak is None:
        status = Path("/proc/self/status")
        text = status.read_text() if status.exists() else ""
        if "VmHWM:" in text:
            peak = int(text.split("VmHWM:")[1].split()[0]) * 1024
        whose = f"process, {'this point' if is_own else 'since the start'}"
    return {"peak_memory_bytes": peak, "peak_memory_of": whose}


# ---- the sweep ----


def sweep(args: argparse.Namespace, results: report.Results, points: list[Point]) -> None:
    """Measure the points that have no row yet, and append their rows."""
    wanted = [p for p in points if results.is_wanted(point_id(p), retry_failed=args.retry_failed)]
    done = f"{len(points) - len(wanted)} of them done before"
    print(f"{len(points)} points, {done}; rows go to {results.path}", flush=True)
    if not wanted:
        return
    same: dict[str, Any] = {"backend": "jpaged", "repeat": args.repeat} | common.environment()
    same["read_bandwidth_gb_s"] = common.read_bandwidth()
    engines = Engines(args, common.model_config(args), points)
    shown = dict.fromkeys([*report.SIZES, *report.varying(points)])
    try:
        for number, point in enumerate(wanted, 1):
            date = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
            row: report.Row = {"point": point_id(point), "date": date} | point | same
            with results.attempt(row):
                row |= measured_or_error(engines, point, args.repeat)
            if row.get("decode_read_gb_s") is not None:
                share = row["decode_read_gb_s"] / row["read_bandwidth_gb_s"]
                row["read_bandwidth_fraction"] = share
            results.append(row)
            print(f"{number}/{len(wanted)} {report.one_line(row, shown)}", flush=True)
    finally:
        engines.close()


def measured_or_error(engines: Engines, point: Point, repeat: int) -> dict[str, Any]:
    """Return a point's figures, or the error because of which it has none: out of memory, or a
    refusal. Any other exception is a bug, and is raised.
    """
    try:
        return measure(engines.get(point), point, repeat)
    except CheckpointError:  # no other point would fare better
        raise
    except (JpagedError, MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, JpagedError):
            engines.close()  # whatever state it is in, its memory is wanted back
        is_memory = isinstance(e, MemoryError | CapacityError) or "RESOURCE_EXHAUSTED" in str(e)
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:500]}"
        counts = {"completed": 0, "failed": point["num_prompts"]}
        return {"error": reason, "out_of_memory": is_memory} | counts


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    status = 0
    try:
        if args.compare is not None:
            print(report.compare(*args.compare))
            return 0
        results, points = report.Results(Path(args.out)), make_points(args)
        try:
            sweep(args, results, points)
        except KeyboardInterrupt:
            print("sweep: interrupted; the same command goes on from here", file=sys.stderr)
            status = 130
        rows = [results.rows[i] for i in map(point_id, points) if i in results.rows]
        results.write_summary()
        print(report.table(rows))
        if not args.no_plots:
            print(*report.draw(list(results.rows.values()), results.folder), sep="\n")
    except (JpagedError, OSError, ImportError, report.ReportError) as e:
        print(f"sweep: {e}", file=sys.stderr)
        return 1
    return status or (2 if any("error" in row for row in rows) else 0)


def interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # what a batch system sends first
    sys.exit(main())
