"""scripts/bench_mixers.py: each of its models is served, and the figures are those that it says."""

import bench_mixers
import pytest


@pytest.mark.middle
def test_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    records = bench_mixers.main(["--contexts", "40", "90", "--rounds", "1", "--hidden", "128"])
    assert [(r["context"], r["model"]) for r in records] == [
        (context, name) for context in (40, 90) for name in bench_mixers.NAMES
    ]
    held = {(r["context"], r["model"]): r["row_bytes"] for r in records}
    # Blocks of 16 tokens in 4 layers in bfloat16: one key and one value of 64 numbers, or a latent
    # of 64 and a rotated key of 64.
    assert held[40, "attention"] == held[40, "latent"] == 3 * 16 * 4 * 128 * 2
    assert held[90, "attention"] == 2 * held[40, "attention"]
    states = {name: held[90, name] - held[40, name] for name in ("hybrid", "mamba")}
    assert states == dict.fromkeys(states, 3 * 16 * 128 * 2), "one layer in four grows by token"
    assert all(r["cold_s"] > 0 and r["hit_s"] > 0 and r["read_gb_s"] > 0 for r in records)
    assert "row MiB" in capsys.readouterr().out


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, error in (
        (["--hidden", "100"], "--hidden 100: must be a multiple of 128"),
        (["--models", "rnn"], "invalid choice: 'rnn'"),
    ):
        with pytest.raises(SystemExit):
            bench_mixers.main(flags)
        assert error in capsys.readouterr().err
