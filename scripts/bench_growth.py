"""How cost grows: with 10 to 10,000 queued requests, and with 1k to 32k tokens of context, on a
tiny random model.

    python scripts/bench_growth.py                                       # some minutes on two CPU
    cores python scripts/bench_growth.py --queue 10 1000 --context 1024 4096 --json growth.json
    python scripts/bench_growth.py --max-queue-ratio 1.5 --min-r2 0.98 --max-bend 1.3 --max-growth
    16

1. Queue: so many requests are added at once; as few of them run at a time as the smallest queue
holds, so that every
   run has full steps and only the queue differs. Time a token (adding included) should be flat.
2. Context: one prompt of that length, --rows samples of it. Time of a decode step should be linear.
Each prompt begins
   with the one before, and the prefix cache spares computing that again.
Resident memory should be flat while steps run: `growth` is from the first third of a run to its
last; `queue` is what adding the requests took.

The sizes of a part take turns --repeat times, and each one's best turn counts: what else the
machine does only adds.

Exit status 0; or 1 and a sentence on stderr, if something could not run or a limit that a flag sets
is broken.
"""

import argparse
import dataclasses
import gc
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench import MODELS, random_params
from soak import growth, rss_mib
from sweep_report import aligned

from jpaged.errors import JpagedError

PROMPT, OUTPUT, QUEUE_BLOCK = 16, 8, 8  # tokens of a queued request, and of its blocks
CHUNK, CONTEXT_BLOCK = 2048, 64  # tokens of a prefill step, and of a block, in the context's part
MEMORY_EVERY = 10  # steps between two looks at the resident memory


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--queue",
        type=int,
        nargs="+",
        default=[10, 100, 1000, 10_000],
        help="multiples of the first, by default 10",
    )
    add(
        "--context",
        type=int,
        nargs="+",
        default=[2**i for i in range(10, 16)],
        help="default: 1024 ... 32768",
    )
    add("--rows", type=int, default=4, help="sequences that decode over one context (default: 4)")
    add("--steps", type=int, default=64, help="decode steps timed for each context (default: 64)")
    add(
        "--tokens",
        type=int,
        default=4000,
        help="generate at least so many in a turn of a queue (default: 4000)",
    )
    add("--repeat", type=int, default=3, help="turns (default: 3)")
    add(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16",
    )
    add("--json", metavar="FILE", help="write the figures there too")
    add = parser.add_argument_group("limits").add_argument
    add(
        "--max-queue-ratio",
        type=float,
        help="time a token: the longest queue's over the shortest's",
    )
    add("--min-r2", type=float, help="R^2 of step time as a linear function of context")
    add(
        "--max-bend",
        type=float,
        help="step time at the longest context over a line through the others",
    )
    add("--max-growth", type=float, metavar="MIB", help="growth of resident memory in any run")
    args = parser.parse_args(argv)
    if min(args.rows, args.steps, args.tokens, args.repeat, *args.queue, *args.context) < 1:
        parser.error("every number must be at least 1")
    args.queue, args.context = sorted(set(args.queue)), sorted(set(args.context))
    if any(count % args.queue[0] for count in args.queue):
        parser.error(
            f"--queue: every size must be a multiple of {args.queue[0]}, or its last step "
            "would not be full"
        )
    return args


def make_llm(max_model_len: int, rows: int, dtype: str, **engine: Any) -> Any:
    """The tiny model, its context as long as is asked for, in an engine with one size of step."""
    import jpaged

    config = dataclasses.replace(MODELS["tiny"], max_position_embeddings=max_model_len)
    sizes = {
        "max_model_len": max_model_len,
        "max_num_seqs": rows,
        "seq_buckets": (rows,),
        "decode_steps": 1,
    }
    return jpaged.LLM(random_params(config, dtype), **sizes, **engine)


def run_out(llm: Any) -> dict[str, Any]:
    """Step until nothing is left. Seconds of each decode step and of each wave; what resident
    memory grew by.

    A wave is a prefill step and the decode steps up to the next one.
    """
    decode, waves, memory, steps = list[float](), list[float](), list[float](), 0
    before = llm.stats()
    while llm.has_unfinished():
        began = time.perf_counter()
        llm.step()  # what it returns is let go of at once
        seconds, now = time.perf_counter() - began, llm.stats()
        if now["prefill_steps"] > before["prefill_steps"]:
            waves.append(seconds)
        else:
            waves[-1] += seconds
        if now["decode_steps"] > before["decode_steps"]:
            decode.append(seconds)
        before, steps = now, steps + 1
        if steps % MEMORY_EVERY == 0:
            memory.append(rss_mib())
    return {"waves": waves, "decode": decode, "growth_mib": growth(memory)}


