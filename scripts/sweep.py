"""Sweep batch x input x output x engine settings: a JSON line a point, a table, summary.csv and
plots.

    python scripts/sweep.py CHECKPOINT --batch 1 8 32 --input 128 512 --output 64 --out results/
    python scripts/sweep.py --random 60m --batch 1 8 32 --block-size 16 64 --dtype float32 bfloat16
    --out results/ python scripts/sweep.py --config sweep.yaml          # the flags by name, as YAML
    or JSON; flags given here win python scripts/sweep.py --compare results/ other/    # ratios of
    two sweeps, point by point

A point is one call: `batch` requests of `input` random tokens, all submitted at once, each to
generate `output` tokens. It runs once to compile and --repeat times measured; every figure is the
median of those runs. results.jsonl names them as `vllm bench serve` does; docs/sweep.md says what
each is. A point that runs out of memory or is refused is a row with an "error", and the sweep goes
on. The same command again goes on where a broken sweep ended. Points of equal engine settings share
an engine, whose steps compile when they are first met: so only the first point of a shape compiles
it.

Exit status 0: all points are measured; 2: some are errors; 1: nothing could run; 130: interrupted,
what is done kept.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import bench
import numpy as np
import sweep_report as report

from jpaged.errors import CapacityError, CheckpointError, ConfigError, JpagedError
from jpaged.models.config import ModelConfig

Point = dict[str, Any]  # a value for each of report.SETTINGS
AXES = (
    "dtype",
    "attention",
    "block_size",
    "decode_steps",
    "output",
    "input",
    "batch",
)  # the last varies fastest
FIXED = ("temperature", "max_num_batched_tokens", "num_blocks")  # settings with one value a sweep
ENGINE = (
    "dtype",
    "attention",
    "block_size",
    "decode_steps",
    "max_num_batched_tokens",
    "num_blocks",
)
VLLM_NAMES = {"batch": "num_prompts", "input": "random_input_len", "output": "random_output_len"}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FIRST_TOKEN_ID = 3  # below it are ids that tokenizers like to give to padding and ends


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", help="a checkpoint folder")
    add(
        "--random",
        metavar="SIZE",
        help=f"a random model instead: {', '.join(bench.MODELS)} or a config.json",
    )
    add(
        "--config",
        metavar="FILE",
        help="a YAML or JSON file of these flags by name, such as batch: [1, 8]",
    )
    add("--out", metavar="FOLDER", default="sweep-results", help="default: sweep-results")
    add(
        "--repeat",
        type=int,
        default=3,
        help="measured runs a point, after one that compiles (default: 3)",
    )
    add("--retry-failed", action="store_true", help="run points again whose row is an error")
    add("--no-plots", action="store_true", help="draw nothing (matplotlib is then not needed)")
    add(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="print the ratios B/A of two result folders, and run nothing",
    )
    add = parser.add_argument_group("axes: every combination is a point").add_argument
    add(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        help="requests submitted at once (default: 1 8 32)",
    )
    add("--input", type=int, nargs="+", default=[128], help="prompt tokens of each (default: 128)")
    add(
        "--output", type=int, nargs="+", default=[64], help="generated tokens of each (default: 64)"
    )
    add("--block-size", type=int, nargs="+", default=[64], help="tokens a KV block (default: 64)")
    add(
        "--decode-steps",
        type=int,
        nargs="+",
        default=[1],
        help="decode steps a dispatch (default: 1)",
    )
    add("--dtype", nargs="+", default=["bfloat16"], choices=ITEMSIZE, help="default: bfloat16")
    add(
        "--attention",
        nargs="+",
        default=["auto"],
        help="kernels, see docs/kernels.md (default: auto)",
    )
    add = parser.add_argument_group("the same for all points").add_argument
    add("--temperature", type=float, default=1.0, help="default: 1")
    add("--max-num-batched-tokens", type=int, help="prefill tokens a step")
    add("--num-blocks", type=int, help="blocks of the KV pool (default: what memory holds)")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags over those of --config's file."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.compare is not None:
        return args
    if args.config is not None:
        given = (args.checkpoint, args.random)
        args = parser.parse_args(argv, namespace=parser.parse_args(file_flags(parser, args.config)))
        if any(given):  # whichever of the two it is, it stands for the file's
            args.checkpoint, args.random = given
    if (args.checkpoint is None) == (args.random is None):
        parser.error("give a checkpoint folder or --random, one of the two")
    numbers = ("batch", "input", "output", "block_size", "decode_steps")
    if min(args.repeat, *(value for name in numbers for value in getattr(args, name))) < 1:
        parser.error("every number must be at least 1")
    return args


def file_flags(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """A YAML or JSON mapping as the command line that means the same, so that argparse checks both
    alike.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if Path(path).suffix == ".json":
            settings = json.loads(text)
        else:
            import yaml

            try:
                settings = yaml.safe_load(text)
            except yaml.YAMLError as e:
                raise ValueError(e) from e
    except (OSError, ValueError) as e:
        parser.error(f"--config {path}: {e}")
    if not isinstance(settings, dict):
        parser.error(f"--config {path}: must be a mapping of flags by name")
    known = vars(parser.parse_args([])).keys() - {"config", "compare"}
    flags: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in known:
            parser.error(
                f"--config {path}: {key!r} is no flag; there are {', '.join(sorted(known))}"
            )
        values = [str(v) for v in value] if isinstance(value, list) else [str(value)]
        if name == "checkpoint":
            flags = [
                *values,
                *flags,
            ]  # a positional argument after a list would be taken for one of it
        elif value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else values)]
    return flags


