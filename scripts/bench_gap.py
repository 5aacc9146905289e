"""Measure the time between tokens of running rows while a long prompt arrives, with and without
mixed steps.

    python scripts/bench_gap.py --random 60m --max-num-batched-tokens 512

Some rows decode; then the prompt arrives, is computed in chunks and draws its first token. The
script prints for both ways, in turn: the median gap between two tokens of a running row before the
prompt; the longest and the mean gap until the prompt's first token; the seconds until that token;
and the tokens a second of all rows over the whole time. It takes medians of the rounds, and prints
one JSON line at the end.
"""

import argparse
import functools
import statistics
import sys
import time
from typing import Any

import _common as common

import jpaged
from jpaged.flags import add_engine_flags, engine_settings


def one_round(llm: jpaged.LLM, args: argparse.Namespace) -> dict[str, float]:
    """Run the rows and the prompt once, from their start until all have ended."""
    endless = functools.partial(jpaged.SamplingParams, ignore_eos=True, temperature=0.0)
    vocab = llm.model_config.vocab_size
    long, *short = common.random_ids(1 + args.rows, args.prompt, vocab)
    ids = [llm.add_request(p[: args.context], endless(max_tokens=args.tokens)) for p in short]
    watched = llm.session.engine.requests[ids[0]].sequences[0]
    gaps, last, before = [], time.perf_counter(), 0
    arrived = answered = prompt = None
    began, tokens = last, 0
    while llm.has_unfinished():
        ended = llm.step()
        now = time.perf_counter()
        tokens += sum(len(output.outputs[0].token_ids) for output in ended)
        if watched.num_generated > before:
            before = watched.num_generated
            gaps.append((now, now - last))
            last = now
        if arrived is None and before >= args.tokens // 4:
            arrived = now
            (late,) = [llm.add_request(long, endless(max_tokens=2))]
            prompt = llm.session.engine.requests[late].sequences[0]
        if prompt is not None and answered is None and prompt.num_generated:
            answered = now
    assert arrived is not None and answered is not None
    calm = [gap for at, gap in gaps[2:] if at <= arrived]
    crowded = [gap for at, gap in gaps if arrived < at and at - gap < answered]
    return {
        "gap_ms": statistics.median(calm) * 1e3,
        "longest_ms": max(crowded) * 1e3,
        "mean_ms": statistics.mean(crowded) * 1e3,
        "first_token_s": answered - arrived,
        "output_tok_s": tokens / (time.perf_counter() - began),
    }


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_gap", __doc__)
    common.add_model_flags(parser)
    add_engine_flags(parser, "dtype", "max_num_batched_tokens", "attention", "block_size")
    add = parser.add_argument
    add("--rows", type=int, default=8, help="rows that decode")
    add("--context", type=int, default=128, help="tokens of their prompts")
    add("--tokens", type=int, default=64, help="tokens that they draw")
    add("--prompt", type=int, default=4096, help="tokens of the prompt that arrives")
    add("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "rows", "context", "tokens", "prompt", "rounds")
    params = common.load_model(args, engine_settings(args).get("dtype"))
    settings = engine_settings(args)
    longest = args.prompt + args.context + args.tokens
    sizes: dict[str, Any] = {"max_model_len": longest, "enable_prefix_caching": False}
    calls = {}
    for mixed in (False, True):
        llm = jpaged.LLM(params, mixed=mixed, max_num_seqs=args.rows + 1, **sizes | settings)
        calls["mixed" if mixed else "apart"] = functools.partial(one_round, llm, args)
    results = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in common.in_turn(calls, args.rounds).items()
    }
    rows = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in results.items()]
    print("\n".join(common.aligned(["steps", *results["apart"]], rows, left=1)))
    print(common.json_line({"model": common.model_name(args), **sizes, **settings, **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
