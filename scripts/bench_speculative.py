"""What drafts from a row's own text, or a draft model's, gain and cost: tokens a second with and
without them.

    python scripts/bench_speculative.py [CHECKPOINT] [--tokens-ahead 4 7]
        [--draft FOLDER | --eagle FOLDER | --mtp]

There are two texts: `copies` asks for what the prompt has just shown (code, with the embedded
model's tendency to repeat itself), and `new` is the beginning of something else. Engines take turns
in random order, since the last one leaves its data in the processor's caches. The median of
--repeat turns counts, and for `of_plain` the median of the ratios within a turn. `equal`: rows with
the same tokens as without drafts, which are all rows if serving is deterministic. `always`: every
draft is tried, whatever was measured.
"""

import random
import time
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import _common as common
import jax

import jpaged
from jpaged.demo import MODEL_PATH

NAMES = ("name", "value", "parent", "children", "depth", "index", "label", "color")
BODY = "".join(f"        self.{name} = {name}\n" for name in NAMES)
HEAD = f"    def __init__(self, {', '.join(NAMES)}):\n"
NEW = (
    "import os\n\nclass Queue:\n    def __init__(self, maxsize=0):\n",
    "def test_",
    "import unittest\n\nclass TestCase(",
    "def parse(self, text):\n    ",
)


def texts(kind: str, rows: int) -> list[str]:
    if kind == "new":
        return [NEW[i % len(NEW)] for i in range(rows)]
    first = "        self.name = name\n"
    return [f"class Node{i}:\n{HEAD}{BODY}\n\nclass Leaf{i}:\n{HEAD}{first}" for i in range(rows)]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = common.make_parser("bench_speculative.py", __doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=MODEL_PATH)
    parser.add_argument("--dtype", default="bfloat16")
    drafts = parser.add_mutually_exclusive_group()  # default: guess from a row's own text
    drafts.add_argument("--draft", help="folder of a draft model")
    drafts.add_argument("--eagle", help="folder of an EAGLE-3 head, in place of a draft model")
    drafts.add_argument(
        "--mtp", action="store_true", help="the MTP head that the checkpoint has with it"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens-ahead", type=int, nargs="+", default=[4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--always", action="store_true")
    args = parser.parse_args(argv)
    params = jpaged.load_params(args.checkpoint, dtype=args.dtype)
    records, order = [], random.Random(0)
    for rows in args.rows:
        engines: dict[int, jpaged.LLM] = {}
        for ahead in (0, *args.tokens_ahead):
            asked: dict[str, Any] = {"num_tokens": ahead, "adaptive": not args.always}
            for method, model in (("draft", args.draft), ("eagle", args.eagle)):
                if model:
                    asked |= {"method": method, "model": model}
            if args.mtp:
                asked |= {"method": "mtp"}
            engines[ahead] = jpaged.LLM(
                params,
                max_num_seqs=max(32, 2 * rows),
                max_model_len=1024,
                enable_prefix_caching=False,
                speculative=asked if ahead else None,
            )
        for kind in ("copies", "new"):
            for temperature in args.temperatures:
                settings: Any = {"temperature": temperature, "max_tokens": args.tokens}
                sampling = [
                    jpaged.SamplingParams(seed=i, ignore_eos=True, **settings) for i in range(rows)
                ]
                took, results = {ahead: [] for ahead in engines}, {}
                before = {ahead: llm.stats() for ahead, llm in engines.items()}
                for _ in range(1 + args.repeat):
                    for ahead, llm in order.sample(list(engines.items()), len(engines)):
                        began = time.perf_counter()
                        outs = llm.generate(texts(kind, rows), sampling, use_tqdm=False)
                        took[ahead].append(time.perf_counter() - began)
                        results[ahead] = [out.outputs[0].token_ids for out in outs]
                for ahead in args.tokens_ahead:
                    stats = engines[ahead].stats()
                    tried, right = (
                        stats[name] - before[ahead].get(name, 0)
                        for name in ("drafted_tokens", "accepted_tokens")
                    )
                    record = {
                        "text": kind,
                        "temperature": temperature,
                        "rows": rows,
                        "ahead": ahead,
                        "tok_s": rows * args.tokens / median(took[ahead]),
                        "of_plain": median(map(truediv, took[0], took[ahead])),
                        "drafted": tried,
                        "accepted": right / tried if tried else 0.0,
                        "equal": sum(map(list.__eq__, results[0], results[ahead])) / rows,
                    }
                    records.append(record)
                    print(common.json_line(record), flush=True)
        for llm in engines.values():
            llm.close()
    jax.clear_caches()
    return records


if __name__ == "__main__":
    main()
