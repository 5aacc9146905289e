"""EmbeddingCache: least recently used first, within its budget, from any thread."""

import threading

import numpy as np
import pytest

from jpaged.errors import ConfigError
from jpaged.images.cache import EmbeddingCache
from jpaged.images.spans import ImageSpan
from jpaged.models.vision.tower import Grid

WIDTH = 8


def span(number: int, rows: int = 2, *, deep: bool = False) -> ImageSpan:
    embeddings = np.full((rows, WIDTH), number, np.float32)
    deepstack = np.zeros((3, rows, WIDTH), np.float32) if deep else None
    digest = number.to_bytes(32, "little")
    return ImageSpan(
        embeddings=embeddings, grid=Grid(1, 1, rows), digest=digest, deepstack=deepstack
    )


SIZE = span(0).nbytes


def test_the_least_recently_used_goes_first() -> None:
    cache, spans = EmbeddingCache(3 * SIZE), [span(i) for i in range(4)]
    for x in spans[:3]:
        cache.put(x)
    assert cache.get(spans[0].digest) is spans[0]
    cache.put(spans[3])
    assert cache.get(spans[1].digest) is None
    assert all(cache.get(spans[i].digest) is spans[i] for i in (0, 2, 3))
    assert cache.stats() == {
        "image_cache_hits": 4,
        "image_cache_misses": 1,
        "image_cache_evicted": 1,
        "image_cache_images": 3,
        "image_cache_bytes": 3 * SIZE,
    }


def test_the_budget_is_in_bytes() -> None:
    assert span(0, deep=True).nbytes == 4 * SIZE
    cache = EmbeddingCache(4 * SIZE)
    for i in range(3):
        cache.put(span(i))
    cache.put(span(9, rows=9))  # more than the budget alone: nothing is given up for it
    assert cache.stats()["image_cache_images"] == 3
    cache.put(span(8, deep=True))
    assert cache.stats()["image_cache_bytes"] == 4 * SIZE
    assert cache.stats()["image_cache_evicted"] == 3
    cache.put(span(8, deep=True))  # once more: it counts once
    assert cache.stats()["image_cache_bytes"] == 4 * SIZE
    cache.clear()
    assert cache.stats()["image_cache_bytes"] == cache.stats()["image_cache_images"] == 0
    assert EmbeddingCache(0).get(span(0).digest) is None
    with pytest.raises(ConfigError, match="budget=-1"):
        EmbeddingCache(-1)


def test_other_weights() -> None:
    cache = EmbeddingCache(10 * SIZE)
    cache.put(span(1), weights=1)
    assert cache.get(span(1).digest, weights=2) is None
    assert cache.get(span(1).digest, weights=1) is not None
    cache.put(span(2), weights=2)
    assert cache.get(span(1).digest, weights=1) is None
    assert cache.get(span(1).digest, weights=2) is None
    assert cache.stats()["image_cache_bytes"] == SIZE


def test_threads() -> None:
    cache = EmbeddingCache(20 * SIZE)
    wrong: list[int] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in rng.integers(0, 60, 2000).tolist():
            got = cache.get(number.to_bytes(32, "little"))
            if got is None:
                cache.put(span(number))
            elif (got.embeddings != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert not wrong
    assert stats["image_cache_hits"] + stats["image_cache_misses"] == 16_000
    assert stats["image_cache_bytes"] == stats["image_cache_images"] * SIZE <= 20 * SIZE
    assert stats["image_cache_hits"] > 3_000
