"""Measure prefix hits and the time to the first token with a pool that holds a tenth of the working
set: without a store of evicted blocks, with a store, and with a pool that holds everything.

    python scripts/bench_store.py --random 60m --documents 20 --length 1024

Requests come one at a time. Each asks a question about one of the documents; all documents are
asked equally often, in random order. Every request runs to --tokens tokens. Columns: the share of
prompt tokens that were not computed; the median and the 90th percentile of the time to the first
token in milliseconds; the milliseconds between later tokens; the MiB that were moved to the host
and back. The engines take turns, and medians of the rounds count. A JSON line ends the output.
"""

import argparse
import functools
import random
import statistics
import sys
import time
from typing import Any

import _common as common

import jpaged
from jpaged.flags import add_engine_flags, engine_settings

QUESTION = 16  # tokens


def one_round(
    llm: jpaged.LLM, documents: list[list[int]], args: argparse.Namespace, seed: int = 0
) -> dict[str, float]:
    """Ask each document --asks times, from empty caches."""
    llm.reset_prefix_cache()
    rng, before = random.Random(seed), llm.stats()
    asked = [document for document in documents for _ in range(args.asks)]
    rng.shuffle(asked)
    params = jpaged.SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.0)
    firsts, gaps = list[float](), list[float]()
    vocab = llm.model_config.vocab_size
    for document in asked:
        question = rng.choices(range(3, vocab), k=QUESTION)
        began = last = time.perf_counter()
        for count, _ in enumerate(llm.stream([document + question], params)):
            now = time.perf_counter()
            (firsts if count == 0 else gaps).append(now - last)
            last = now
        assert last > began
    after = llm.stats()
    moved = {name: after[name] - before[name] for name in ("swap_out_bytes", "swap_in_bytes")}
    tokens = after["prompt_tokens"] - before["prompt_tokens"]
    return {
        "hit_rate": (after["cached_tokens"] - before["cached_tokens"]) / tokens,
        "first_ms": statistics.median(firsts) * 1e3,
        "first_p90_ms": statistics.quantiles(firsts, n=10)[-1] * 1e3,
        "gap_ms": statistics.median(gaps) * 1e3,
        "out_mib": moved["swap_out_bytes"] / 2**20,
        "in_mib": moved["swap_in_bytes"] / 2**20,
    }


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_store", __doc__)
    common.add_model_flags(parser)
    add_engine_flags(
        parser, "dtype", "attention", "block_size", "kv_cache_dtype", "swap_min_tokens"
    )
    add = parser.add_argument
    add("--documents", type=int, default=20)
    add("--length", type=int, default=1024, help="tokens of a document")
    add("--asks", type=int, default=4, help="questions of each document")
    add("--tokens", type=int, default=8, help="tokens of an answer; 2 at least")
    add("--share", type=float, default=0.1, help="share of the documents that the pool holds")
    add("--store-gib", type=float, default=4.0, help="size of the store, GiB")
    add("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "documents", "length", "asks", "rounds")
    if args.tokens < 2:
        parser.error(f"--tokens {args.tokens}: must be at least 2")
    settings = engine_settings(args)
    params = common.load_model(args, settings.get("dtype"))
    documents = common.random_ids(args.documents, args.length, params.config.vocab_size)
    longest = args.length + QUESTION + args.tokens
    block_size = settings.get("block_size") or 64
    row = -(-longest // block_size)
    pool = max(int(args.documents * args.length * args.share) // block_size, row + 1)
    whole = args.documents * row + row * args.documents * args.asks
    sizes: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": 1}
    engines: dict[str, dict[str, Any]] = {
        "no store": {"num_blocks": pool},
        "store": {"num_blocks": pool, "swap_space_gib": args.store_gib},
        "whole pool": {"num_blocks": whole},
    }
    calls = {}
    for name, figures in engines.items():
        llm = jpaged.LLM(params, **sizes | settings | figures)
        calls[name] = functools.partial(one_round, llm, documents, args)
    results = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in common.in_turn(calls, args.rounds).items()
    }
    rows = [
        [name, *(f"{value:.2f}" for value in figures.values())] for name, figures in results.items()
    ]
    print("\n".join(common.aligned(["engine", *results["store"]], rows, left=1)))
    sizes |= {"documents": args.documents, "length": args.length, "pool_blocks": pool}
    print(common.json_line({"model": common.model_name(args), **sizes, **settings, **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
