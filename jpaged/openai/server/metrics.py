"""Metrics of a server in Prometheus' text format, and the figures on its page."""

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.openai.server.record import RequestRecord
from jpaged.request.outputs import CompletionChunk, RequestOutput

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RECENT = 128  # finished completions from which the waiting time of others is estimated
LONGEST_WAIT_S = 60

# Metrics from the engine's stats: (name there, kind, name, help).
ENGINE = (
    ("sequences_running", "gauge", "sequences_running", "Completions that are running now."),
    ("sequences_waiting", "gauge", "sequences_waiting", "Completions that wait to run."),
    ("blocks_in_use", "gauge", "kv_blocks_in_use", "KV blocks that sequences hold."),
    ("num_blocks", "gauge", "kv_blocks", "KV blocks of the pool."),
    ("host_blocks_in_use", "gauge", "kv_host_blocks_in_use", "KV blocks kept on the host."),
    ("prefill_tokens", "counter", "prefill_tokens", "Prompt tokens computed."),
    ("decode_tokens", "counter", "decode_tokens", "Tokens computed in decode steps."),
    ("prompt_tokens", "counter", "prompt_tokens", "Prompt tokens of requests that have ended."),
    (
        "cached_tokens",
        "counter",
        "cached_prompt_tokens",
        "Prompt tokens that were found in the prefix cache.",
    ),
    ("generated_tokens", "counter", "generated_tokens", "Tokens of requests that have ended."),
    ("weight_version", "gauge", "weight_version", "Weights that were served so far."),
    ("preemptions", "counter", "preemptions", "Sequences preempted because KV blocks were short."),
    ("steps", "counter", "steps", "Steps of the engine."),
    ("host_time_s", "counter", "host_seconds", "Time that the engine's thread worked on the host."),
    (
        "device_time_s",
        "counter",
        "device_wait_seconds",
        "Time that the engine's thread waited for a step.",
    ),
    ("num_compiles", "counter", "compiled_steps", "Shapes of steps that were compiled."),
    # Of a prefix store; 0 without one.
    ("store_read_blocks", "counter", "store_read_blocks", "KV blocks read from the prefix store."),
    ("store_read_bytes", "counter", "store_read_bytes", "Bytes of those."),
    ("store_write_blocks", "counter", "store_write_blocks", "KV blocks written to it."),
    ("store_write_bytes", "counter", "store_write_bytes", "Bytes of those."),
    ("store_fetches", "counter", "store_fetches", "Requests that waited for blocks of it."),
    ("store_late", "counter", "store_late", "Of those, the ones that went on without."),
    ("store_declined", "counter", "store_declined", "Loads that would have taken longer."),
    ("store_bad_blocks", "counter", "store_bad_blocks", "Files of it that were damaged."),
    ("store_absent_blocks", "counter", "store_absent_blocks", "Files of it that had gone."),
    ("store_read_errors", "counter", "store_read_errors", "Files of it that were not readable."),
    ("store_write_errors", "counter", "store_write_errors", "Writes to it that failed."),
    ("store_dropped_blocks", "counter", "store_dropped_blocks", "KV blocks that it did not take."),
    ("store_evicted_blocks", "counter", "store_evicted_blocks", "Files deleted to make room."),
    ("store_handed_late", "counter", "store_handed_late", "Requests that did not wait for it."),
    ("store_bytes_in_use", "gauge", "store_bytes_in_use", "Bytes that its files take."),
    ("store_bytes", "gauge", "store_bytes", "Bytes that its files may take."),
    ("store_pending_bytes", "gauge", "store_pending_bytes", "Bytes that wait to be written."),
)
# Of a fleet's router.
FLEET = (
    ("router_replicas", "gauge", "fleet_replicas", "Replicas that requests are sent to."),
    ("replicas_lost", "counter", "fleet_replicas_lost", "Times a request lost its replica."),
    ("requests_retried", "counter", "fleet_requests_retried", "Requests that were run again."),
    ("router_prompt_tokens", "counter", "fleet_prompt_tokens", "Prompt tokens that were sent."),
    (
        "router_held_tokens",
        "counter",
        "fleet_held_tokens",
        "Of those, the ones that the chosen replica was thought to hold.",
    ),
    ("router_keys", "gauge", "fleet_router_keys", "Prefixes that the router knows."),
    ("router_load_max", "gauge", "fleet_load_max", "Load of the busiest replica, in tokens."),
    ("router_load_mean", "gauge", "fleet_load_mean", "Mean load of a replica, in tokens."),
)


