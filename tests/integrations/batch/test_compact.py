"""The compact sets do what Python's sets do, in a tenth of the memory."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from jpaged.integrations.batch import compact
from jpaged.integrations.batch.compact import IdSet, LineSet


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300))), st.sets(st.integers(0, 400)))
def test_line_set(changes: list[tuple[bool, int]], cut: set[int]) -> None:
    found, wanted = LineSet(), set[int]()
    for adds, number in changes:
        if adds:
            found.add(number)
            wanted.add(number)
        else:
            found.remove(number)
            wanted.discard(number)
    assert len(found) == len(wanted)
    assert [n for n in range(400) if n in found] == sorted(wanted)
    other = LineSet()
    for number in cut:
        other.add(number)
    left = found - other
    assert len(left) == len(wanted - cut) and [n for n in range(400) if n in left] == sorted(
        wanted - cut
    )


@given(st.lists(st.text(max_size=3), max_size=200))
def test_id_set(texts: list[str]) -> None:
    found, wanted = IdSet(), set[str]()
    for text in texts:
        assert found.add(text) == (text not in wanted)
        wanted.add(text)
    assert len(found) == len(wanted)


def test_ids_that_land_in_one_slot(monkeypatch) -> None:
    digests = {"a": 5, "b": 5 | 1 << 64, "c": 5 | 2 << 64, "d": 0, "e": 1 << 10 | 5}
    monkeypatch.setattr(compact.xxhash, "xxh3_128_intdigest", lambda data: digests[data.decode()])
    found = IdSet()
    assert [found.add(x) for x in "abcabdd"] == [
        True,
        False,
        True,
        False,
        False,
        True,
        False,
    ]  # a and b: high of 1
    assert found.add("e") and len(found) == 4


def test_memory() -> None:
    tracemalloc.start()
    try:
        ids, lines = IdSet(), LineSet()
        for i in range(50_000):
            assert ids.add(f"request-{i}")
            lines.add(i)
        assert not any(ids.add(f"request-{i}") for i in range(0, 50_000, 7))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 50_000 * 50 and peak < 50_000 * 100
