"""Measure how long a bystander waits for its first token beside a heavy request to the same server.

    python scripts/bench_bystander.py
    python scripts/bench_bystander.py CHECKPOINT --server --max-num-seqs 128 --warmup

It starts `jpaged serve` (on the embedded model without CHECKPOINT; flags after --server are passed
to it) and sends one heavy request after the other. Until a heavy request is answered, it sends
short streams, one after the other. It prints the heavy request's status, size and seconds, and the
longest and the median wait of the bystanders for their first byte; then one JSON line. The exit
status is 1 if a bystander waited longer than --most seconds.
"""

import argparse
import dataclasses
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from jpaged.flags import Parser

COMPLETIONS = "/v1/completions"
BYSTANDER: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "stream": True, "ignore_eos": True}
FLAGS = ["--warmup", "--max-num-seqs", "64", "--max-num-batched-tokens", "512"]
FLAGS += ["--token-buckets", "64", "512", "--seq-buckets", "64"]


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer. first: seconds until its first byte; whole: until its last."""

    status: int
    size: int
    first: float
    whole: float


def post(port: int, body: dict[str, Any]) -> Answered:
    """Ask a server of this machine for a completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json"}
    started = time.monotonic()
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)
    response = connection.getresponse()
    begin = response.read(1)
    first = time.monotonic() - started
    rest = response.read()
    connection.close()
    return Answered(response.status, len(begin + rest), first, time.monotonic() - started)


def heavy_requests(scale: float) -> dict[str, dict[str, Any]]:
    """Return bodies that give a host much work. scale: 1 is the most that a server accepts by
    default.
    """
    count = max(int(128 * scale), 1)
    prompts = [[(7 * i + j) % 90 + 5 for j in range(200)] for i in range(count)]
    scored = {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 1}
    samples = {"prompt": "hello", "n": count, "logprobs": 20, "max_tokens": 100, "ignore_eos": True}
    characters = int(4_000_000 * scale)
    return {
        "many prompts with prompt_logprobs": scored,
        "many samples with logprobs": samples,
        "a stream of many samples with logprobs": samples | {"stream": True},
        "many prompts echoed with logprobs": {
            "prompt": prompts,
            "echo": True,
            "logprobs": 20,
            "max_tokens": 0,
        },
        "a text that is far too long": {"prompt": ("some words. " * characters)[:characters]},
        "a word that is far too long": {"prompt": "a" * characters},
    }


def beside(port: int, body: dict[str, Any]) -> tuple[Answered, list[float]]:
    """Return the answer to a heavy request, and the waits of the bystanders beside it."""
    answers: list[Answered] = []
    heavy = threading.Thread(target=lambda: answers.append(post(port, body)))
    heavy.start()
    time.sleep(0.05)  # until it is there
    waits = [post(port, BYSTANDER).first]
    while heavy.is_alive():
        waits.append(post(port, BYSTANDER).first)
    heavy.join()
    return answers[0], waits


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", help="a checkpoint folder")
    parser.add_argument("--most", type=float, default=0.5, help="seconds (default: 0.5)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scale of the heavy requests (default: 1)"
    )
    more = f"flags of jpaged serve (default: {' '.join(FLAGS)})"
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=FLAGS, help=more)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    model = [] if args.checkpoint is None else [args.checkpoint]
    command = [sys.executable, "-m", "jpaged", "serve", *model, "--port", "0", *args.server]
    results: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            if not said:
                return 1  # why it did not start is on stderr
            port = int(said.rpartition(":")[2])
            alone = [post(port, BYSTANDER).first for _ in range(5)]
            print(f"alone: first token after {statistics.median(alone):.3f} s")
            for name, body in heavy_requests(args.scale).items():
                answer, waits = beside(port, body)
                results[name] = {"longest": max(waits), "median": statistics.median(waits)}
                print(
                    f"{name}: status {answer.status}, {answer.size} bytes in {answer.whole:.2f} s; "
                    f"{len(waits)} bystanders wait {max(waits):.3f} s at most, "
                    f"{results[name]['median']:.3f} s in the middle",
                    flush=True,
                )
        finally:
            server.terminate()
    print(json.dumps({"alone": statistics.median(alone), "beside": results}))
    return int(any(waited["longest"] > args.most for waited in results.values()))


if __name__ == "__main__":
    sys.exit(main())
