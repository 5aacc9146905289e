"""Measure what sharing blocks saves, and what a preemption costs: three tables, on the embedded
model by default.

    python scripts/bench_sharing.py                     # some minutes on two CPU cores
    python scripts/bench_sharing.py CHECKPOINT --json sharing.json
    python scripts/bench_sharing.py --prompt 256 --output 16 --lengths 64 256 --repeat 3

1. n samples of one prompt, beside as many requests of distinct prompts of the same length, and of
the same one. 2. Beam search: blocks held at the peak, beside the copies of the whole cache that
dense beams would hold. 3. Preemption: one overcommitted workload, the preempted computed again or
swapped to the host, at several lengths; and
   from which length on swapping is the cheaper one, to choose swap_min_tokens by.

Every variant runs once to compile; then all of a table take turns, and each figure is the median
over --repeat rounds. Each run starts with no prefix cached. Tokens are random and generation
ignores EOS (a beam search heeds it).
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jpaged
from jpaged import SamplingParams
from jpaged.demo import MODEL_PATH
from jpaged.errors import JpagedError

COUNTERS = ("prefill_tokens", "prefill_time_s", "copied_blocks", "swap_out_bytes", "swap_in_bytes")
COUNTERS += ("preemptions_swapped", "preemptions_recomputed")
OVERCOMMIT = 3  # times the pool that the requests of the preemption table need
ROWS = 32  # and how many of them may run at once


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_sharing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "checkpoint",
        nargs="?",
        default=str(MODEL_PATH),
        help="a checkpoint folder; default: the embedded model",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's own")
    add("--prompt", type=int, default=500, help="prompt tokens of tables 1 and 2 (default: 500)")
    add("--output", type=int, default=32, help="tokens generated there (default: 32)")
    add("--n", type=int, default=8, help="samples a prompt (default: 8)")
    add("--beam-width", type=int, default=4, help="default: 4")
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=[64, 128, 256],
        help="tokens a request in table 3, half prompt",
    )
    add("--num-blocks", type=int, default=96, help="the pool of table 3 (default: 96)")
    add("--block-size", type=int, default=16, help="default: 16")
    add("--repeat", type=int, default=5, help="rounds; medians count (default: 5)")
    add("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    if (
        min(
            args.prompt,
            args.output,
            args.n,
            args.beam_width,
            args.block_size,
            args.repeat,
            *args.lengths,
        )
        < 1
    ):
        parser.error("every number must be at least 1")
    return args


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def measured(llm: Any, work: Callable[[], list[jpaged.RequestOutput]]) -> dict[str, float]:
    """Seconds, peak of blocks in use, increase of the counters, longest completion: `work` on an
    empty cache.
    """
    llm.reset_prefix_cache()
    llm.session.engine.stats.peak_blocks_in_use = 0  # else the highest of all runs so far
    before, began = llm.stats(), time.perf_counter()
    outs = work()
    run = {
        "seconds": time.perf_counter() - began,
        "longest": max(len(c.token_ids) for o in outs for c in o.outputs),
    }
    after = llm.stats()
    return (
        run
        | {name: after[name] - before[name] for name in COUNTERS}
        | {"peak_blocks": after["peak_blocks_in_use"]}
    )


def in_turn(
    variants: dict[str, Callable[[], dict[str, float]]], repeat: int
) -> dict[str, dict[str, float]]:
    """The medians of each variant's figures over rounds in which all take turns; the first round
    only compiles.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(repeat + 1):
        for name, run in variants.items():
            runs[name].append(run())
    return {
        name: {k: statistics.median(run[k] for run in each[1:]) for k in each[0]}
        for name, each in runs.items()
    }


