"""What native products are measured to be worth: what follows from it, and that it is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels_cpu import rates
from kernels_cpu.library import unavailable
from kernels_cpu.rates import Rates


@pytest.mark.parametrize(
    ("ratios", "most", "worst"),
    [
        ({8: 0.5, 64: 0.9, 512: 1.0}, None, 1.0),
        ({8: 0.5, 64: 0.9, 512: 1.1}, 64, 1.1),
        ({8: 0.5, 64: 1.3, 512: 0.9}, 8, 1.3),  # between, XLA's may be the better ones
        ({8: 0.56, 32: 1.15, 64: 0.89, 128: 0.93, 512: 0.91}, None, 1.15),  # one was disturbed
        ({512: 2.0, 8: 1.01}, 0, 2.0),
        ({1: 0.06, 8: 1.3, 32: 2.7, 512: 5.8}, 1, 5.8),  # XLA's are better, but not of one row
    ],
)
def test_what_follows(ratios: dict[int, float], most: int | None, worst: float) -> None:
    found = Rates(ratios=ratios)
    assert (found.most_rows, found.worst) == (most, worst)


def test_measured_once_a_library_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Rates] = []

    def measure() -> Rates:
        measured.append(Rates(ratios={8: 0.5, 64: 1 + len(measured)}))
        return measured[-1]

    monkeypatch.setattr(Rates, "measured", measure)
    monkeypatch.setattr(rates, "registered", lambda: tmp_path / "kernels-avx2-1.so")
    afresh = rates.rates.__wrapped__
    assert afresh() == afresh() == measured[0] and len(measured) == 1
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("kernels-avx2-1-") and file.suffix == ".json"
    file.write_text("{")
    assert afresh() == afresh() == measured[1] and len(measured) == 2
    monkeypatch.setattr(rates, "_machine", lambda: "another")
    assert afresh() == afresh() == measured[2] and len(list(tmp_path.iterdir())) == 2


def test_where_it_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "measured", lambda: Rates(ratios={8: 0.5}))
    monkeypatch.setattr(rates, "registered", lambda: tmp_path / "gone" / "kernels-avx2-1.so")
    assert rates.rates.__wrapped__() == Rates(ratios={8: 0.5})


@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": (8, 40), "N": 64, "E": 32, "WEIGHTS": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(rates, name, value)
    ratios = Rates.measured().ratios
    assert list(ratios) == [8, 40] and all(ratio > 0 for ratio in ratios.values())


def test_a_pass_that_is_disturbed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native products take 1 s of each size and XLA's 2; in the first pass all take ten times as
    long, of size 40 native ones a hundred times.
    """
    calls: list[tuple[Any, int]] = []

    def seconds(form: Any, x: Any, weight: Any) -> float:
        calls.append((form, len(x)))
        first = len(calls) <= 2 * len(sizes) * (rates.ROUNDS + 1)
        native = form is calls[0][0]
        return (1.0 if native else 2.0) * ((100 if native and len(x) == 40 else 10) if first else 1)

    sizes = (8, 40)
    monkeypatch.setattr(rates, "ROWS", sizes)
    monkeypatch.setattr(rates, "_seconds", seconds)
    monkeypatch.setattr(rates, "_random", lambda rng, rows: np.zeros((rows, 1)))
    assert Rates.measured().ratios == {8: 0.5, 40: 0.5}
