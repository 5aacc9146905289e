"""Soak the server: mixed requests over HTTP for as long as asked, with checks all along.

    python -m tests.openai.soak --minutes 60 --streams 64
    python -m tests.openai.soak --minutes 2 --streams 16 --seed 7

A child process serves the embedded model with fewer KV blocks than its rows need. This process
keeps --streams connections busy: chats, texts, messages and responses, whole and as streams, tools,
schemas, embeddings, bad requests, clients that leave before or amid an answer, that read slowly,
and that do not read at all. Checked: every request is answered whole or with an error that has a
code and a message; what is repeated with its seed begins as before; at the end no request, row,
block, task or socket is left; the server's memory at the end is within --growth of what it was once
it had settled (after two minutes, a tenth of a long run, or a third of a short one). Prints a line
an interval and a summary. Exit status: 0, or 1 after the reason on stderr.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {# <tool_call> #}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}
CONTEXT = 256
LIMITS: dict[str, Any] = {"stall_timeout_s": 3.0, "head_timeout_s": 5.0, "max_waiting": 4096}
INTERVAL_S = 10.0
ANSWER_S = 300.0  # how long an answer may take on a busy machine
FIRST_S = 10.0  # before anything is counted
QUIET_S = 60.0  # how long the end may take to become quiet
BUSY = (429, 503)


class Failure(Exception):
    """What the server must not do."""


class Asked(NamedTuple):
    """A request. how: what its client does with the answer. is_bad: it must be refused."""

    kind: str
    path: str
    body: dict[str, Any]
    how: str = "read"
    is_bad: bool = False


def request(rng: random.Random) -> Asked:
    """Draw a request."""
    words = " ".join(rng.choices(["def", "class", "import", "self", "return", "x"], k=20))
    tokens, seed = rng.choice([4, 16, 48, 96]), rng.randrange(50)
    messages = [{"role": "user", "content": words[: rng.randint(3, 90)]}]
    stream = rng.random() < 0.7
    drawn = {"seed": seed, "stream": stream, "max_tokens": tokens, "temperature": 1.0}
    chat, text = {"messages": messages, **drawn}, {"prompt": words, **drawn}
    match rng.choices(range(10), [4, 4, 2, 2, 2, 2, 2, 1, 3, 1])[0]:
        case 0:
            return Asked("chat", CHAT, chat | {"logprobs": rng.random() < 0.3})
        case 1:
            return Asked("text", TEXT, text | {"n": rng.choice([1, 1, 3]), "stop": ["zzz"]})
        case 2:
            choice = rng.choice(["auto", "required"])
            return Asked("tools", CHAT, chat | {"tools": [TOOL], "tool_choice": choice})
        case 3:
            form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
            return Asked("schema", CHAT, chat | {"response_format": form})
        case 4:
            return Asked("message", MESSAGES, chat | {"system": "Be brief."})
        case 5:
            asked = {"input": words, "seed": seed, "stream": stream}
            return Asked("response", RESPONSES, asked | {"max_output_tokens": tokens})
        case 6:
            return Asked("embedding", EMBEDDINGS, {"input": [words, words[:9]]})
        case 7:
            bad = rng.choice([{"temperature": -1}, {"prompt": "a " * 900}, {"n": 10**9}])
            return Asked("bad", TEXT, text | bad, is_bad=True)
        case 8:
            return Asked(
                "leaves", TEXT, text | {"max_tokens": 96}, how=rng.choice(["reset", "leave"])
            )
    long = {"stream": True, "logprobs": 5, "max_tokens": 96, "n": 4}
    return Asked("slow", TEXT, text | long, how=rng.choice(["slow", "stall"]))


# The client


class Soak:
    """Asks a server until `until`, by the monotonic clock."""

    def __init__(self, port: int, seed: int, until: float):
        self.port, self.until, self.seed = port, until, seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.answers: dict[str, bytes] = {}  # by the JSON of requests that give the same again
        self.repeated = 0

    async def run(self, streams: int) -> None:
        """Keep so many requests up. Raises Failure of any of them."""
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(streams):
                    group.create_task(self._client(random.Random(f"{self.seed} {i}")))
        except ExceptionGroup as e:
            raise e.exceptions[0] from e

    async def _client(self, rng: random.Random) -> None:
        while time.monotonic() < self.until:
            asked = request(rng)
            try:
                async with asyncio.timeout(ANSWER_S):
                    outcome = await self._ask(asked, rng)
            except TimeoutError:
                raise Failure(f"no answer in {ANSWER_S} s: {asked}") from None
            self.counts[f"{asked.kind} {outcome}"] += 1

    async def _ask(self, asked: Asked, rng: random.Random) -> str:
        """Ask, and return what came of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 14)
        try:
            raw = json.dumps({"model": "demo", **asked.body}).encode()
            head = f"POST {asked.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            await writer.drain()
            if asked.how in ("reset", "leave"):
                if rng.random() < 0.7:
                    await reader.read(rng.choice([1, 500, 3000]))
                if asked.how == "reset":
                    writer.transport.abort()
                return "left"
            if asked.how == "stall":
                await asyncio.sleep(LIMITS["stall_timeout_s"] + rng.random())
                return "stalled"
            answer = bytearray()
            while piece := await reader.read(2000):
                answer += piece
                if asked.how == "slow" and len(answer) < 40_000:
                    await asyncio.sleep(0.02)
            return self._checked(asked, bytes(answer))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _checked(self, asked: Asked, answer: bytes) -> str:
        """Return "whole", "refused" or "busy". Raises Failure for anything else."""
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 "):
            raise Failure(f"no HTTP: {answer[:200]!r} to {asked}")
        status = int(head.split()[1])
        if b"transfer-encoding: chunked" in head.lower():
            body = joined(body)
        if status != 200:
            error = json.loads(body)["error"]
            if not error["message"] or not (error.get("code") or error.get("type")):
                raise Failure(f"an error without a code: {answer!r} to {asked}")
            if status in BUSY:
                return "busy"
            if not asked.is_bad or status != 400:
                raise Failure(f"{status} {error} to {asked}")
            return "refused"
        if asked.is_bad:
            raise Failure(f"not refused: {asked}")
        if asked.body.get("stream"):
            end = {MESSAGES: b"message_stop", RESPONSES: b"response."}.get(asked.path, b"[DONE]")
            if b'"error"' in body and b'"error":null' not in body:
                raise Failure(f"a stream with an error: {body[-500:]!r} to {asked}")
            if end not in body[-60_000:] or not body.endswith(b"\n\n"):
                raise Failure(f"a stream without an end: {body[-500:]!r} to {asked}")
        else:
            self._compare(asked, json.loads(body))
        return "whole"

    def _compare(self, asked: Asked, answer: dict[str, Any]) -> None:
        """What a request gives it gives again, in whatever company: but for rounding, on which the
        end of a text may hang, so the first tokens are compared.
        """
        if asked.kind != "text":
            return
        key = json.dumps(asked.body, sort_keys=True)
        texts = json.dumps([choice["text"][:8] for choice in answer["choices"]]).encode()
        if self.answers.setdefault(key, texts) != texts:
            raise Failure(f"{texts!r} after {self.answers[key]!r} to {asked}")
        self.repeated += 1


