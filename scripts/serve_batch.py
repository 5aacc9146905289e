"""Answer a file of prompts: JSONL (OpenAI batch requests or bare objects) or plain text in, JSONL out.

    python scripts/serve_batch.py prompts.jsonl                          # prints prompts and answers to read
    python scripts/serve_batch.py batch.jsonl --model DIR --output answers.jsonl
    cat prompts.txt | python scripts/serve_batch.py - --format text --output -

The input is read as a stream, a bounded window at a time. A bad line is an error line, never the end of the run. The
forms of a line: jpaged/integrations/batch_io.py. Exit status: 0 all answered, 2 some lines failed, 1 nothing could run
or the engine stopped, 130 interrupted, 141 the reader of stdout went away.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from jpaged.config import EngineConfig
from jpaged.engine.sampling_params import SamplingParams
from jpaged.errors import JpagedError, RequestError
from jpaged.integrations import batch_io
from jpaged.integrations.batch_io import BatchRequest, LineError, Settings

LINES_EVERY_S, BAR_EVERY_S, PIPE_WAIT_S = 5.0, 0.5, 0.05


class Fatal(Exception):
    """The run cannot start or go on; the message is the one sentence that the user sees."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse exits 2, which here means that some lines failed
        self.exit(1, f"serve_batch: {message} (--help lists the flags)\n")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; flags that were not given are None, and the engine's or the model's defaults hold."""
    parser = Parser(prog="serve_batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("input", help="JSONL or text file, or - for stdin")
    add("--model", help="checkpoint folder, Hugging Face's layout or Orbax (default: the embedded demo model)")
    add("--output", help="where the JSONL goes, - for stdout (default: print prompts and answers to read)")
    add("--format", choices=("auto", "jsonl", "text"), default="auto", help="auto: text if the name ends in .txt")
    add("--ordered", action="store_true", help="write in input order, not as answers finish")
    add("--window", type=int, help="requests in the engine at once (default: 4 * max_num_seqs)")
    add = parser.add_argument_group(
        "sampling, for lines that do not say (else the model's generation_config)"
    ).add_argument
    add(
        "--max-tokens",
        type=int,
        help="default: 256 for prompts, 16 for /v1/completions, the rest of the context for chat",
    )
    add("--temperature", type=float)
    add("--top-p", type=float)
    add("--seed", type=int, default=0, help="mixed with each line's id or number: one line, one stream (default: 0)")
    add = parser.add_argument_group("engine").add_argument
    add("--max-model-len", type=int, help="tokens of prompt and answer together")
    add("--max-num-seqs", type=int, help=f"rows that run at once (default: {EngineConfig.max_num_seqs})")
    add("--max-num-batched-tokens", type=int, help="prefill tokens a step")
    add("--block-size", type=int, help="tokens a KV block")
    add("--num-blocks", type=int, help="KV blocks (default: from the memory there is)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="serve in this dtype (default: the checkpoint's)")
    add("--no-prefix-caching", dest="enable_prefix_caching", action="store_false", default=None)
    args = parser.parse_args(argv)
    if args.window is not None and args.window < 1:
        parser.error(f"--window {args.window}: must be at least 1")
    args.overrides = {
        k: getattr(args, k) for k in ("max_tokens", "temperature", "top_p") if getattr(args, k) is not None
    }
    try:
        SamplingParams(**args.overrides).validate(EngineConfig(), vocab_size=1)
    except RequestError as e:
        parser.error(str(e))
    return args


def make_llm(args: argparse.Namespace) -> Any:
    """The engine on the checkpoint, or Fatal with what is wrong with either."""
    path = args.model
    if path is not None and not Path(path).is_dir():
        raise Fatal(f"--model {path}: no such folder (nothing is downloaded: pass a local checkpoint)")
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "dtype")
    given = {name: getattr(args, name) for name in (*names, "enable_prefix_caching")}
    try:
        import jpaged

        if path is None:
            from jpaged.demo import MODEL_PATH as path
        return jpaged.LLM(str(path), seed=args.seed, **{k: v for k, v in given.items() if v is not None})
    except Exception as e:
        raise Fatal(f"cannot start the engine on {path}: {_sentence(e)}") from e


class Reader:
    """Numbered, non-blank lines of the input, read ahead by a thread so that a slow pipe never holds the engine up."""

    def __init__(self, file: IO[bytes], ahead: int):
        self._lines: queue.Queue[tuple[int, bytes] | Exception | None] = queue.Queue(ahead)
        self._patience = PIPE_WAIT_S
        self.ended = False
        threading.Thread(target=self._read, args=(file,), daemon=True).start()

    def _read(self, file: IO[bytes]) -> None:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._lines.put((number, line))
            self._lines.put(None)
        except Exception as e:  # handed over: the main thread ends the run
            self._lines.put(e)

    def next(self, wait: bool) -> tuple[int, bytes] | None:
        """The next line; None at the end (`ended` is then set), or when none is there yet and `wait` is off.

        Even then a pipe that was not slow last time gets a moment, so that the engine's first batches are full ones.
        """
        if self.ended:
            return None
        try:
            item = self._lines.get(timeout=None if wait else self._patience)
        except queue.Empty:
            self._patience = 0.0001
            return None
        self._patience = PIPE_WAIT_S
        if isinstance(item, Exception):
            raise Fatal(f"cannot read the input: {_sentence(item)}")
        self.ended = item is None
        return item


class Writer:
    """Answers to JSONL or to text that a person reads; in input order through a bounded buffer if asked."""

    def __init__(self, file: IO[bytes], *, readable: bool, ordered: bool):
        self._file, self._readable, self._ordered = file, readable, ordered
        self._waiting: dict[int, bytes] = {}  # finished lines by their place, behind one that still runs
        self._places: collections.deque[int] = collections.deque()  # line numbers, in input order, not written yet

    @property
    def held(self) -> int:
        """Lines that were begun and not written yet; only an ordered writer counts them."""
        return len(self._places)

    def begin(self, number: int) -> None:
        if self._ordered:
            self._places.append(number)

    def write(self, request: BatchRequest, line: dict[str, Any]) -> None:
        data = _to_read(request, line) if self._readable else batch_io.encode_line(line)
        if not self._ordered:
            self._file.write(data)
            return
        self._waiting[request.number] = data
        while self._places and self._places[0] in self._waiting:
            self._file.write(self._waiting.pop(self._places.popleft()))

    def flush(self, everything: bool = False) -> None:
        """To the file; `everything` also lets go what waits behind a line that will not come (the run was cut off)."""
        if everything:
            for number in sorted(self._waiting):
                self._file.write(self._waiting.pop(number))
        self._file.flush()


@dataclasses.dataclass
class Tally:
    """What the run did so far; the summary."""

    began: float = dataclasses.field(default_factory=time.perf_counter)
    ok: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, output: Any) -> None:
        self.ok += 1
        self.tokens_in += len(output.prompt_token_ids)
        self.tokens_cached += output.num_cached_tokens
        self.tokens_out += len(output.outputs[0].token_ids)
        self.reasons[output.outputs[0].finish_reason] += 1

    def summary(self, stats: dict[str, Any]) -> str:
        seconds = max(time.perf_counter() - self.began, 1e-9)
        share = 100 * self.tokens_cached / max(self.tokens_in, 1)
        rows = {
            "requests": f"{self.ok + self.failed} ({self.ok} ok, {self.failed} failed)",
            "tokens": f"{self.tokens_in} in, {self.tokens_out} out",
            "time": f"{seconds:.1f} s, {self.tokens_out / seconds:.1f} tok/s out, "
            f"{(self.tokens_in + self.tokens_out) / seconds:.1f} tok/s in all",
            "cache hits": f"{self.tokens_cached} tokens ({share:.1f}% of the prompts)",
            "finished by": ", ".join(f"{k} {n}" for k, n in self.reasons.most_common()) or "-",
        }
        if stats.get("num_compiles"):
            rows["compiled"] = f"{stats['num_compiles']} steps in {stats.get('compile_time_s', 0.0):.1f} s of that time"
        text = "\n".join(f"{name:<12} {value}" for name, value in rows.items())
        if self.reasons["length"] * 5 > self.ok:
            cut = f"{self.reasons['length']} of {self.ok} answers were cut off by their token limit"
            text += f"\nwarning: {cut} (finish_reason 'length'): raise --max-tokens or --max-model-len"
        return text


class Progress:
    """tqdm on a terminal, a plain line every few seconds elsewhere; prefill and decode tok/s of the last interval."""

    def __init__(self, mode: str, total: int | None):
        self._bar, self._mode, self._total = None, mode, total
        self._last, self._stats = time.perf_counter(), dict[str, Any]()
        if mode == "bar":
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="req", dynamic_ncols=True, file=sys.stderr)

    def update(self, tally: Tally, llm: Any) -> None:
        now = time.perf_counter()
        if self._mode == "none" or now - self._last < (BAR_EVERY_S if self._bar is not None else LINES_EVERY_S):
            return
        self._show(tally, llm.stats())
        self._last = now

    def _show(self, tally: Tally, stats: dict[str, Any]) -> None:
        rates = []
        for phase in ("prefill", "decode"):
            tokens, seconds = (stats.get(k, 0) - self._stats.get(k, 0) for k in (f"{phase}_tokens", f"{phase}_time_s"))
            rates.append(f"{phase} {tokens / seconds if seconds > 0 else 0.0:.0f} tok/s")
        self._stats, done, text = stats, tally.ok + tally.failed, ", ".join(rates)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{text}, {tally.failed} failed", refresh=False)
            self._bar.update(done - self._bar.n)
        else:
            of = "" if self._total is None else f"/{self._total}"
            clock = f"[{time.perf_counter() - tally.began:.0f} s]"
            print(f"{clock} {done}{of} done, {tally.failed} failed, {text}", file=sys.stderr, flush=True)

    def close(self, tally: Tally, llm: Any) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):  # the engine may be what failed
                self._show(tally, llm.stats())
            self._bar.close()
            self._bar = None


def serve(
    llm: Any, reader: Reader, writer: Writer, settings: Settings, window: int, tally: Tally, progress: Progress
) -> None:
    """The run: keep at most `window` requests in the engine, step it, write what finishes.

    An ordered run also stops reading while 8 windows of lines wait for one that is slow: memory stays bounded.
    """
    pending: dict[str, BatchRequest] = {}
    seen: set[int] = set()  # hashes of the ids, 64 bits each

    def failed(request: BatchRequest, error: BaseException | str) -> None:
        tally.failed += 1
        writer.write(request, batch_io.error_line(request, error))

    def admit(number: int, raw: bytes) -> None:
        request = BatchRequest(number=number)
        writer.begin(number)
        try:
            request.parse(raw, settings)
            if request.id is not None:
                if (digest := hash(str(request.id))) in seen:
                    raise LineError(f"id {request.id!r} is an earlier line's", param="custom_id", code="duplicate_id")
                seen.add(digest)
            prompt = request.prompt
            if request.messages is not None:
                prompt = llm.render_chat(request.messages, **request.template)
            pending[llm.add_request(prompt, request.params, request_id=f"line-{number}")] = request
        except Exception as e:  # whatever one line provokes is that line's error
            failed(request, e)

    while True:
        while len(pending) < window and writer.held < 8 * window and (item := reader.next(wait=not pending)):
            admit(*item)
            if not pending:
                writer.flush()
        if not pending and reader.ended:
            return
        finished = llm.step()
        if not finished and not llm.has_unfinished():
            raise Fatal(f"the engine is idle with {len(pending)} requests unanswered")
        for output in finished:
            request = pending.pop(output.request_id)
            if output.error is not None:
                failed(request, output.error)
            else:
                tally.add(output)
                writer.write(request, batch_io.answer_line(request, output))
        writer.flush()
        progress.update(tally, llm)


def _to_read(request: BatchRequest, line: dict[str, Any]) -> bytes:
    """A prompt and its answer for a person's eyes."""
    if request.messages is not None:
        prompt = "\n".join(f"{m['role']}: {m['content']}" for m in request.messages)
    else:
        prompt = f"token ids {request.prompt}" if isinstance(request.prompt, list) else request.prompt or ""
    if len(prompt) > 1000:
        prompt = f"{prompt[:500]}\n... ({len(prompt) - 1000} characters) ...\n{prompt[-500:]}"
    body = (line.get("response") or {}).get("body", line)
    error = body.get("error") or line.get("error")
    name = f"line {request.number}" + ("" if request.id is None else f" ({request.id})")
    if error is not None:
        prompt = f"{prompt.rstrip()}\n" if prompt else ""
        return f"=== {name}\n{prompt}--- error\n{error['message']}\n\n".encode(errors="replace")
    choice = body["choices"][0] if "choices" in body else body
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    text = f"token ids {choice['token_ids']}" if text is None else text
    ending = f"{choice['finish_reason']}, {body['usage']['completion_tokens']} tokens"
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    ending += f", {cached} prompt tokens from the cache" if cached else ""
    return f"=== {name}\n{prompt.rstrip()}\n--- answer ({ending})\n{text.rstrip()}\n\n".encode(errors="replace")


