"""Measure what HTTP costs: the server with streams beside LLM.generate, on one engine, in turn.

    python scripts/bench_server.py --random 60m --concurrency 64 --requests 128
    python scripts/bench_server.py CHECKPOINT --input 200 --output 100

A child process holds the engine and serves it; this process is the client, which keeps
--concurrency streams open until all requests are answered. In turn with that, the child's
LLM.generate takes as many prompts of the same lengths at once. The script prints the tokens a
second of both, the best and the median of the rounds, what the server loses (the median of pairs in
turn), and for all streams the p50 and p99 of the time to the first token and between tokens; then
one JSON line. Prompts are random token ids, all different. Client and server share the machine, so
on a CPU their work takes time from the model: the processor seconds of the server's process, of its
Python threads and of the client are reported separately.
"""

import argparse
import asyncio
import functools
import itertools
import json
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import _common as common

from jpaged.flags import add_engine_flags, engine_settings

MODEL, PIECE, DONE = "bench", b'data: {"id"', b"data: [DONE]"
PYTHON = ("http", "engine", "prompts")  # threads of the server that run Python
USED = ("process", *PYTHON, "dispatches", "padded_tokens", "decode_tokens")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.serve:
        return serve(args)
    child = subprocess.Popen(
        [sys.executable, __file__, *argv, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        port = int(child.stdout.readline())
        results = rounds(args, child, port)
    finally:
        child.terminate()
        child.wait()
    report(args, [bulk for bulk, _ in results], [streams for _, streams in results])
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = common.make_parser("bench_server", __doc__)
    common.add_model_flags(parser)
    parser.add_argument("--concurrency", type=int, default=64, help="streams at once")
    parser.add_argument("--requests", type=int, default=128, help="of a round")
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", help="of the weights (default: the checkpoint's, bfloat16)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    add_engine_flags(
        parser.add_argument_group("engine"),
        *("max_num_batched_tokens", "max_model_len", "num_blocks", "block_size", "decode_steps"),
        *("deterministic", "quantization", "token_buckets", "seq_buckets"),
    )
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "concurrency", "requests", "input", "output", "rounds")
    return args


# The child


def serve(args: argparse.Namespace) -> int:
    """Print the port, then answer each line of stdin in JSON: the number of a round with generate's
    seconds, "spent" with the processor time and the steps so far.
    """
    from jpaged import LLM, AsyncLLM, SamplingParams
    from jpaged.openai.server.app import Server
    from jpaged.openai.server.run import Listener
    from jpaged.openai.server.settings import ServerSettings

    settings = {"max_num_seqs": args.concurrency, **engine_settings(args)}
    params = common.load_model(args, args.dtype)
    # Random weights have no tokenizer; with this one, making text costs as much as with a real one.
    llm = LLM(
        params,
        tokenizer=None if args.random is None else words(params.config.vocab_size),
        **settings,
    )
    engine = AsyncLLM(llm)
    server = Server(engine, ServerSettings(models=(MODEL,), max_waiting=10 * args.requests))
    listener = Listener(server, "127.0.0.1", 0, quiet=True)
    # The event loop that the command line uses.
    loop = listener.config.get_loop_factory()
    serving = functools.partial(asyncio.run, listener.serve(), loop_factory=loop)
    http = threading.Thread(target=serving, daemon=True)
    http.start()
    while not listener.started:
        time.sleep(0.01)
    print(listener.port, flush=True)
    asked = SamplingParams(max_tokens=args.output, ignore_eos=True, seed=1)

    def generate(llm: Any, number: int) -> float:
        prompts = prompts_of(args, f"bulk {number}")
        began = time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - began

    for line in sys.stdin:
        if line.strip() == "spent":
            answer: Any = json.dumps(spent(http) | asyncio.run(engine.call(work_of)))
        else:
            answer = asyncio.run(engine.call(generate, int(line)))
        print(answer, flush=True)
    return 0


def spent(http: threading.Thread) -> dict[str, float]:
    """Return the processor seconds of this process, and of its Python threads."""
    kinds = {"jpaged-engine": "engine", "jpaged-prompts": "prompts"}
    times = {"process": time.process_time(), "http": 0.0, "engine": 0.0, "prompts": 0.0}
    for thread in threading.enumerate():
        kind = "http" if thread is http else kinds.get(thread.name.partition("_")[0])
        if kind is not None:
            used = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            times[kind] += int(used.split()[0]) / 1e9
    return times


def work_of(llm: Any) -> dict[str, float]:
    """Return what the engine has done: its steps, and the tokens they had room for."""
    stats = llm.stats()
    return {name: stats[name] for name in ("dispatches", "padded_tokens", "decode_tokens")}


def words(vocab_size: int) -> Any:
    """Return a tokenizer with one word per token."""
    from tokenizers import Tokenizer, models

    from jpaged.models.hf_defaults import import_transformers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend)


def prompts_of(args: argparse.Namespace, name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(256, 2000) for _ in range(args.input)] for _ in range(args.requests)]


# The client


