"""A run's counters for Prometheus, over HTTP, while it runs. Needs prometheus_client: pip install
'jpaged[metrics]'.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.integrations.batch.source import BatchError
from jpaged.integrations.batch.stats import BatchStats


class Collector:
    """Reads the run's own counters when they are asked for: nothing is counted twice, and the
    engine is not touched.
    """

    def __init__(self, stats: BatchStats):
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for kind, name, what, values, label in self._metrics():
            family = kinds[kind](f"jpaged_{name}", what, labels=[label] if label else [])
            for key, value in (values if isinstance(values, Mapping) else {"": values}).items():
                family.add_metric([key] if label else [], value)
            yield family

    def _metrics(self) -> Iterator[tuple[str, str, str, Any, str]]:
        """(kind, name, what it is, value or values by label, label) of each."""
        stats, engine = self._stats, dict(self._stats.engine)
        # Another thread changes them: copied in one go before they are gone through.
        errors, reasons = dict(stats.errors), dict(stats.reasons)
        outcomes = {"ok": stats.ok, "failed": stats.failed}
        rates = {"in": stats.tokens_in / stats.seconds, "out": stats.tokens_out / stats.seconds}

        def of_engine(name: str) -> Any:
            return engine.get(name, 0)

        lines = "Lines that this run has answered."
        yield "counter", "requests", lines, outcomes, "outcome"
        failures = "Lines that failed, by the code of their error."
        yield "counter", "request_errors", failures, errors, "code"
        ended = "Completions by what ended them."
        yield "counter", "completions", ended, reasons, "finish_reason"
        running = "Requests in the engine, those that wait for a row too."
        yield "gauge", "requests_running", running, stats.running, ""
        if stats.total is not None:
            whole = "Lines of the whole run; estimated until all are read."
            yield "gauge", "requests_expected", whole, stats.total, ""
        done = "Lines that have an answer, earlier runs' too."
        yield "gauge", "requests_done", done, stats.done, ""
        prompts = "Prompt tokens of the answered lines."
        yield "counter", "prompt_tokens", prompts, stats.tokens_in, ""
        cached = "Those of them that were found in the cache."
        yield "counter", "cached_prompt_tokens", cached, stats.tokens_cached, ""
        generated = "Generated tokens of the answered lines."
        yield "counter", "generated_tokens", generated, stats.tokens_out, ""
        for phase in ("prefill", "decode"):  # these move with every step
            computed = f"Tokens that the engine has computed in {phase} steps."
            yield "counter", f"{phase}_tokens", computed, of_engine(f"{phase}_tokens"), ""
        average = "Of the answered lines, on average so far."
        yield "gauge", "throughput_tokens_per_second", average, rates, "direction"
        preempted = "Sequences preempted for want of KV blocks."
        yield "counter", "preemptions", preempted, of_engine("preemptions"), ""
        yield "gauge", "kv_blocks", "KV blocks of the pool.", of_engine("num_blocks"), ""
        held = "KV blocks that running sequences hold."
        yield "gauge", "kv_blocks_in_use", held, of_engine("blocks_in_use"), ""
        began = "When the run began, in seconds since 1970."
        yield "gauge", "run_start_time_seconds", began, stats.began_at, ""


@contextlib.contextmanager
def serve_metrics(stats: BatchStats, host: str, port: int) -> Iterator[int]:
    """Answer GET /metrics from a thread for as long as the block runs; yields the port, a free one
    for port 0.

    Raises BatchError where it cannot.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as e:
        raise BatchError(
            "--metrics-port needs prometheus_client: pip install 'jpaged[metrics]'"
        ) from e
    registry = CollectorRegistry()
    registry.register(Collector(stats))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as e:
        raise BatchError(f"--metrics-port {port}: cannot listen on {host}: {e}") from e
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