def joined(body: bytes) -> bytes:
    """Return a chunked body's data. Raises Failure where its last chunk is missing."""
    data = list[bytes]()
    while True:
        size, _, body = body.partition(b"\r\n")
        if not size:
            raise Failure("a chunked answer without an end")
        count = int(size, 16)
        if not count:
            return b"".join(data)
        data.append(body[:count])
        body = body[count + 2 :]


# The child


def serve(args: argparse.Namespace) -> int:
    """Print the port; answer each line of stdin with a report of what the server holds."""
    from jpaged import LLM
    from jpaged.checkpoint.tokenizer import load_tokenizer
    from jpaged.demo import MODEL_PATH
    from tests.openai.live import serving

    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TEMPLATE
    rows = args.streams
    sizes: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_model_len": CONTEXT,
        "block_size": 16,
        "num_blocks": max(32, rows * CONTEXT // 16 // 4),  # a quarter of what all rows can need
        "max_num_batched_tokens": 256,
        "token_buckets": (64, 256),
        "seq_buckets": (rows,),
    }
    llm = LLM(str(MODEL_PATH), tokenizer=tokenizer, **sizes)
    llm.warmup()
    with serving(llm, models=("demo",), **LIMITS) as live:
        print(live.port, flush=True)
        for _ in sys.stdin:
            state: Any = live.listener.server_state
            tasks = [task for task in state.tasks if not task.done()]
            rows_left, blocks, choices, bodies = live._left()
            report = {
                "rss_mib": rss_mib(),
                "requests": rows_left,
                "blocks": blocks,
                "completions": choices,
                "bodies": bodies,
                "tasks": len(tasks),
                "connections": len(state.connections),
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }
            print(json.dumps(report), flush=True)
    return 0