def figures(decode: list[float]) -> dict[str, float]:
    """Milliseconds of the decode steps."""
    ordered = sorted(decode)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return {
        "step_p50_ms": 1e3 * statistics.median(ordered),
        "step_p99_ms": 1e3 * p99,
        "step_max_ms": 1e3 * ordered[-1],
    }


def measure_queues(
    sizes: list[int], tokens: int, repeat: int, dtype: str
) -> list[dict[str, float]]:
    """Part 1: a row a size. us_per_token: of the median wave, which no pause of the machine
    lengthens; mean: of all.
    """
    from jpaged import SamplingParams

    rows = sizes[0]
    blocks = rows * math.ceil((PROMPT + OUTPUT) / QUEUE_BLOCK)
    engine = {"block_size": QUEUE_BLOCK, "num_blocks": 2 * blocks}
    engine |= {"max_num_batched_tokens": rows * PROMPT, "token_buckets": (rows * PROMPT,)}
    llm = make_llm(PROMPT + OUTPUT, rows, dtype, **engine)
    rng, params = random.Random(0), SamplingParams(max_tokens=OUTPUT, ignore_eos=True)

    def run(count: int) -> dict[str, Any]:
        prompts = [
            [rng.randrange(MODELS["tiny"].vocab_size) for _ in range(PROMPT)] for _ in range(count)
        ]
        # a request that ended is in a cycle: what a round leaves is not to be the next one's growth
        gc.collect()
        held, began = rss_mib(), time.perf_counter()
        for prompt in prompts:
            llm.add_request(prompt, params)
        added = time.perf_counter() - began
        queue_mib = rss_mib() - held
        return run_out(llm) | {"add": added, "queue_mib": queue_mib}

    for _ in range(3):  # compiles, and warms what the first runs after compiling still find cold
        run(rows)

    def turn(count: int) -> dict[str, float]:
        rounds = [run(count) for _ in range(math.ceil(tokens / (count * OUTPUT)))]
        add = statistics.median(r["add"] / count for r in rounds)
        waves = [seconds for r in rounds for seconds in r["waves"]]
        total = sum(waves) + sum(r["add"] for r in rounds)
        return {
            "queue": count,
            "us_per_token": 1e6 * (statistics.median(waves) / (rows * OUTPUT) + add / OUTPUT),
            "mean_us_per_token": 1e6 * total / (len(rounds) * count * OUTPUT),
            "add_us_per_request": 1e6 * add,
            **figures([step for r in rounds for step in r["decode"]]),
            "queue_mib": max(r["queue_mib"] for r in rounds),
            "growth_mib": max(r["growth_mib"] for r in rounds),
        }

    found = best([[turn(count) for count in sizes] for _ in range(repeat)])
    llm.close()
    return found


def measure_contexts(
    lengths: list[int], rows: int, steps: int, repeat: int, dtype: str
) -> list[dict[str, float]]:
    """Part 2: a row a length."""
    from jpaged import SamplingParams

    longest = lengths[-1] + steps + 1
    blocks = math.ceil(longest / CONTEXT_BLOCK) + rows * (math.ceil(steps / CONTEXT_BLOCK) + 2)
    chunk = min(CHUNK, lengths[-1])
    engine = {"block_size": CONTEXT_BLOCK, "num_blocks": blocks}
    engine |= {"max_num_batched_tokens": chunk, "token_buckets": (chunk,)}
    llm = make_llm(longest, rows, dtype, **engine)
    rng, params = random.Random(0), SamplingParams(n=rows, max_tokens=steps + 1, ignore_eos=True)
    prompt = [rng.randrange(MODELS["tiny"].vocab_size) for _ in range(lengths[-1])]
    llm.add_request(prompt[: lengths[0]], params)  # compiles
    run_out(llm)

    def turn(length: int) -> dict[str, float]:
        llm.add_request(prompt[:length], params)
        run = run_out(llm)
        times = figures(run["decode"])
        per_token = {"us_per_token": 1e3 * times["step_p50_ms"] / rows}
        return {"context": length, **per_token, **times, "growth_mib": run["growth_mib"]}

    found = best([[turn(length) for length in lengths] for _ in range(repeat)])
    llm.close()
    return found


