"""tests/engine/soak.py: a soak that passes says so; one that fails names the seed."""

import hypothesis
import pytest

from tests.engine import soak
from tests.engine.test_engine import stale_hash_entry


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "HISTORIES", 10)
    monkeypatch.setattr(soak, "RULES", 30)


def test_a_soak_that_passes(depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--depth", str(depth), "--steps", "1", "--seed", "5"]) == 0
    line, last = capsys.readouterr().out.splitlines()
    assert "seed 5: " in line and last.startswith(f"ok, depth {depth}: ")


def test_a_soak_that_fails_names_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "PHASES", (hypothesis.Phase.generate,))
    stale_hash_entry(monkeypatch)
    assert soak.main(["--depth", "1", "--steps", "100000", "--seed", "5"]) == 1
    err = capsys.readouterr().err
    assert "AssertionError" in err and "soak: depth 1, seed " in err
