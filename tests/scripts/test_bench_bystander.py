"""bench_bystander: it runs, and says what it found."""

import json
from typing import Any

import bench_bystander
import pytest

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")


@pytest.mark.middle
def test_a_run(capsys: Any) -> None:
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    sizes += ["--token-buckets", "64", "--seq-buckets", "4"]
    assert bench_bystander.main(["--most", "600", "--scale", "0.05", "--server", *sizes]) == 0
    said = capsys.readouterr().out
    last = json.loads(said.splitlines()[-1])
    assert last["beside"].keys() == bench_bystander.heavy_requests(0.05).keys()
    assert all(0 < waited["longest"] < 600 for waited in last["beside"].values())
    assert "a text that is far too long: status 400" in said
    assert bench_bystander.main(["/no/such/folder"]) == 1