# ---- points ----


def make_points(args: argparse.Namespace) -> list[Point]:
    """Every combination, those of one engine in a row; a value given twice counts once."""
    model = str(args.checkpoint) if args.checkpoint is not None else f"random {args.random}"
    same = {"model_id": model} | {name: getattr(args, name) for name in FIXED}
    points = []
    for values in itertools.product(*(dict.fromkeys(getattr(args, name)) for name in AXES)):
        axes = {VLLM_NAMES.get(name, name): value for name, value in zip(AXES, values, strict=True)}
        points.append({name: (same | axes)[name] for name in report.SETTINGS})
    return points


def point_id(point: Point) -> str:
    """What a row is known by when a sweep goes on: a hash of all settings that could change its
    figures.
    """
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:12]


def make_prompts(point: Point, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    ids = range(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size)
    return [rng.choices(ids, k=point["random_input_len"]) for _ in range(point["num_prompts"])]


class Engines:
    """One engine at a time, kept for as long as the points that come ask for the same settings."""

    def __init__(self, args: argparse.Namespace, config: ModelConfig, points: list[Point]):
        self.args, self.config = args, config
        # One size for all engines, from all points: a resumed sweep then makes the engines that an
        # unbroken one makes. A point too long for the model is left out, since it would fail the
        # others along with itself; see `get`.
        lengths = [p["random_input_len"] + p["random_output_len"] for p in points]
        fitting = [n for n in lengths if n <= config.max_position_embeddings]
        self.max_model_len = max(fitting, default=config.max_position_embeddings)
        self.max_num_seqs = max(p["num_prompts"] for p in points)
        self._llm: Any = None
        self._settings: dict[str, Any] = {}
        self._params: Any = None
        self._dtype: str | None = None

    def get(self, point: Point) -> Any:
        """The LLM for a point; ConfigError for one longer than the model's context, which would cut
        it short.
        """
        import jpaged

        if (length := point["random_input_len"] + point["random_output_len"]) > self.max_model_len:
            raise ConfigError(
                f"{length} tokens: the model has "
                f"max_position_embeddings={self.config.max_position_embeddings}"
            )
        settings = {name: point[name] for name in ENGINE if point[name] is not None}
        if self._llm is not None and settings == self._settings:
            return self._llm
        self.close()
        if self._dtype != point["dtype"]:
            self._params = self._dtype = None  # before the others are made: both may not fit
            self._params = (
                bench.random_params(self.config, point["dtype"])
                if self.args.checkpoint is None
                else jpaged.load_params(self.args.checkpoint, dtype=point["dtype"])
            )
            self._dtype = point["dtype"]
        sizes = {"max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs}
        # Without the prefix cache: the runs repeat their prompts.
        self._llm = jpaged.LLM(self._params, enable_prefix_caching=False, **sizes, **settings)
        self._settings = settings
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._llm = None


# ---- measuring ----


def run_once(llm: Any, prompts: list[list[int]], point: Point) -> dict[str, Any]:
    """One call through `stream`: seconds, when the tokens of each request came, how far the
    engine's counters went.
    """
    from jpaged import SamplingParams

    params = SamplingParams(
        temperature=point["temperature"], max_tokens=point["random_output_len"], ignore_eos=True
    )
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    before, began = counters(llm), time.perf_counter()
    for chunk in llm.stream(prompts, params):
        if chunk.token_ids_delta:
            arrivals[chunk.request_index].append(
                (time.perf_counter() - began, len(chunk.token_ids_delta))
            )
    seconds = time.perf_counter() - began
    after = counters(llm)
    generated = sum(count for request in arrivals for _, count in request)
    if generated != point["random_output_len"] * len(prompts):
        raise RuntimeError(
            f"{generated} tokens came, not {point['random_output_len']} for each of {len(prompts)}"
        )
    return {"seconds": seconds, "arrivals": arrivals} | {
        name: after[name] - before[name] for name in after
    }


def counters(llm: Any) -> dict[str, Any]:
    """The engine's totals, and `device_decode_steps`: a dispatch may hold several, and each reads
    the weights.
    """
    totals = {name: value for name, value in llm.stats().items() if isinstance(value, int | float)}
    steps = totals["decode_steps"]
    if hasattr(llm, "buckets"):
        steps = sum(
            bucket.hits * bucket.steps for bucket in llm.buckets() if bucket.phase == "decode"
        )
    return totals | {"device_decode_steps": steps}


def latencies(arrivals: list[list[tuple[float, int]]]) -> dict[str, list[float]]:
    """Milliseconds by request, from (second, tokens) pairs of each; itl by chunk, as a client sees
    them come.

    Tokens of one chunk come at once, so tpot spreads the time after the first chunk over the tokens
    after it.
    """
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for request in arrivals:
        (first, at_first), (last, _) = request[0], request[-1]
        later = sum(count for _, count in request) - at_first
        found["ttft"].append(1e3 * first)
        found["tpot"] += [1e3 * (last - first) / later] if later else []
        found["itl"] += [1e3 * (b - a) for (a, _), (b, _) in itertools.pairwise(request)]
        found["e2el"].append(1e3 * last)
    return found


def figures(
    run: dict[str, Any], point: Point, weight_bytes: int, token_bytes: float
) -> dict[str, float | None]:
    """The figures of one run. weight_bytes: that a decode step reads; token_bytes: of a token's
    keys and values.
    """
    batch, length, output = (point[VLLM_NAMES[name]] for name in ("batch", "input", "output"))
    found: dict[str, float | None] = {
        "duration": run["seconds"],
        "request_throughput": batch / run["seconds"],
        "output_throughput": batch * output / run["seconds"],
        "total_token_throughput": batch * (length + output) / run["seconds"],
    }
    for name, values in latencies(run["arrivals"]).items():
        statistic = {
            "mean": np.mean,
            "median": np.median,
            "std": np.std,
            "p99": lambda v: np.percentile(v, 99),
        }
        found |= {
            f"{kind}_{name}_ms": float(f(values)) if values else None
            for kind, f in statistic.items()
        }
    computed = run["prefill_tokens"] + run["decode_tokens"]
    # The step that draws a request's token i + 1 reads the keys and values of its prompt and of i
    # tokens.
    kv_tokens = batch * sum(length + i for i in range(1, output))
    read = weight_bytes * run["device_decode_steps"] + token_bytes * kv_tokens
    decode_s = run["decode_time_s"]
    return found | {
        "prefill_tok_s": run["prefill_tokens"] / run["prefill_time_s"]
        if run["prefill_time_s"]
        else None,
        "decode_tok_s": run["decode_tokens"] / decode_s if decode_s else None,
        "padding_waste": 1 - computed / run["padded_tokens"],
        "preemptions": run["preemptions"],
        "decode_read_gb_s": read / decode_s / 1e9 if decode_s else None,
    }


def measure(llm: Any, point: Point, repeat: int) -> dict[str, Any]:
    """A point's figures: medians of the measured runs, and their memory; compiling is counted over
    all runs.
    """
    config = llm.model_config
    prompts = make_prompts(point, config.vocab_size)
    weight_bytes = bench.num_weights(config) * ITEMSIZE[point["dtype"]]
    token_bytes = llm.stats()["block_bytes"] / point["block_size"]
    runs = [run_once(llm, prompts, point)]
    is_own_peak = reset_peak_memory()
    runs += [run_once(llm, prompts, point) for _ in range(repeat)]
    each = [figures(run, point, weight_bytes, token_bytes) for run in runs[1:]]
    found: dict[str, Any] = {"completed": len(prompts), "failed": 0}
    found |= {
        f"total_{kind}_tokens": len(prompts) * point[f"random_{kind}_len"]
        for kind in ("input", "output")
    }
    for name in each[0]:
        values = [value for run in each if (value := run[name]) is not None]
        found[name] = statistics.median(values) if values else None
    seconds = [run["seconds"] for run in runs[1:]]
    found["duration_spread"] = max(seconds) / min(seconds)
    found |= {
        "compile_s": sum(run["compile_time_s"] for run in runs),
        "first_s": runs[0]["seconds"],
    }
    found |= {"num_compiles": sum(run["num_compiles"] for run in runs)}
    return (
        found
        | peak_memory(is_own_peak)
        | {"attention_used": llm.stats()["attention"], "num_devices": 1}
    )


def reset_peak_memory() -> bool:
    """Have Linux forget the process's peak of resident memory; whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory(is_own: bool) -> dict[str, Any]:
    """Bytes: the device's peak where it keeps one (since the process began), else the process's
    resident peak.
    """
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return {
            "peak_memory_bytes": stats["peak_bytes_in_use"],
            "peak_memory_of": "device, since the start",
        }
    try:
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return {"peak_memory_bytes": None, "peak_memory_of": "unknown"}
    return {
        "peak_memory_bytes": peak,
        "peak_memory_of": f"process, {'this point' if is_own else 'since the start'}",
    }


# ---- the sweep ----


def sweep(args: argparse.Namespace, results: report.Results, points: list[Point]) -> None:
    """Measure the points that have no row yet, and append their rows."""
    import jax

    wanted = [p for p in points if results.is_wanted(point_id(p), retry_failed=args.retry_failed)]
    done = len(points) - len(wanted)
    print(
        f"{len(points)} points, {done} of them done before; rows go to {results.path}", flush=True
    )
    if not wanted:
        return
    config = bench.model_config(args)
    common = {"backend": "jpaged", "repeat": args.repeat, "device": jax.devices()[0].device_kind}
    common |= {"jax": jax.__version__, "read_bandwidth_gb_s": bench.read_bandwidth()}
    engines, shown = (
        Engines(args, config, points),
        dict.fromkeys([*report.SIZES, *report.varying(points)]),
    )
    try:
        for number, point in enumerate(wanted, 1):
            row = (
                {"point": point_id(point), "date": f"{datetime.datetime.now():%Y%m%d-%H%M%S}"}
                | point
                | common
            )
            with results.running(row["point"]) as was_killed:
                if was_killed:
                    row |= {
                        "error": "the process was killed in this point, twice",
                        "out_of_memory": None,
                    }
                else:
                    row |= measured_or_error(engines, point, args.repeat)
                if row.get("decode_read_gb_s") is not None:
                    row["read_bandwidth_fraction"] = (
                        row["decode_read_gb_s"] / row["read_bandwidth_gb_s"]
                    )
                results.append(row)
            print(f"{number}/{len(wanted)} {report.one_line(row, shown)}", flush=True)
    finally:
        engines.close()


def measured_or_error(engines: Engines, point: Point, repeat: int) -> dict[str, Any]:
    """A point's figures, or why it has none. What is nobody's out-of-memory or refusal is a bug,
    and raises.
    """
    import jax

    try:
        return measure(engines.get(point), point, repeat)
    except CheckpointError:  # no other point would fare better
        raise
    except (JpagedError, MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, JpagedError):
            engines.close()  # whatever state it is in, its memory is wanted back
        is_memory = isinstance(e, MemoryError | CapacityError) or "RESOURCE_EXHAUSTED" in str(e)
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:500]}"
        return {
            "error": reason,
            "out_of_memory": is_memory,
            "completed": 0,
            "failed": point["num_prompts"],
        }


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
            print(
                "\n".join(
                    str(path) for path in report.draw(list(results.rows.values()), results.folder)
                )
            )
    except (JpagedError, OSError, ImportError, report.ReportError) as e:
        print(f"sweep: {e}", file=sys.stderr)
        return 1
    return status or (2 if any("error" in row for row in rows) else 0)


def interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # what a batch system sends first
    sys.exit(main())
