"""EmbeddingCache: embeddings of images that were encoded before, by content."""

import threading
from collections import OrderedDict
from collections.abc import Hashable

from jpaged.errors import ConfigError
from jpaged.images.spans import ImageSpan


class EmbeddingCache:
    """Embeddings of images by their digests, the least recently used given up first. It may be used
    from any thread.

    budget: bytes of embeddings that are kept at most; 0 keeps none. weights: in `get` and `put`,
    what tells the tower's weights from others; those of other weights are given up at the first
    `put` of new ones.
    """

    def __init__(self, budget: int):
        if isinstance(budget, bool) or budget < 0:
            raise ConfigError(f"budget={budget!r}: bytes of embeddings, 0 or more")
        self.budget = budget
        self._lock = threading.Lock()
        self._spans: OrderedDict[bytes, ImageSpan] = OrderedDict()
        self._weights: Hashable = None
        self._bytes = self._hits = self._misses = self._evicted = 0

    def get(self, digest: bytes, weights: Hashable = None) -> ImageSpan | None:
        """Return the embeddings of an image; None where they are not kept. Counts either."""
        with self._lock:
            span = self._spans.get(digest) if weights == self._weights else None
            if span is None:
                self._misses += 1
                return None
            self._spans.move_to_end(digest)
            self._hits += 1
            return span

    def has(self, digest: bytes, weights: Hashable = None) -> bool:
        """Return whether `get` would find an image. Counts nothing."""
        with self._lock:
            return weights == self._weights and digest in self._spans

    def put(self, span: ImageSpan, weights: Hashable = None) -> None:
        """Keep the embeddings of an image, unless they alone are over the budget."""
        with self._lock:
            if weights != self._weights:
                self._drop_all()
                self._weights = weights
            if span.nbytes > self.budget:
                return
            if (old := self._spans.pop(span.digest, None)) is not None:
                self._bytes -= old.nbytes
            self._spans[span.digest] = span
            self._bytes += span.nbytes
            while self._bytes > self.budget:
                _, dropped = self._spans.popitem(last=False)
                self._bytes -= dropped.nbytes
                self._evicted += 1

    def clear(self) -> None:
        """Give up all of them."""
        with self._lock:
            self._drop_all()

    def _drop_all(self) -> None:
        self._spans.clear()
        self._bytes = 0

    def stats(self) -> dict[str, int]:
        """Return counts of hits, misses and evictions, and what is kept."""
        with self._lock:
            return {
                "image_cache_hits": self._hits,
                "image_cache_misses": self._misses,
                "image_cache_evicted": self._evicted,
                "image_cache_images": len(self._spans),
                "image_cache_bytes": self._bytes,
            }
