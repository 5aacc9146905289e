"""The compact set does what Python's does, in a quarter of the memory."""

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.integrations.batch import compact
from jpaged.integrations.batch.compact import IdSet


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=3), max_size=200), st.sampled_from([0, 3, 1 << 12]))
def test_id_set(monkeypatch: pytest.MonkeyPatch, texts: list[str], fewest: int) -> None:
    monkeypatch.setattr(compact, "FEWEST", fewest)
    found, wanted = IdSet(), set[str]()
    for text in texts:
        assert found.add(text) == (text not in wanted)
        wanted.add(text)
        assert len(found) == len(wanted)


def test_digests_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal beginnings, and zeros at either end: numpy's strings drop those at the end."""
    digests = [bytes(16), bytes(15) + b"a", b"a" + bytes(15), b"a" * 16, b"a" * 15 + bytes(1)]
    monkeypatch.setattr(compact, "FEWEST", 2)
    monkeypatch.setattr(compact.xxhash, "xxh3_128_digest", lambda data: digests[int(data)])
    found = IdSet()
    assert [found.add(str(i)) for i in (*range(5), *range(5))] == [True] * 5 + [False] * 5


def test_memory() -> None:
    tracemalloc.start()
    try:
        ids = IdSet()
        for i in range(20_000):
            assert ids.add(f"request-{i}")
        assert not any(ids.add(f"request-{i}") for i in range(0, 20_000, 7))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000 * 50 and peak < 20_000 * 100
