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

        stats, engine = self._stats, dict(self._stats.engine)

        def metric(kind: Any, name: str, what: str, label: str, values: Mapping[str, float]) -> Any:
            family = kind(f"jpaged_{name}", what, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
            return family

        def counter(
            name: str, what: str, value: float | Mapping[str, float], label: str = ""
        ) -> Any:
            return metric(
                CounterMetricFamily,
                name,
                what,
                label,
                value if isinstance(value, Mapping) else {"": value},
            )

        def gauge(name: str, what: str, value: float | Mapping[str, float], label: str = "") -> Any:
            return metric(
                GaugeMetricFamily,
                name,
                what,
                label,
                value if isinstance(value, Mapping) else {"": value},
            )

        # Another thread changes them: copied in one go before they are gone through.
        errors, reasons = dict(stats.errors), dict(stats.reasons)
        outcomes = {"ok": stats.ok, "failed": stats.failed}
        yield counter("requests", "Lines that this run has answered.", outcomes, "outcome")
        yield counter(
            "request_errors", "Lines that failed, by the code of their error.", errors, "code"
        )
        yield counter("completions", "Completions by what ended them.", reasons, "finish_reason")
        yield gauge(
            "requests_running",
            "Requests in the engine, those that wait for a row too.",
            stats.running,
        )
        if stats.total is not None:
            yield gauge(
                "requests_expected",
                "Lines of the whole run; estimated until all are read.",
                stats.total,
            )
        yield gauge("requests_done", "Lines that have an answer, earlier runs' too.", stats.done)
        yield counter("prompt_tokens", "Prompt tokens of the answered lines.", stats.tokens_in)
        yield counter(
            "cached_prompt_tokens",
            "Those of them that were found in the cache.",
            stats.tokens_cached,
        )
        yield counter(
            "generated_tokens", "Generated tokens of the answered lines.", stats.tokens_out
        )
        for phase in ("prefill", "decode"):  # these move with every step
            value = engine.get(f"{phase}_tokens", 0)
            yield counter(
                f"{phase}_tokens", f"Tokens that the engine has computed in {phase} steps.", value
            )
        rates = {"in": stats.tokens_in / stats.seconds, "out": stats.tokens_out / stats.seconds}
        yield gauge(
            "throughput_tokens_per_second",
            "Of the answered lines, on average so far.",
            rates,
            "direction",
        )
        yield counter(
            "preemptions",
            "Sequences preempted for want of KV blocks.",
            engine.get("preemptions", 0),
        )
        yield gauge("kv_blocks", "KV blocks of the pool.", engine.get("num_blocks", 0))
        yield gauge(
            "kv_blocks_in_use",
            "KV blocks that running sequences hold.",
            engine.get("blocks_in_use", 0),
        )
        yield gauge(
            "run_start_time_seconds", "When the run began, in seconds since 1970.", stats.began_at
        )


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
