"""Measure prefix hits and the time to the first token on conversations of several turns, with pools
that hold a share of the working set, by what is beneath the pool.

    python scripts/bench_prefix.py --random 60m --sessions 12 --turns 4 --shares 0.05 0.1 0.3

All conversations begin with one system prompt. In each round every conversation takes its next
turn, in random order, one request at a time: the text so far, with the model's answers, and a
message. The working set is what all conversations hold at the end. Tiers: "none" finds nothing
again; "device" finds what the pool still has; "host" keeps in host memory what the pool gives up;
"disk" keeps it in files (docs/prefix_store.md), with no host memory; "restart" is a new engine's
start over the files that "disk" has left, so its first turns hit too. Counts come first, since they
are the same on any machine: the share of prompt tokens that were not computed, tokens computed,
blocks loaded from a tier and MiB that files gave. Times in milliseconds: the median and the 90th
percentile to the first token; they are of this machine and its load. A JSON line ends the output.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _common as common

import jpaged
from jpaged.flags import add_engine_flags, engine_settings

TIERS = ("none", "device", "host", "disk", "restart")
COUNTED = ("prompt_tokens", "cached_tokens", "prefill_tokens", "loaded_blocks", "store_read_bytes")


def converse(llm: jpaged.LLM, args: argparse.Namespace, seed: int = 0) -> dict[str, float]:
    """Run all conversations; return what was counted and timed."""
    rng, vocab = random.Random(seed), llm.model_config.vocab_size

    def text(length: int) -> list[int]:
        return rng.choices(range(3, vocab), k=length)

    system = text(args.system)
    sessions = [system + text(args.first) for _ in range(args.sessions)]
    params = jpaged.SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.0)
    firsts, before = list[float](), llm.stats()
    for turn in range(args.turns):
        for at in rng.sample(range(args.sessions), args.sessions):
            if turn:
                sessions[at] += text(args.message)
            began, answer = time.perf_counter(), list[int]()
            for count, chunk in enumerate(llm.stream([sessions[at]], params)):
                if count == 0:
                    firsts.append(time.perf_counter() - began)
                answer += chunk.token_ids_delta
            sessions[at] += answer
    after = llm.stats()
    moved = {name: after.get(name, 0) - before.get(name, 0) for name in COUNTED}
    return {
        "hit_rate": moved["cached_tokens"] / moved["prompt_tokens"],
        "computed": moved["prefill_tokens"],
        "loaded_blocks": moved["loaded_blocks"],
        "file_mib": moved["store_read_bytes"] / 2**20,
        "first_ms": statistics.median(firsts) * 1e3,
        "first_p90_ms": statistics.quantiles(firsts, n=10)[-1] * 1e3,
    }


def settings_of(tier: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings for a tier."""
    match tier:
        case "none":
            return {"enable_prefix_caching": False}
        case "device":
            return {}
        case "host":
            return {"swap_space_gib": args.store_gib}
        case _:
            return {"prefix_store": str(folder), "prefix_store_gib": args.store_gib}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_prefix", __doc__)
    common.add_model_flags(parser)
    add_engine_flags(
        parser, "dtype", "attention", "block_size", "kv_cache_dtype", "swap_min_tokens"
    )
    add = parser.add_argument
    add("--sessions", type=int, default=12, help="conversations")
    add("--turns", type=int, default=4, help="turns of each")
    add("--system", type=int, default=256, help="tokens that all conversations begin with")
    add("--first", type=int, default=512, help="tokens of a conversation's first message")
    add("--message", type=int, default=32, help="tokens of a later message")
    add("--tokens", type=int, default=16, help="tokens of an answer")
    add("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.3], help="of the working set")
    add("--tiers", nargs="+", choices=TIERS, default=list(TIERS), help="what is beneath the pool")
    add("--store-gib", type=float, default=4.0, help="size of host memory, and of files, GiB")
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    names = ("sessions", "turns", "system", "first", "message", "tokens")
    common.check_positive(parser, args, *names)
    if "restart" in args.tiers and "disk" not in args.tiers:
        parser.error("--tiers restart: reads the files that disk has left; name both")
    settings = engine_settings(args)
    params = common.load_model(args, settings.get("dtype"))
    block_size = settings.get("block_size") or 64
    longest = args.system + args.first + args.turns * (args.message + args.tokens)
    row = -(-longest // block_size) + 1
    shared = args.system // block_size
    whole = shared + args.sessions * (row - shared)
    sizes: dict[str, Any] = {"max_model_len": row * block_size, "max_num_seqs": 1}
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="jpaged-bench-") as root:
        for share in args.shares:
            pool = max(int(whole * share), row)
            folder = Path(root) / f"{share:g}"
            for tier in [tier for tier in TIERS if tier in args.tiers]:
                chosen = settings_of(tier, folder, args)
                chosen |= sizes | settings | {"num_blocks": pool}
                llm = jpaged.LLM(params, **chosen)
                # Compiles, and measures what a prompt costs: of other texts than the run's.
                warm = argparse.Namespace(**vars(args) | {"sessions": 1, "turns": 2})
                converse(llm, warm, seed=1)
                results[f"{share:g} {tier}"] = converse(llm, args)
                llm.close()
    heads = list(next(iter(results.values())))
    rows = [
        [*name.split(), *(f"{value:.2f}" for value in figures.values())]
        for name, figures in results.items()
    ]
    print("\n".join(common.aligned(["pool", "tier", *heads], rows, left=2)))
    sizes |= {name: getattr(args, name) for name in names} | {"working_set_blocks": whole}
    print(common.json_line({"model": common.model_name(args), **sizes, **settings, **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