def open_input(path: str) -> tuple[IO[bytes], int | None]:
    """The input as bytes, and how many requests it holds (None for a pipe)."""
    if path == "-":
        return open(0, "rb", closefd=False), None  # not sys.stdin: its lock, held by the reader, would stop the exit
    try:
        total = None
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                total = sum(1 for line in file if not line.isspace())
        return open(path, "rb"), total
    except OSError as e:
        raise Fatal(f"cannot read {path}: {e.strerror}") from None


@contextlib.contextmanager
def open_output(path: str | None, source: str) -> Iterator[IO[bytes]]:
    """The output file, opened before the model is loaded but only emptied by the first write."""
    if path in (None, "-"):
        yield sys.stdout.buffer
        return
    with contextlib.ExitStack() as stack:
        try:
            if source != "-" and os.path.exists(path) and os.path.samefile(path, source):
                raise Fatal(f"--output {path} is the input itself")
            file = stack.enter_context(open(path, "ab"))
        except OSError as e:
            raise Fatal(f"cannot write {path}: {e.strerror}") from None
        yield file


def run(args: argparse.Namespace) -> int:
    """Everything between the command line and the exit status. Raises Fatal, KeyboardInterrupt, BrokenPipeError."""
    source, total = open_input(args.input)
    readable = args.output is None
    talk = sys.stderr if args.output == "-" else sys.stdout
    with source, open_output(args.output, args.input) as file:
        llm = make_llm(args)
        text = args.format == "text" or (args.format == "auto" and args.input.endswith(".txt"))
        name = "jpaged-demo" if args.model is None else Path(args.model).resolve().name
        settings = Settings(
            defaults=llm.default_sampling_params(), model=name, overrides=args.overrides, seed=args.seed, text=text
        )
        if file is not sys.stdout.buffer and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(0)
        terminal = sys.stderr.isatty()
        mode = "none" if readable and terminal and sys.stdout.isatty() else "bar" if terminal else "lines"
        window = args.window or 4 * (args.max_num_seqs or EngineConfig.max_num_seqs)
        tally, progress, reader = Tally(), Progress(mode, total), Reader(source, window)
        writer = Writer(file, readable=readable, ordered=args.ordered)
        try:
            serve(llm, reader, writer, settings, window, tally, progress)
        except (KeyboardInterrupt, Exception) as e:
            progress.close(tally, llm)
            if isinstance(e, OSError):
                raise
            with contextlib.suppress(OSError):
                writer.flush(everything=True)
            done = f"{tally.ok + tally.failed} lines were answered" + (
                "" if args.output in (None, "-") else f" in {args.output}"
            )
            if isinstance(e, KeyboardInterrupt):
                raise KeyboardInterrupt(done) from None
            raise Fatal(f"the run stopped: {_sentence(e)} ({done})") from e
        writer.flush()
        progress.close(tally, llm)
        print(tally.summary(llm.stats()), file=talk, flush=True)
        return 2 if tally.failed else 0


def _sentence(error: BaseException) -> str:
    """An error in one line: our own errors and Fatal as they are, others with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return text if isinstance(error, JpagedError | Fatal | OSError) else f"{type(error).__name__}: {text}"


def main(argv: list[str] | None = None) -> int:
    """Run and return the exit status; what goes wrong is one sentence on stderr (JPAGED_DEBUG=1 adds the traceback)."""
    args = parse_args(argv)
    try:
        return run(args)
    except Fatal as e:
        print(f"serve_batch: {e}", file=sys.stderr)
        if os.environ.get("JPAGED_DEBUG"):
            raise
        return 1
    except KeyboardInterrupt as e:
        print(f"serve_batch: interrupted: {e or 'nothing had run'}", file=sys.stderr)
        return 130
    except OSError as e:  # of writing: reading and opening are Fatal
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains when it flushes stdout at exit
        if isinstance(e, BrokenPipeError):
            return 141
        print(f"serve_batch: cannot write: {_sentence(e)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
