"""What HTTP costs: the server under streams beside LLM.generate, on one engine, in turn.

    python scripts/bench_server.py --random 60m --concurrency 64 --requests 128
    python scripts/bench_server.py CHECKPOINT --input 200 --output 100

A child process holds the engine and serves it; this one is the client, which keeps so many streams
open until all requests are answered. In turn with that, the child's LLM.generate takes as many
prompts of the same lengths at once. Prints tokens a second of both, best and median of the rounds,
what the server loses, and of all streams the time to the first token and between tokens, p50 and
p99; then one JSON line. Prompts are random token ids, no two alike. Client and server share the
machine, so on a CPU the client's work is part of the loss; what the server's own process takes more
of the processors is told apart: on a CPU that is also what the model runs on.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

import _common as common

from jpaged.flags import add_engine_flags, engine_settings

MODEL = "bench"


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
        found = rounds(args, child, port)
    finally:
        child.terminate()
        child.wait()
    report(args, [bulk for bulk, _ in found], [streams for _, streams in found])
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
    """Print the port, then answer each line of stdin: a round's number by generate's seconds, cpu
    by the seconds that this process has taken of the processors.
    """
    from jpaged import LLM, AsyncLLM, SamplingParams
    from jpaged.openai.server.app import Server
    from jpaged.openai.server.run import Listener
    from jpaged.openai.server.settings import ServerSettings

    settings = {"max_num_seqs": args.concurrency, **engine_settings(args)}
    params = common.load_model(args, args.dtype)
    # Random weights have no tokenizer: with this one, text is made of tokens as it would be.
    llm = LLM(
        params,
        tokenizer=None if args.random is None else words(params.config.vocab_size),
        **settings,
    )
    engine = AsyncLLM(llm)
    server = Server(engine, ServerSettings(models=(MODEL,), max_waiting=10 * args.requests))
    listener = Listener(server, "127.0.0.1", 0, quiet=True)
    threading.Thread(target=lambda: asyncio.run(listener.serve()), daemon=True).start()
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
        is_cpu = line.strip() == "cpu"
        found = time.process_time() if is_cpu else asyncio.run(engine.call(generate, int(line)))
        print(found, flush=True)
    return 0


def words(vocab_size: int) -> Any:
    """A tokenizer of a word a token."""
    from tokenizers import Tokenizer, models

    from jpaged.models.hf_defaults import import_transformers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend)


def prompts_of(args: argparse.Namespace, name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(256, 2000) for _ in range(args.input)] for _ in range(args.requests)]


# The client


def rounds(args: argparse.Namespace, child: Any, port: int) -> list[tuple[float, dict[str, Any]]]:
    """Of each round generate's tokens a second, and what the streams saw. The first warms up, and
    one in which a step was compiled does not count.
    """
    found, compiles = [], -1
    for number in range(2 * args.rounds + 6):
        used = [float(ask(child, "cpu"))]
        rate = args.requests * args.output / float(ask(child, f"{number}"))
        used.append(float(ask(child, "cpu")))
        seen = asyncio.run(streams(args, port, number))
        used.append(float(ask(child, "cpu")))
        seen["cpu"] = (used[1] - used[0], used[2] - used[1])
        before, compiles = compiles, compiled(port)
        if before == compiles:
            found.append((rate, seen))
        if len(found) == args.rounds:
            return found
    raise RuntimeError("steps are compiled in every round: give more rounds, or fewer buckets")


def ask(child: Any, line: str) -> str:
    """What the child answers to a line."""
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return child.stdout.readline()


def compiled(port: int) -> int:
    """Steps that the server's engine has compiled."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return int(re.findall(r"^jpaged_compiled_steps_total (\d+)$", text, re.M)[0])


async def streams(args: argparse.Namespace, port: int, number: int) -> dict[str, Any]:
    """Tokens a second, and the seconds of every first token and of every gap."""
    prompts, firsts, gaps = prompts_of(args, f"streams {number}"), [], []
    began = time.perf_counter()

    async def client() -> None:
        while prompts:
            body = {"prompt": prompts.pop(), "max_tokens": args.output, "stream": True}
            body |= {"ignore_eos": True, "seed": 1, "model": MODEL}
            times = await stream(port, json.dumps(body).encode())
            firsts.append(times[1] - times[0])
            gaps.extend(b - a for a, b in itertools.pairwise(times[1:]))

    await asyncio.gather(*(client() for _ in range(args.concurrency)))
    seconds = time.perf_counter() - began
    return {"rate": args.requests * args.output / seconds, "first": firsts, "gap": gaps}


async def stream(port: int, body: bytes) -> list[float]:
    """When a request was sent, and when each piece of its answer came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    times = [time.perf_counter()]
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    while True:
        line = await reader.readline()
        if line.startswith(b"data: {"):
            if b'"error"' in line[:16]:
                raise RuntimeError(line.decode())
            times.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]") or not line:
            break
        elif line.startswith(b"HTTP/1.1") and b" 200 " not in line:
            raise RuntimeError((await reader.read(4096)).decode())
    writer.close()
    if len(times) < 2:
        raise RuntimeError("a stream without a piece")
    return times


def report(args: argparse.Namespace, bulk: list[float], found: list[dict[str, Any]]) -> None:
    rates = [one["rate"] for one in found]
    loss = 1 - statistics.median(rates) / statistics.median(bulk)
    print(f"{common.model_name(args)}: {args.requests} requests of {args.input} tokens in and")
    print(f"{args.output} out, {args.concurrency} at once, {args.rounds} rounds")
    for name, values in (("LLM.generate", bulk), ("server, streams", rates)):
        best, median = max(values), statistics.median(values)
        print(f"  {name:16} {median:9.1f} tok/s (best {best:.1f})")
    print(f"  the server loses {loss:.1%} (best rounds: {1 - max(rates) / max(bulk):.1%})")
    more = statistics.median(served / alone for alone, served in (one["cpu"] for one in found)) - 1
    print(f"  processor time of its process: {more:+.1%}")
    record: dict[str, Any] = {"generate_tok_s": bulk, "server_tok_s": rates, "loss": loss}
    record |= {"cpu_s": [one["cpu"] for one in found], "cpu_more": more}
    for name, what in (("first", "time to first token"), ("gap", "time between tokens")):
        values = sorted(x * 1e3 for one in found for x in one[name])
        p50, p99 = (values[min(int(q * len(values)), len(values) - 1)] for q in (0.5, 0.99))
        print(f"  {what:20} p50 {p50:9.1f} ms   p99 {p99:9.1f} ms")
        record |= {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
