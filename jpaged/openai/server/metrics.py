"""What a server shows of itself: Prometheus text, and the figures of its page."""

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from jpaged.request.outputs import CompletionChunk, RequestOutput

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RECENT = 128  # completions by which the wait of others is guessed
LONGEST_WAIT_S = 60

# Of the engine's stats: (its name there, kind, name, help).
ENGINE = (
    ("sequences_running", "gauge", "sequences_running", "Completions that hold a row now."),
    ("sequences_waiting", "gauge", "sequences_waiting", "Completions that wait for a row."),
    ("blocks_in_use", "gauge", "kv_blocks_in_use", "KV blocks that sequences hold."),
    ("num_blocks", "gauge", "kv_blocks", "KV blocks of the pool."),
    ("host_blocks_in_use", "gauge", "kv_host_blocks_in_use", "KV blocks kept on the host."),
    ("prefill_tokens", "counter", "prefill_tokens", "Prompt tokens computed."),
    ("decode_tokens", "counter", "decode_tokens", "Tokens computed in decode steps."),
    ("prompt_tokens", "counter", "prompt_tokens", "Prompt tokens of requests that have ended."),
    ("cached_tokens", "counter", "cached_prompt_tokens", "Those of them found in the cache."),
    ("generated_tokens", "counter", "generated_tokens", "Tokens of requests that have ended."),
    ("preemptions", "counter", "preemptions", "Sequences preempted for want of KV blocks."),
    ("steps", "counter", "steps", "Steps of the engine."),
    ("host_time_s", "counter", "host_seconds", "The engine's thread at work on the host."),
    ("device_time_s", "counter", "device_wait_seconds", "The engine's thread awaiting a step."),
    ("num_compiles", "counter", "compiled_steps", "Shapes of steps that were compiled."),
)


class Histogram:
    """Seconds, counted in SECONDS' buckets."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for most, count in zip((*SECONDS, math.inf), self.counts, strict=True):
            total += count
            edge = "+Inf" if most == math.inf else f"{most:g}"
            yield f'{name}_bucket{{le="{edge}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters of a server; touched by its event loop alone."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status; 499: left
        self.errors: Counter[str] = Counter()  # by code
        self.endings: Counter[str] = Counter()  # of completions, by finish_reason
        self.rejected = 0
        self.ignored_fields = 0
        self.first_token, self.between_tokens, self.whole = Histogram(), Histogram(), Histogram()
        self._ends: deque[float] = deque(maxlen=RECENT)

    def ended(self, output: RequestOutput, seconds: float) -> None:
        """Take in a request that has ended well."""
        self.whole.add(seconds)
        self.endings.update(str(done.finish_reason) for done in output.outputs)
        self._ends.extend([time.monotonic()] * len(output.outputs))

    def seconds_to_wait(self, completions: int) -> int:
        """About how long until so many more have ended, from 1 to LONGEST_WAIT_S."""
        if len(self._ends) < 2:
            return 1
        span = max(time.monotonic() - self._ends[0], 0.001)
        wait = math.ceil(completions * span / len(self._ends))
        return min(max(wait, 1), LONGEST_WAIT_S)

    def text(self, stats: dict[str, Any]) -> str:
        """Return the exposition that Prometheus reads. stats: the engine's."""
        return "".join(f"{line}\n" for line in self._lines(stats))

    def _lines(self, stats: dict[str, Any]) -> Iterator[str]:
        def head(kind: str, name: str, help: str) -> Iterator[str]:
            yield f"# HELP {name} {help}"
            yield f"# TYPE {name} {kind}"

        for key, kind, name, help in ENGINE:
            name = f"jpaged_{name}_total" if kind == "counter" else f"jpaged_{name}"
            yield from head(kind, name, help)
            yield f"{name} {stats.get(key, 0)}"
        name = "jpaged_http_requests_total"
        yield from head("counter", name, "Requests answered; status 499: the client had left.")
        for (path, status), count in sorted(self.requests.items()):
            yield f'{name}{{path="{path}",status="{status}"}} {count}'
        name = "jpaged_http_errors_total"
        yield from head("counter", name, "Requests answered with an error, by its code.")
        for code, count in sorted(self.errors.items()):
            yield f'{name}{{code="{code}"}} {count}'
        name = "jpaged_completions_total"
        yield from head("counter", name, "Completions by what ended them.")
        for reason, count in sorted(self.endings.items()):
            yield f'{name}{{finish_reason="{reason}"}} {count}'
        name = "jpaged_http_rejected_total"
        yield from head("counter", name, "Requests refused because too many waited.")
        yield f"{name} {self.rejected}"
        name = "jpaged_http_ignored_fields_total"
        yield from head("counter", name, "Unknown fields of bodies that were read without them.")
        yield f"{name} {self.ignored_fields}"
        histograms = (
            ("time_to_first_token", self.first_token, "Of streams, from body to first piece."),
            ("time_between_pieces", self.between_tokens, "Of streams, between two pieces."),
            ("request", self.whole, "From body to the end of a prompt's completions."),
        )
        for short, histogram, help in histograms:
            name = f"jpaged_{short}_seconds"
            yield from head("histogram", name, help)
            yield from histogram.lines(name)
        name = "jpaged_start_time_seconds"
        yield from head("gauge", name, "When the server started, in seconds since 1970.")
        yield f"{name} {self.started_at:.3f}"


class Watch:
    """Times the pieces of one HTTP request."""

    def __init__(self, metrics: Metrics, arrived: float):
        self._metrics, self._arrived = metrics, arrived
        self._last: dict[tuple[int, int], float] = {}

    def chunk(self, prompt: int, chunk: CompletionChunk) -> None:
        """A piece of a stream has come."""
        now, key = time.monotonic(), (prompt, chunk.index)
        last = self._last.get(key)
        if last is None:
            self._metrics.first_token.add(now - self._arrived)
        else:
            self._metrics.between_tokens.add(now - last)
        self._last[key] = now

    def ended(self, output: RequestOutput) -> RequestOutput:
        """The same, taken in."""
        self._metrics.ended(output, time.monotonic() - self._arrived)
        return output
