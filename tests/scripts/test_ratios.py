"""scripts/ratios.py: its table says where trainer and rollout agree, and where they do not."""

import re

import pytest
import ratios

SMALL = ["--prompts", "4", "--prompt-length", "5", "--max-tokens", "12", "--top-k", "16"]


def table(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, list[str]]:
    assert ratios.main(["--random", "tiny", *SMALL, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    cells = [re.split(r"\s{2,}| (?=\d|- )", line.strip()) for line in lines]
    return {name: rest for name, *rest in cells}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = table(capsys, "--dtype", "float32")
    assert list(found) == ["as drawn", "exact", "filter", "filter, mask", "filter, mask, exact"]
    for name in ("as drawn", "filter, mask"):
        mean, largest = map(float, found[name][:2])
        assert mean == pytest.approx(1, abs=1e-4) and largest < 1e-3
    assert float(found["filter"][0]) < 0.97 and float(found["filter"][1]) > 0.03
    assert "float32" in " ".join(found["exact"]), "the reason why it is left out"


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, error in (([], "give either"), (["--random", "tiny", "--prompts", "0"], "prompts")):
        with pytest.raises(SystemExit):
            ratios.main(flags)
        assert error in capsys.readouterr().err