def samples(llm: Any, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Table 1."""
    prompts = random_prompts(args.n, args.prompt, llm.model_config.vocab_size)

    def run(prompts: list[list[int]], n: int) -> dict[str, float]:
        params = SamplingParams(n=n, max_tokens=args.output, ignore_eos=True)
        return measured(llm, lambda: llm.generate(prompts, params, use_tqdm=False))

    variants = {
        f"one request, n={args.n}": lambda: run(prompts[:1], args.n),
        f"{args.n} identical requests": lambda: run(prompts[:1] * args.n, 1),
        f"{args.n} distinct requests": lambda: run(prompts, 1),
    }
    return in_turn(variants, args.repeat)


def beams(llm: Any, args: argparse.Namespace) -> dict[str, float]:
    """Table 2."""
    prompts = random_prompts(1, args.prompt, llm.model_config.vocab_size)
    how = {
        "beam_width": args.beam_width,
        "max_tokens": args.output,
        "early_stopping": "never",
        "use_tqdm": False,
    }
    run = in_turn(
        {"beams": lambda: measured(llm, lambda: llm.beam_search(prompts, **how))}, args.repeat
    )["beams"]
    dense = args.beam_width * math.ceil((args.prompt + run["longest"]) / args.block_size)
    return run | {"dense_blocks": dense, "seconds_a_token": run["seconds"] / run["longest"]}


def time_moves(runner: Any) -> dict[str, float]:
    """Have a runner add up the seconds in which it moves blocks out and in, in the dict that is
    returned.
    """
    spent = {"out": 0.0, "in": 0.0}

    def timed(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            jax.block_until_ready(runner._pool)  # a step that still runs is none of the move's time
            began = time.perf_counter()
            moved, _ = jax.block_until_ready((move(*args), runner._pool))
            spent[name] += time.perf_counter() - began
            return moved

        return run

    runner.read_blocks, runner.write_blocks = (
        timed("out", runner.read_blocks),
        timed("in", runner.write_blocks),
    )
    return spent


def preemption(params: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Table 3. The prefix cache is off: it would spare some of the preempted, by how much the pool
    is short.
    """
    common = {
        "num_blocks": args.num_blocks,
        "block_size": args.block_size,
        "max_model_len": max(args.lengths),
    }
    common |= {
        "max_num_seqs": ROWS,
        "seq_buckets": (ROWS,),
        "dtype": args.dtype,
        "enable_prefix_caching": False,
    }
    swap = jpaged.LLM(params, swap_space_gib=16.0, swap_min_tokens=0, **common)
    llms = {"recompute": jpaged.LLM(params, **common), "swap": swap}
    spent = {name: time_moves(llm.session.runner) for name, llm in llms.items()}

    def run(name: str, length: int) -> dict[str, float]:
        prompt, llm, moves = length // 2, llms[name], spent[name]
        count = max(2, OVERCOMMIT * args.num_blocks // math.ceil(length / args.block_size))
        prompts = random_prompts(count, prompt, llm.model_config.vocab_size)
        sampling = SamplingParams(temperature=0.0, max_tokens=length - prompt, ignore_eos=True)
        moves.update({"out": 0.0, "in": 0.0})
        found = measured(llm, lambda: llm.generate(prompts, sampling, use_tqdm=False))
        return found | {"requests": count, "out_seconds": moves["out"], "in_seconds": moves["in"]}

    rows, block_bytes = [], swap.stats()["block_bytes"]
    for length in args.lengths:
        row = in_turn(
            {name: lambda name=name, length=length: run(name, length) for name in llms}, args.repeat
        )
        rows.append(
            {"length": length}
            | row
            | costs(row["recompute"], row["swap"], block_bytes / args.block_size)
        )
    return {"rows": rows, "swap_from": break_even(rows)}


def costs(
    recompute: dict[str, float], swap: dict[str, float], token_bytes: float
) -> dict[str, float | None]:
    """Microseconds a preempted token, and how many tokens a preempted sequence had; None where
    nothing was preempted.

    Recompute: the time that prefill took longer than with swapping (of which only the moves in are
    taken off), by the tokens that it computed more. So the prefill step in which either comes back
    is in neither.
    """
    again = recompute["prefill_tokens"] - swap["prefill_tokens"]
    if again <= 0 or not swap["swap_in_bytes"]:
        return {"recompute_us": None, "swap_us": None, "mean_tokens": None}
    longer = recompute["prefill_time_s"] - (swap["prefill_time_s"] - swap["in_seconds"])
    moved = swap["swap_in_bytes"] / token_bytes
    return {
        "recompute_us": 1e6 * longer / again,
        "swap_us": 1e6 * (swap["out_seconds"] + swap["in_seconds"]) / moved,
        "mean_tokens": again / recompute["preemptions_recomputed"],
    }


def break_even(rows: list[dict[str, Any]]) -> float | None:
    """The least mean length of preempted sequences from which on swapping was the cheaper one in
    every row, if any.
    """
    least = None
    for row in sorted(
        (row for row in rows if row["mean_tokens"]), key=lambda row: -row["mean_tokens"]
    ):
        if row["swap_us"] >= row["recompute_us"]:
            break
        least = row["mean_tokens"]
    return least


def tables(record: dict[str, Any]) -> str:
    """The record for a person."""
    lines = [
        f"{'1. samples':<26}{'prefill tokens':>15}{'peak blocks':>13}{'copied':>8}{'seconds':>10}"
    ]
    for name, r in record["samples"].items():
        counts = f"{r['prefill_tokens']:15.0f}{r['peak_blocks']:13.0f}{r['copied_blocks']:8.0f}"
        lines.append(f"{name:<26}{counts}{r['seconds']:10.3f}")
    b = record["beams"]
    lines += [
        "",
        f"2. beam search, width {record['beam_width']}: {b['longest']:.0f} tokens after "
        f"{record['prompt']}",
    ]
    lines.append(
        f"{b['peak_blocks']:.0f} blocks at the peak, dense beams would hold {b['dense_blocks']}"
    )
    lines.append(
        f"{b['copied_blocks']:.0f} blocks copied, {1e3 * b['seconds_a_token']:.2f} ms a token"
    )
    head = f"{'3. preemption':<26}{'swapped':>9}{'recomputed':>12}{'MiB out':>9}{'MiB in':>9}{'seconds':>10}"
    lines += ["", f"{head}{'us a token':>12}"]
    for row in record["preemption"]["rows"]:
        for name in ("recompute", "swap"):
            r, us = row[name], row[f"{name}_us"]
            counts = f"{r['preemptions_swapped']:9.0f}{r['preemptions_recomputed']:12.0f}"
            counts += f"{r['swap_out_bytes'] / 2**20:9.1f}{r['swap_in_bytes'] / 2**20:9.1f}{r['seconds']:10.3f}"
            lines.append(
                f"{r['requests']:4.0f} of {row['length']:5d}, "
                f"{name:<12}{counts}{us or math.nan:12.2f}"
            )
    least = record["preemption"]["swap_from"]
    found = (
        "not the cheaper one"
        if least is None
        else f"cheaper from {least:.0f} tokens on: a value for swap_min_tokens"
    )
    return "\n".join([*lines, f"swapping is {found}"])


def bench(args: argparse.Namespace) -> dict[str, Any]:
    params = jpaged.load_params(args.checkpoint, dtype=args.dtype)
    rows, length = max(args.n, args.beam_width), args.prompt + args.output
    blocks = rows * math.ceil(length / args.block_size)
    engine = {
        "max_model_len": length,
        "max_num_seqs": rows,
        "num_blocks": blocks + rows,
        "block_size": args.block_size,
    }
    engine |= {
        "max_logprobs": max(20, 3 * args.beam_width),
        "max_num_batched_tokens": args.n * args.prompt,
    }
    llm = jpaged.LLM(params, dtype=args.dtype, **engine)
    record: dict[str, Any] = {
        "model": args.checkpoint,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    record |= {
        name: getattr(args, name)
        for name in ("prompt", "output", "n", "beam_width", "block_size", "repeat")
    }
    record |= {"samples": samples(llm, args), "beams": beams(llm, args)}
    llm.close()
    return record | {"preemption": preemption(params, args)}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = bench(args)
        print(tables(record))
        if args.json is not None:
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    except (JpagedError, OSError) as e:
        print(f"bench_sharing: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