def rss_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


HELD = ("requests", "blocks", "completions", "bodies", "tasks", "connections")


def quiet(report: Callable[[], dict[str, Any]], files: int | None) -> dict[str, Any]:
    """Return the report once nothing is held any more. files: as many as may be open, None for any
    number. Raises Failure where something stays.
    """
    until = time.monotonic() + QUIET_S
    while True:
        now = report()
        left = {name: now[name] for name in HELD if now[name]}
        more = 0 if files is None else now["files"] - files
        if not left and more <= 0:
            return now
        if time.monotonic() > until:
            raise Failure(f"left at the end: {left}, and {more} more files than before")
        time.sleep(0.2)


def growth(samples: list[tuple[float, float]], settled_s: float) -> float:
    """Return how much the memory grew, as a share, once it had settled: from the first third of the
    samples after that to the last, by their medians.
    """
    after = [mib for seconds, mib in samples if seconds >= settled_s]
    third = len(after) // 3
    if not third:
        return 0.0
    return statistics.median(after[-third:]) / statistics.median(after[:third]) - 1


async def soak(args: argparse.Namespace, port: int, report: Callable[[], dict[str, Any]]) -> Soak:
    """Ask until the time is over, and print a line an interval."""
    began = time.monotonic()
    soak = Soak(port, args.seed, began + 60 * args.minutes)
    samples = list[tuple[float, float]]()

    async def watch() -> None:
        while True:
            await asyncio.sleep(min(INTERVAL_S, 6 * args.minutes))
            now, seconds = await asyncio.to_thread(report), time.monotonic() - began
            samples.append((seconds, now["rss_mib"]))
            held = ", ".join(f"{now[name]} {name}" for name in (*HELD, "files", "threads"))
            print(f"{seconds:7.0f} s  {now['rss_mib']:8.1f} MiB  {held}", flush=True)

    watching = asyncio.ensure_future(watch())
    try:
        await soak.run(args.streams)
    finally:
        watching.cancel()
    settled_s = min(max(120.0, 6 * args.minutes), 20 * args.minutes)
    grown = growth(samples, settled_s)
    print(f"memory after {settled_s:.0f} s: {grown:+.2%} over {len(samples)} samples")
    if grown > args.growth:
        raise Failure(f"the server's memory grew by {grown:.2%}")
    return soak


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="tests.openai.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=0.02, help="share of memory, at most")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.openai.soak", *argv, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    pipes = child.stdin, child.stdout

    def report() -> dict[str, Any]:
        pipes[0].write("report\n")
        pipes[0].flush()
        return json.loads(pipes[1].readline())

    try:
        port = int(pipes[1].readline())
        # The first requests open two files that stay.
        asyncio.run(Soak(port, args.seed - 1, time.monotonic() + FIRST_S).run(args.streams))
        before = quiet(report, None)
        done = asyncio.run(soak(args, port, report))
        after = quiet(report, before["files"])
        for name, count in sorted(done.counts.items()):
            print(f"{count:8} {name}")
        print(f"{done.repeated} compared; at the end {after}")
    except Failure as e:
        print(f"soak: {e}", file=sys.stderr)
        return 1
    finally:
        pipes[0].close()
        child.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
