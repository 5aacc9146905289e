"""What people look at while a run lasts and when it is over: --metrics-port and --report, end to
end.
"""

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.batch_engine import FakeLLM, serve


class Watched(FakeLLM):
    """Reads its run's metrics in the middle of it."""

    def __init__(self, port: int):
        super().__init__()
        self.port, self.seen = port, ""

    def step(self) -> list[Any]:
        outputs = super().step()
        if self.steps == 3:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/metrics", timeout=30
            ) as response:
                self.seen = response.read().decode()
        return outputs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_prometheus_sees_a_run_and_the_page_tells_of_it(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    lines = [{"prompt": f"<u>{i}</u>"} for i in range(20)]
    source = write_lines(tmp_path / "in.jsonl", ["{<script>broken</script>", *lines])
    page, llm = tmp_path / "report.html", Watched(free_port())
    flags = ("--report", page, "--metrics-port", llm.port, "--window", 4, "--temperature", 0.5)
    assert serve(source, "--output", tmp_path / "out.jsonl", *flags, llm=llm) == 2
    assert (
        'jpaged_requests_total{outcome="failed"} 1.0' in llm.seen
        and "jpaged_requests_running 3.0" in llm.seen
    )
    text = page.read_text()
    assert (
        re.search(r"&lt;u&gt;\d+&lt;/u&gt;", text)
        and not re.search(r"<u>", text)
        and "<script" not in text
    )
    for part in (
        "Batch run: out.jsonl",
        "invalid_json",
        "temperature",
        "0.5",
        str(source),
        "20 ok, 1 failed",
        "<svg",
    ):
        assert part in text


def test_a_report_that_cannot_be_written_and_a_port_in_use_are_said_at_once(
    tmp_path: Path, capsys: Any
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with pytest.raises(SystemExit):
        serve(source, "--report", tmp_path / "none" / "r.html")
    assert "no such folder" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve(source, "--output", "-", "--metrics-port", port) == 1
    assert f"--metrics-port {port}: cannot listen" in capsys.readouterr().err
