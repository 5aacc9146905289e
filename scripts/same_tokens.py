"""Count how many requests get different tokens when only their company changes, with and without
`deterministic`.

    python scripts/same_tokens.py [CHECKPOINT] [--prompts 32] [--tokens 64]

Seeded prompts at temperature 1 are drawn in one batch; then 8 at a time, one by one, in another
order, in chunks of 24 tokens, over a pool that preempts, and again with their prefixes in the
cache. The table counts the requests whose tokens differ from those of the first batch, and the
largest difference of a logprob while tokens agree; `score` is compared with the rollout's own
logprobs. A JSON line ends the output. Without a checkpoint it takes the embedded model.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import _common as common
import numpy as np

import jpaged
from jpaged import LLM, RequestOutput, SamplingParams
from jpaged.demo import MODEL_PATH

Prompts = list[list[int]]
Ask = Callable[[LLM, Prompts, list[SamplingParams]], list[RequestOutput]]
CHUNK = 24
BLOCK = 16


def together(llm: LLM, prompts: Prompts, sampling: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False)


def by_size(
    size: int, llm: LLM, prompts: Prompts, sampling: list[SamplingParams]
) -> list[RequestOutput]:
    """Run this many requests at a time."""
    starts = range(0, len(prompts), size)
    parts = (together(llm, prompts[i : i + size], sampling[i : i + size]) for i in starts)
    return [output for part in parts for output in part]


def shuffled(llm: LLM, prompts: Prompts, sampling: list[SamplingParams]) -> list[RequestOutput]:
    order = np.random.default_rng(1).permutation(len(prompts))
    outputs = together(llm, [prompts[i] for i in order], [sampling[i] for i in order])
    return [outputs[i] for i in np.argsort(order)]


def again(llm: LLM, prompts: Prompts, sampling: list[SamplingParams]) -> list[RequestOutput]:
    together(llm, prompts, sampling)
    return together(llm, prompts, sampling)


def ways(prompts: Prompts, tokens: int) -> dict[str, tuple[dict[str, Any], Ask]]:
    """Return for each way its settings, beside the common ones, and how requests are passed."""
    longest = -(-(max(map(len, prompts)) + tokens) // BLOCK)
    crowded = {"num_blocks": 1 + max(longest, len(prompts) * longest // 3)}
    return {
        "one batch": ({}, together),
        "8 at a time": ({}, functools.partial(by_size, 8)),
        "one by one": ({}, functools.partial(by_size, 1)),
        "shuffled": ({}, shuffled),
        f"chunks of {CHUNK}": ({"max_num_batched_tokens": CHUNK}, together),
        "preempted": (crowded, together),
        "prefix hits": ({}, again),
    }


def differences(outputs: list[RequestOutput], first: list[RequestOutput]) -> tuple[int, float]:
    """Return how many requests have different tokens, and the largest difference of a logprob
    before they differ.
    """
    count, largest = 0, 0.0
    for mine, theirs in zip(outputs, first, strict=True):
        a, b = mine.outputs[0], theirs.outputs[0]
        unequal = np.flatnonzero(np.asarray(a.token_ids) != np.asarray(b.token_ids))
        same = unequal[0] if len(unequal) else len(a.token_ids)
        count += len(unequal) > 0
        gaps = np.abs(a.token_logprobs[:same] - b.token_logprobs[:same])
        largest = max(largest, float(gaps.max(initial=0.0)))
    return count, largest


def rows(
    params: Any, deterministic: bool | None, prompts: Prompts, tokens: int
) -> Iterator[tuple[str, int, float]]:
    sampling = [
        SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True) for i in range(len(prompts))
    ]
    first: list[RequestOutput] = []
    for name, (settings, ask) in ways(prompts, tokens).items():
        llm = LLM(params, deterministic=deterministic, block_size=BLOCK, **settings)
        outputs = ask(llm, prompts, sampling)
        stats = llm.stats()
        assert name != "preempted" or stats["preemptions_recomputed"], "the pool held all"
        first = first or outputs
        yield name, *differences(outputs, first)
        if outputs is first:
            whole = [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)]
            scored = zip(prompts, outputs, llm.score(whole), strict=True)
            gaps = (s[len(p) - 1 :] - o.outputs[0].token_logprobs for p, o, s in scored)
            largest = [float(np.abs(gap).max()) for gap in gaps]
            yield "score", sum(gap > 0 for gap in largest), max(largest)
        llm.close()


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("same_tokens", __doc__)
    parser.add_argument("checkpoint", nargs="?", default=str(MODEL_PATH), help="a folder")
    parser.add_argument("--prompts", type=int, default=32, help="how many (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="drawn for each (default: 64)")
    parser.add_argument("--dtype", choices=common.ITEMSIZE, help="default: the checkpoint's")
    args = parser.parse_args(argv)
    common.check_positive(parser, args, "prompts", "tokens")
    params = jpaged.load_params(args.checkpoint, dtype=args.dtype)
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 100, args.prompts)
    prompts = [rng.integers(3, params.config.vocab_size, n).tolist() for n in lengths]
    results: dict[str, dict[str, tuple[int, float]]] = {}
    for deterministic in (None, True, False):
        for name, count, gap in rows(params, deterministic, prompts, args.tokens):
            results.setdefault(name, {})[str(deterministic)] = (count, gap)
    heads = [f"deterministic={kind}" for kind in results["score"]]
    cells = [
        [name, *(f"{count} ({gap:.2g})" for count, gap in by_kind.values())]
        for name, by_kind in results.items()
    ]
    print("\n".join(common.aligned([f"of {args.prompts}", *heads], cells, left=1)))
    print(common.json_line(common.environment() | results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