class Histogram:
    """Counts durations, in the buckets of SECONDS."""

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
    """The counters of a server, which only its event loop touches."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.requests: Counter[tuple[str, int]] = (
            Counter()
        )  # by path and status; 499: the client disconnected
        self.errors: Counter[str] = Counter()  # by code
        self.endings: Counter[str] = Counter()  # of completions, by finish_reason
        self.rejected = 0
        self.ignored_fields = 0
        self.first_token, self.between_tokens, self.whole = Histogram(), Histogram(), Histogram()
        self._ends: deque[float] = deque(maxlen=RECENT)

    def ended(self, output: RequestOutput, seconds: float) -> None:
        """Count a request that has ended without an error."""
        self.whole.add(seconds)
        self.endings.update(str(done.finish_reason) for done in output.outputs)
        self._ends.extend([time.monotonic()] * len(output.outputs))

    def seconds_to_wait(self, completions: int) -> int:
        """Return about how many seconds it takes until so many more completions have ended, from 1
        to LONGEST_WAIT_S.
        """
        if len(self._ends) < 2:
            return 1
        span = max(time.monotonic() - self._ends[0], 0.001)
        wait = math.ceil(completions * span / len(self._ends))
        return min(max(wait, 1), LONGEST_WAIT_S)

    def text(
        self, stats: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> str:
        """Return all metrics in Prometheus' text format. stats: the engine's, or a fleet's.
        replicas: those of each replica of a fleet, which have names of their own, so that a sum
        counts nothing twice.
        """
        return "".join(f"{line}\n" for line in self._lines(stats, replicas or {}))

    def _lines(
        self, stats: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[str]:
        def head(kind: str, name: str, help: str) -> Iterator[str]:
            yield f"# HELP {name} {help}"
            yield f"# TYPE {name} {kind}"

        for key, kind, name, help in ENGINE:
            name = f"jpaged_{name}_total" if kind == "counter" else f"jpaged_{name}"
            yield from head(kind, name, help)
            yield f"{name} {stats.get(key, 0)}"
        for key, kind, name, help in ENGINE if replicas else ():
            name = f"jpaged_replica_{name}" + ("_total" if kind == "counter" else "")
            yield from head(kind, name, f"Of each replica. {help}")
            for replica, of_replica in sorted(replicas.items()):
                yield f'{name}{{replica="{replica}"}} {of_replica.get(key, 0)}'
        for key, kind, name, help in FLEET if "router_replicas" in stats else ():
            name = f"jpaged_{name}_total" if kind == "counter" else f"jpaged_{name}"
            yield from head(kind, name, help)
            yield f"{name} {stats.get(key, 0)}"
        name = "jpaged_http_requests_total"
        yield from head(
            "counter", name, "Requests answered; status 499: the client had disconnected."
        )
        for (path, status), count in sorted(self.requests.items()):
            yield f'{name}{{path="{path}",status="{status}"}} {count}'
        name = "jpaged_http_errors_total"
        yield from head("counter", name, "Requests answered with an error, by its code.")
        for code, count in sorted(self.errors.items()):
            yield f'{name}{{code="{code}"}} {count}'
        name = "jpaged_completions_total"
        yield from head("counter", name, "Completions by finish_reason.")
        for reason, count in sorted(self.endings.items()):
            yield f'{name}{{finish_reason="{reason}"}} {count}'
        name = "jpaged_http_rejected_total"
        yield from head("counter", name, "Requests refused because too many were waiting.")
        yield f"{name} {self.rejected}"
        name = "jpaged_http_ignored_fields_total"
        yield from head(
            "counter", name, "Requests with an unknown field, which was ignored, by field."
        )
        yield f"{name} {self.ignored_fields}"
        histograms = (
            (
                "time_to_first_token",
                self.first_token,
                "Of streams, from the body to the first piece.",
            ),
            ("time_between_pieces", self.between_tokens, "Of streams, between two pieces."),
            ("request", self.whole, "From the body to the end of a prompt's completions."),
        )
        for short, histogram, help in histograms:
            name = f"jpaged_{short}_seconds"
            yield from head("histogram", name, help)
            yield from histogram.lines(name)
        name = "jpaged_start_time_seconds"
        yield from head("gauge", name, "Time at which the server started, in seconds since 1970.")
        yield f"{name} {self.started_at:.3f}"


class Watch:
    """Takes the times of one HTTP request. record: what logs and traces say of it."""

    def __init__(self, metrics: Metrics, arrived: float, record: RequestRecord):
        self._metrics, self._arrived, self._record = metrics, arrived, record
        self._last: dict[tuple[int, int], float] = {}

    def chunk(self, prompt: int, chunk: CompletionChunk) -> None:
        """Note that a piece of a stream has arrived."""
        now, key = time.monotonic(), (prompt, chunk.index)
        last = self._last.get(key)
        if last is None:
            self._metrics.first_token.add(now - self._arrived)
            self._record.first_token()
        else:
            self._metrics.between_tokens.add(now - last)
        self._last[key] = now

    def ended(self, output: RequestOutput) -> RequestOutput:
        """Count an output, and return it."""
        self._metrics.ended(output, time.monotonic() - self._arrived)
        self._record.ended(output)
        return output
