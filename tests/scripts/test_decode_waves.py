"""scripts/decode_waves.py: a model that must at least be right where the answer is plain."""

import decode_waves
import pytest
from decode_waves import CARDS, END, START, TURN, Card, clocks, items_of, seconds, shares

CARD = Card(bandwidth=1e9, clock=1e9)


def test_one_thread_block_is_its_phases() -> None:
    """The bandwidth where it can take it, its own rate where it cannot."""
    assert seconds([[1e6]], 4, CARD, 1e12) == pytest.approx(START + 1e-3 + END)
    assert seconds([[1e6, 2e6]], 4, CARD, 1e8) == pytest.approx(START + 3e-2 + TURN + END)


def test_those_that_run_share_the_bandwidth_and_others_wait() -> None:
    alone = START + END
    assert seconds([[1e6]] * 4, 4, CARD, 1e12) == pytest.approx(alone + 4e-3)
    assert seconds([[1e6]] * 4, 2, CARD, 1e12) == pytest.approx(2 * (alone + 2e-3))


def test_items_hold_each_tile_once() -> None:
    items = items_of([1000, 65], 2, 128, 3)
    assert sum(items) == 2 * (16 + 2) * 64 * 4 * 128
    assert items[:4] == [6 * 64 * 512] * 4 and items[-2:] == [0, 0]


@pytest.mark.parametrize(
    ("name", "was", "now", "turns"),
    [("8 x 8192", 0.83, 0.95, 0.95), ("256 x 512", 0.71, 0.71, 0.94)],
)
def test_what_splits_and_turns_bring(name: str, was: float, now: float, turns: float) -> None:
    found = shares(*decode_waves.CASES[name], card=CARDS["H200"])
    assert found["blocks"] == pytest.approx(was, abs=0.01)
    assert found["splits"] == pytest.approx(now, abs=0.01)
    assert found["turns"] == pytest.approx(turns, abs=0.02)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 8), (64, 16), (64, 32), (128, 8), (128, 16), (256, 8)]
)
def test_8_bits_are_as_fast_as_memory(card: str, head_dim: int, group: int) -> None:
    assert shares([2048] * 128, 8, head_dim, group, card=CARDS[card])["turns"] > 0.85


def test_8_bits_are_fewer_bytes_that_take_as_long_to_compute() -> None:
    """A slot is 2 D bytes and two scales. Where computing bounds, the share is what it leaves; with
    memory that is slow enough it is that of 16 bits.
    """
    assert sum(items_of([130], 1, 128, 2, True)) == 3 * 64 * (2 * 128 + 8)
    rows = [2048] * 128
    fast = shares(rows, 8, 128, 8, card=Card(bandwidth=10e12, clock=1.9e9))["turns"]
    computed = 2 * 132 * 64 * 264 * 1.9e9 / clocks(128, 8, True) / 10e12
    assert 0.9 * computed < fast < computed < 0.6
    slow = Card(bandwidth=1e12, clock=1.9e9)
    in_8_bits, in_16 = (shares(rows, 8, 128, x, card=slow)["turns"] for x in (8, None))
    assert in_8_bits == pytest.approx(in_16, abs=0.01)


def test_a_tile_takes_what_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing; widening after it, where there is one place; what two thread blocks issue."""
    tiles = {
        (128, 16, True): decode_waves.Tile(100, 200, widening=300, places=1),
        (64, 8, True): decode_waves.Tile(900, 100, widening=300),
        (64, 8, False): decode_waves.Tile(100, 200),
    }
    monkeypatch.setattr(decode_waves, "TILES", tiles)
    assert clocks(64, 5, False) == 100 + 200 + 470 + 100
    assert clocks(128, 9, True) == 2 * 109568 / 128  # shared memory
    monkeypatch.setattr(decode_waves, "SHARED", 1e9)
    assert clocks(128, 9, True) == (100 + 200 + 603 + 100) + (300 + 250)
    assert clocks(64, 8, True) == 2 * (900 + 300)


def test_prints_a_line_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_waves, "CASES", {"2 x 100": ([100, 100], 1, 64, None)})
    assert decode_waves.main(["--card", "H100"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("H100 2 x 100")
