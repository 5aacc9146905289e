"""Serves a run's counters to Prometheus over HTTP while the run lasts. It needs prometheus_client:
pip install 'jpaged[metrics]'.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.integrations.batch.source import BatchError
from jpaged.integrations.batch.stats import BatchStats


class Collector:
    """Reads the run's own counters on request, so nothing is counted twice and the engine is not
    touched.
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
        """Yield (kind, name, description, value or values by label, label) of each metric."""
        stats, engine = self._stats, dict(self._stats.engine)
        # Another thread changes these, so they are copied before the loop.
        errors, reasons = dict(stats.errors), dict(stats.reasons)
        outcomes = {"ok": stats.ok, "failed": stats.failed}
        rates = {"in": stats.tokens_in / stats.seconds, "out": stats.tokens_out / stats.seconds}

        def of_engine(name: str) -> Any:
            return engine.get(name, 0)

        lines = "Lines that this run has answered."
        yield "counter", "requests", lines, outcomes, "outcome"
        failures = "Lines that failed, by the code of their error."
        yield "counter", "request_errors", failures, errors, "code"
        ended = "Completions by finish_reason."
        yield "counter", "completions", ended, reasons, "finish_reason"
        running = "Requests in the engine, including those that wait to run."
        yield "gauge", "requests_running", running, stats.running, ""
        if stats.total is not None:
            whole = "Lines of the whole run, an estimate until all have been read."
            yield "gauge", "requests_expected", whole, stats.total, ""
        done = "Lines that have an answer, including earlier runs."
        yield "gauge", "requests_done", done, stats.done, ""
        prompts = "Prompt tokens of the answered lines."
        yield "counter", "prompt_tokens", prompts, stats.tokens_in, ""
        cached = "Prompt tokens of the answered lines that were found in the prefix cache."
        yield "counter", "cached_prompt_tokens", cached, stats.tokens_cached, ""
        generated = "Generated tokens of the answered lines."
        yield "counter", "generated_tokens", generated, stats.tokens_out, ""
        for phase in ("prefill", "decode"):  # these change with every step
            computed = f"Tokens that the engine has computed in {phase} steps."
            yield "counter", f"{phase}_tokens", computed, of_engine(f"{phase}_tokens"), ""
        average = "Seconds per answered line on average."
        yield "gauge", "throughput_tokens_per_second", average, rates, "direction"
        preempted = "Sequences preempted because KV blocks were short."
        yield "counter", "preemptions", preempted, of_engine("preemptions"), ""
        yield "gauge", "kv_blocks", "KV blocks of the pool.", of_engine("num_blocks"), ""
        held = "KV blocks that running sequences hold."
        yield "gauge", "kv_blocks_in_use", held, of_engine("blocks_in_use"), ""
        began = "Time at which the run began, in seconds since 1970."
        yield "gauge", "run_start_time_seconds", began, stats.began_at, ""


@contextlib.contextmanager
def serve_metrics(stats: BatchStats, host: str, port: int) -> Iterator[int]:
    """Answer GET /metrics from a thread until the block ends. Yields the port, which is a free one
    for port 0.

    Raises BatchError if it cannot listen.
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