def best(turns: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Each size's quickest turn, with the growth of the turn that grew the most."""
    sizes = list(zip(*turns, strict=True))
    quickest = [min(rows, key=lambda row: row["us_per_token"]) for rows in sizes]
    return [
        row | {"growth_mib": max(r["growth_mib"] for r in rows)}
        for row, rows in zip(quickest, sizes, strict=True)
    ]


def table(rows: list[dict[str, float]]) -> str:
    """A part's rows for a person, under a head."""
    cells = [
        [f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in row.values()] for row in rows
    ]
    return "\n".join(aligned([name.replace("_", "\n", 1) for name in rows[0]], cells))


def linear_fit(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Least squares: slope, intercept, R^2; NaN where the points do not say."""
    if len(set(x)) < 2:
        return math.nan, math.nan, math.nan
    slope, intercept = statistics.linear_regression(x, y)
    mean = statistics.fmean(y)
    total = sum((b - mean) ** 2 for b in y)
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return slope, intercept, 1 - rest / total if total else math.nan


def fits(queues: list[dict[str, float]], contexts: list[dict[str, float]]) -> dict[str, float]:
    """What the two curves say. context_bend: time at the longest context over what a line through
    the others foretells.

    R^2 alone forgives much: x^2 at x = 1, 4, 32 has 0.994.
    """
    per_decade, _, _ = linear_fit(
        [math.log10(r["queue"]) for r in queues], [r["us_per_token"] for r in queues]
    )
    x, y = [r["context"] / 1024 for r in contexts], [r["step_p50_ms"] for r in contexts]
    slope, intercept, r2 = linear_fit(x, y)
    before_last, at_0, _ = linear_fit(x[:-1], y[:-1])
    return {
        "queue_ratio": queues[-1]["us_per_token"] / queues[0]["us_per_token"],
        "queue_us_per_token_per_decade": per_decade,
        "context_ms_per_1024_tokens": slope,
        "context_ms_at_0": intercept,
        "context_r2": r2,
        "context_bend": y[-1] / (at_0 + before_last * x[-1]),
        "growth_mib": max(r["growth_mib"] for r in (*queues, *contexts)),
    }


def summary(found: dict[str, float]) -> str:
    """What `fits` found, in sentences."""
    ratio, line = f"{found['queue_ratio']:.2f}", f"{found['context_ms_at_0']:.2f} ms"
    line += f" + {found['context_ms_per_1024_tokens']:.3f} ms for each 1024 tokens of context"
    bend = f"the longest takes {found['context_bend']:.2f} times what the others foretell"
    return (
        f"time a token: {ratio} times as long at the longest queue as at the shortest, "
        f"{found['queue_us_per_token_per_decade']:+.2f} us for each tenfold\n"
        f"step time: {line}, R^2 {found['context_r2']:.4f}; {bend}\n"
        f"resident memory while steps run: {found['growth_mib']:+.1f} MiB at the most"
    )


def broken_limits(found: dict[str, float], args: argparse.Namespace) -> list[str]:
    """A sentence for each limit that does not hold; NaN never holds."""
    said = []
    if args.max_queue_ratio is not None and not found["queue_ratio"] <= args.max_queue_ratio:
        said.append(
            f"time a token grows {found['queue_ratio']:.2f} times with the queue, over "
            f"{args.max_queue_ratio:g}"
        )
    if args.min_r2 is not None and not found["context_r2"] >= args.min_r2:
        said.append(
            f"R^2 of step time in context is {found['context_r2']:.4f}, under {args.min_r2:g}"
        )
    if args.max_bend is not None and not found["context_bend"] <= args.max_bend:
        bend = f"{found['context_bend']:.2f} times what the shorter ones foretell"
        said.append(f"step time at the longest context is {bend}, over {args.max_bend:g}")
    if args.max_growth is not None and not found["growth_mib"] <= args.max_growth:
        said.append(
            f"resident memory grows by {found['growth_mib']:.1f} MiB, over {args.max_growth:g}"
        )
    return said


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        import jax

        record: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "dtype": args.dtype,
        }
        record["queues"] = measure_queues(args.queue, args.tokens, args.repeat, args.dtype)
        print(table(record["queues"]), flush=True)
        record["contexts"] = measure_contexts(
            args.context, args.rows, args.steps, args.repeat, args.dtype
        )
        print(f"\n{table(record['contexts'])}")
        found = fits(record["queues"], record["contexts"])
        record["fits"] = {
            name: None if math.isnan(value) else value for name, value in found.items()
        }
        if args.json is not None:
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    except (JpagedError, OSError) as e:
        print(f"bench_growth: {e}", file=sys.stderr)
        return 1
    print(f"\n{summary(found)}")
    broken = broken_limits(found, args)
    for sentence in broken:
        print(f"bench_growth: {sentence}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