def rounds(args: argparse.Namespace, child: Any, port: int) -> list[tuple[float, dict[str, Any]]]:
    """Return for each round generate's tokens a second, and what the streams saw. The first warms
    up, and one in which a step was compiled does not count.
    """
    results, compiles = [], -1
    for number in range(2 * args.rounds + 6):
        spent = [ask(child, "spent")]
        rate = args.requests * args.output / ask(child, f"{number}")
        spent.append(ask(child, "spent"))
        spent_here = time.process_time()
        seen = streams(args, port, number)
        spent_here = time.process_time() - spent_here
        spent.append(ask(child, "spent"))
        alone, served = (
            {name: after[name] - before[name] for name in after}
            for before, after in itertools.pairwise(spent)
        )
        seen |= {"alone": alone, "served": served | {"client": spent_here}}
        before, compiles = compiles, compiled(port)
        if before == compiles:
            results.append((rate, seen))
        if len(results) == args.rounds:
            return results
    raise RuntimeError("steps are compiled in every round: give more rounds, or fewer buckets")


def ask(child: Any, line: str) -> Any:
    """Return the child's answer to a line."""
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def compiled(port: int) -> int:
    """Return how many steps the server's engine has compiled."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return int(re.findall(r"^jpaged_compiled_steps_total (\d+)$", text, re.M)[0])


def streams(args: argparse.Namespace, port: int, number: int) -> dict[str, Any]:
    """Return the tokens a second, and the seconds of every first token and every gap. One thread
    does as little as a client can, since its work is on the same processors.
    """
    prompts, ended = prompts_of(args, f"streams {number}"), []
    with selectors.DefaultSelector() as ready:

        def ask_next() -> None:
            if prompts:
                stream = Stream(args, port, prompts.pop())
                ready.register(stream.socket, selectors.EVENT_READ, stream)

        began = time.perf_counter()
        for _ in range(args.concurrency):
            ask_next()
        while len(ended) < args.requests:
            for key, _ in ready.select():
                if key.data.read():
                    ready.unregister(key.fileobj)
                    key.data.socket.close()
                    ended.append(key.data.times)
                    ask_next()
        seconds = time.perf_counter() - began
    firsts = [times[1] - times[0] for times in ended]
    gaps = [b - a for times in ended for a, b in itertools.pairwise(times[1:])]
    return {"rate": args.requests * args.output / seconds, "first": firsts, "gap": gaps}


class Stream:
    """One answer while it arrives. times: when it was asked for, and when each piece arrived."""

    def __init__(self, args: argparse.Namespace, port: int, prompt: list[int]):
        asked = {"prompt": prompt, "max_tokens": args.output, "stream": True, "ignore_eos": True}
        body = json.dumps(asked | {"seed": 1, "model": MODEL}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.times = [time.perf_counter()]
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._is_begun, self._tail = False, b""

    def read(self) -> bool:
        """Take the data that has arrived. Return whether it was the end."""
        new = self.socket.recv(1 << 16)
        if not self._is_begun and not new.startswith(b"HTTP/1.1 200"):
            raise RuntimeError((new + self.socket.recv(4096)).decode())
        self._is_begun = True
        data = self._tail + new
        if not new or b'data: {"error"' in data:
            raise RuntimeError(f"a stream ended with {data!r}")
        self.times += [time.perf_counter()] * data.count(PIECE)
        # Data that may be the beginning of a piece, or of the end, is kept for the next read.
        after = data.rfind(PIECE) + len(PIECE) if PIECE in data else 0
        self._tail = data[after:][1 - len(DONE) :]
        return DONE in data


def report(args: argparse.Namespace, bulk: list[float], results: list[dict[str, Any]]) -> None:
    rates = [one["rate"] for one in results]
    loss = 1 - statistics.median(b / a for a, b in zip(bulk, rates, strict=True))  # in turn
    print(f"{common.model_name(args)}: {args.requests} requests of {args.input} tokens in and")
    print(f"{args.output} out, {args.concurrency} at once, {args.rounds} rounds")
    for name, values in (("LLM.generate", bulk), ("server, streams", rates)):
        best, median = max(values), statistics.median(values)
        print(f"  {name:16} {median:9.1f} tok/s (best {best:.1f})")
    print(f"  the server loses {loss:.1%} (best rounds: {1 - max(rates) / max(bulk):.1%})")
    middle = {
        kind: {name: statistics.median(one[kind][name] for one in results) for name in names}
        for kind, names in (("alone", USED), ("served", (*USED, "client")))
    }
    for kind, what in (("alone", "LLM.generate"), ("served", "server, streams")):
        told = ", ".join(f"{name} {value:.2f}" for name, value in middle[kind].items())
        print(f"  {what:16} {told}")
    alone, served = middle["alone"], middle["served"]
    tokens = args.requests * args.output
    python = sum(served[name] - alone[name] for name in PYTHON)
    print(
        f"  the server's own threads: {1e6 * python / tokens:+.0f} us of a processor a token, "
        f"{python / served['process']:+.1%} of its process; the client's: "
        f"{1e6 * served['client'] / tokens:.0f} us"
    )
    record: dict[str, Any] = {"generate_tok_s": bulk, "server_tok_s": rates, "loss": loss}
    record |= {"used": middle}
    for name, what in (("first", "time to first token"), ("gap", "time between tokens")):
        values = sorted(x * 1e3 for one in results for x in one[name])
        p50, p99 = (values[min(int(q * len(values)), len(values) - 1)] for q in (0.5, 0.99))
        print(f"  {what:20} p50 {p50:9.1f} ms   p99 {p99:9.1f} ms")
        record |= {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
