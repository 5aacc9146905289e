"""scripts/bench_gap.py: both ways run to their ends and are put side by side."""

import json

import bench_gap
import pytest


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "2", "--context", "4", "--tokens", "12", "--prompt", "40", "--rounds", "1"]
    settings = ["--max-num-batched-tokens", "16", "--block-size", "8"]
    assert bench_gap.main(["--random", "tiny", *sizes, *settings]) == 0
    heads, apart, mixed, line = capsys.readouterr().out.splitlines()
    names = list(json.loads(line)["apart"])
    assert heads.split() == ["steps", *names]
    assert (apart.split()[0], mixed.split()[0]) == ("apart", "mixed")
    for row in (apart, mixed):
        figures = dict(zip(names, map(float, row.split()[1:]), strict=True))
        assert figures["longest_ms"] >= figures["mean_ms"] > 0
        assert figures["first_token_s"] > 0 and figures["output_tok_s"] > 0
