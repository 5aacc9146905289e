"""`guidellm` against a server: a benchmark whose requests all succeed. It wants a torch, which it
needs for its data loaders alone, and another click: GUIDELLM names the command of an environment of
its own.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jpaged.demo import MODEL_PATH
from tests.clients.served import KEY, demo

pytestmark = pytest.mark.clients
COMMAND = shutil.which(os.environ.get("GUIDELLM", "guidellm"))


@pytest.mark.skipif(COMMAND is None, reason="there is no guidellm: GUIDELLM=/path/to/guidellm")
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_benchmark(tmp_path: Path, route: str) -> None:
    assert COMMAND is not None
    with demo() as live:
        backend = f"kind=openai_http,target=http://127.0.0.1:{live.port},model=demo,api_key={KEY}"
        command = [COMMAND, "run", "--disable-console-interactive"]
        command += ["--backend", f"{backend},request_format={route}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL_PATH}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
        command += ["--profile", "kind=concurrent,streams=4"]
        command += ["--constraint", "kind=max_requests,count=12"]
        command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
    report: Any = json.loads((tmp_path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0), totals
