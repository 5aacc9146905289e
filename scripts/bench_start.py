"""Time from process start to a first answer: cold, with a warm compilation cache, and with warmup()
of every shape.

    python scripts/bench_start.py CHECKPOINT [--repeat 3] [--tokens 16]

Each start is a process of its own, with the seconds of its parts; the cache is a folder of this
run's own. Python's bytecode is kept from the first start on, also where the environment turns that
off. The engine takes 32 rows and 1,024 tokens a step: warmup() compiles the shapes of that.
A table of medians, then one JSON line.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _common as common

CHILD = """
import sys, time
began = float(sys.argv[1])
import jpaged
imported = time.time()
sizes = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
llm = jpaged.LLM(sys.argv[2], dtype="bfloat16", compilation_cache_dir=sys.argv[3], **sizes)
loaded = time.time()
warm = llm.warmup(use_tqdm=False) if sys.argv[4] == "warmup" else 0.0
asked = time.time()
tokens = int(sys.argv[5])
params = jpaged.SamplingParams(max_tokens=tokens, ignore_eos=True)
out = llm.generate([list(range(10, 60))], params, use_tqdm=False)
ended = time.time()
assert len(out[0].outputs[0].token_ids) == tokens
import json
parts = {"import": imported - began, "load": loaded - imported, "warmup": warm}
parts |= {"answer": ended - asked, "total": ended - began}
print(json.dumps(parts | {"compiles": llm.stats()["num_compiles"]}))
"""


def start(checkpoint: str, cache: str, bytecode: str, kind: str, tokens: int) -> dict[str, float]:
    """Start a process that answers a prompt of 50 tokens with so many. Return the seconds of its
    parts. cache, bytecode: the folders of jax's cache and of what Python compiles.
    """
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    args = [repr(time.time()), checkpoint, cache, kind, str(tokens)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *args],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"a start failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_start", __doc__)
    add = parser.add_argument
    add("checkpoint", help="a checkpoint folder")
    add("--repeat", type=int, default=3, help="starts of each kind; their median counts")
    add("--tokens", type=int, default=16, help="tokens of the answer")
    add("--no-warmup", action="store_true", help="leave out the start that compiles every shape")
    args = parser.parse_args(argv)
    kinds = {"cold": args.repeat, "warm": args.repeat} | ({} if args.no_warmup else {"warmup": 1})
    medians: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as bytecode:
        once = functools.partial(start, args.checkpoint, bytecode=bytecode, tokens=args.tokens)
        once(cache=kept, kind="fill")  # what the warm starts find
        for kind, repeat in kinds.items():
            runs = []
            for _ in range(repeat):
                with tempfile.TemporaryDirectory() as fresh:
                    runs.append(once(cache=kept if kind == "warm" else fresh, kind=kind))
            medians[kind] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    heads = ["start", *(name if name == "compiles" else f"{name} s" for name in medians["cold"])]
    rows = [
        [kind, *(f"{value:.2f}" for value in parts.values())] for kind, parts in medians.items()
    ]
    print("\n".join(common.aligned(heads, rows, left=1)))
    print(json.dumps(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
