"""The counters of a run as Prometheus reads them."""

import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

from jpaged.integrations.batch.metrics import serve_metrics
from jpaged.integrations.batch.source import BatchError
from jpaged.integrations.batch.stats import BatchStats
from jpaged.request.outputs import RequestOutput
from tests.integrations.batch.test_report import make_stats

parser: Any = pytest.importorskip("prometheus_client.parser")


class Engine:
    """The counters of an LLM that has come some way."""

    def stats(self) -> dict[str, Any]:
        return {
            "prefill_tokens": 700,
            "decode_tokens": 300,
            "preemptions": 4,
            "num_blocks": 64,
            "blocks_in_use": 10,
        }


def scrape(port: int) -> tuple[dict[str, Any], dict[tuple[str, str], float]]:
    """Families by name, and samples by name and the value of their only label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        families = {
            f.name: f for f in parser.text_string_to_metric_families(response.read().decode())
        }
    samples = [sample for family in families.values() for sample in family.samples]
    return families, {(s.name, "".join(s.labels.values())): s.value for s in samples}


def test_a_scrape_has_every_counter_and_sees_it_move() -> None:
    stats = make_stats()
    stats.watch(Engine())
    stats.running = 12
    with serve_metrics(stats, "127.0.0.1", 0) as port:
        families, found = scrape(port)
        assert all(
            f.name.startswith("jpaged_") and f.documentation and f.type in ("counter", "gauge")
            for f in families.values()
        )
        assert (
            found["jpaged_requests_total", "ok"] == stats.ok
            and found["jpaged_requests_total", "failed"] == 37
        )
        assert found["jpaged_request_errors_total", "invalid_json"] == 7
        assert found["jpaged_completions_total", "length"] == 300
        assert (
            found["jpaged_requests_running", ""] == 12
            and found["jpaged_requests_expected", ""] == 2000
        )
        assert found["jpaged_prompt_tokens_total", ""] == stats.tokens_in
        assert found["jpaged_generated_tokens_total", ""] == stats.tokens_out
        assert found["jpaged_cached_prompt_tokens_total", ""] == 0
        assert (
            found["jpaged_prefill_tokens_total", ""] == 700
            and found["jpaged_decode_tokens_total", ""] == 300
        )
        assert found["jpaged_preemptions_total", ""] == 4
        assert found["jpaged_kv_blocks", ""] == 64 and found["jpaged_kv_blocks_in_use", ""] == 10
        rate = found["jpaged_throughput_tokens_per_second", "out"]
        assert rate == pytest.approx(stats.tokens_out / stats.seconds)
        stats.fail(5, "late")
        output = RequestOutput(
            request_id="a", prompt=None, prompt_token_ids=[1, 2], outputs=[], num_cached_tokens=1
        )
        stats.add(output, 0.5)
        _, later = scrape(port)
        assert (
            later["jpaged_requests_total", "failed"] == 38
            and later["jpaged_request_errors_total", "generation_failed"] == 1
        )
        assert later["jpaged_cached_prompt_tokens_total", ""] == 1
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_run_of_unknown_length_expects_nothing_and_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            BatchError, match=rf"--metrics-port {port}: cannot listen on 127\.0\.0\.1"
        ):
            serve_metrics(BatchStats(), "127.0.0.1", port).__enter__()
    with serve_metrics(BatchStats(), "127.0.0.1", 0) as port:
        _, found = scrape(port)
    assert ("jpaged_requests_expected", "") not in found and found[
        "jpaged_requests_total", "ok"
    ] == 0
