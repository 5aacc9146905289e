"""What more of a score costs: plain `score` beside the same with top_k, candidates and entropy, in
turn.

    python scripts/bench_score.py --random 60m --dtype bfloat16 --top-k 256

Seconds of each call, the median of the rounds, and its median ratio to the plain call of the same
round; then one JSON line. `from the middle` scores the second half of each sequence alone, whose
first half is computed all the same.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import _common as common
import numpy as np

import jpaged
from jpaged.flags import add_engine_flags, engine_settings


def calls_of(
    llm: jpaged.LLM, sequences: list[list[int]], top_k: int
) -> dict[str, Callable[[], float]]:
    """Return what is timed, by name."""
    rng = np.random.default_rng(0)
    vocab = llm.model_config.vocab_size
    at = [rng.integers(0, vocab, (len(tokens) - 1, top_k)) for tokens in sequences]
    middle = [len(tokens) // 2 for tokens in sequences]
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        f"top_k {top_k}": {"top_k": top_k},
        f"{top_k} candidates": {"at": at},
        "entropy": {"entropy": True},
        "all of these": {"top_k": top_k, "at": at, "entropy": True},
        "from the middle": {"start": middle},
        f"top_k {top_k} from the middle": {"start": middle, "top_k": top_k},
    }
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(llm.score, sequences, **asked) for name, asked in options.items()
    }
    calls["hidden"] = functools.partial(llm.hidden, sequences, max_len=len(sequences[0]))
    return {name: functools.partial(common.seconds_of, call) for name, call in calls.items()}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_score", __doc__)
    common.add_model_flags(parser)
    add_engine_flags(parser, "dtype", "max_num_batched_tokens", "attention", "block_size")
    add = parser.add_argument
    add("--sequences", type=int, default=8)
    add("--length", type=int, default=256, help="tokens of a sequence")
    add("--top-k", type=int, default=256)
    add("--rounds", type=int, default=5)
    args: argparse.Namespace = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "sequences", "length", "top_k", "rounds")
    settings = engine_settings(args)
    params = common.load_model(args, settings.get("dtype"))
    sizes: dict[str, Any] = {"max_model_len": args.length, "enable_prefix_caching": False}
    sizes["max_num_seqs"] = args.sequences
    llm = jpaged.LLM(params, **sizes | settings)
    sequences = common.random_ids(args.sequences, args.length, llm.model_config.vocab_size)
    seconds = common.in_turn(calls_of(llm, sequences, args.top_k), args.rounds)
    medians = {}
    for name, times in seconds.items():
        pairs = zip(times, seconds["plain"], strict=True)
        ratio = statistics.median(time / plain for time, plain in pairs)
        medians[name] = {"seconds": statistics.median(times), "ratio": ratio}
    rows = [[name, f"{x['seconds']:.3f}", f"{x['ratio']:.2f}"] for name, x in medians.items()]
    print("\n".join(common.aligned(["score", "seconds", "ratio"], rows, left=1)))
    print(common.json_line({"model": common.model_name(args), **vars(args), "calls": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
