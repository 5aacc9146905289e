"""ImageRows: the embeddings of images, which the vision tower makes when a step first needs them.

An image whose blocks are all found in the prefix cache is never encoded, and one that was encoded
before is looked up by its digest. What is kept is of one version of the weights: after new ones,
images are encoded again.
"""

import time
from typing import Any

import jax

from jpaged.config import EngineConfig
from jpaged.engine.spans import Piece, Span
from jpaged.images.cache import EmbeddingCache
from jpaged.images.encode import ImageEncoder
from jpaged.images.spans import ImageSpan, Prepared
from jpaged.models.config import ModelConfig
from jpaged.models.layers.linear import StepContext
from jpaged.models.vision.tower import Tower, VisionConfig
from jpaged.runtime.choices import Choices, tower_step
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import put
from jpaged.runtime.transfers import Transfers

GIB = 2**30


def most_image_tokens(vision: VisionConfig, config: EngineConfig) -> int:
    """Return how many rows of embeddings an image has at most. config: resolved."""
    assert config.max_model_len is not None
    return min(config.max_image_tokens or vision.buckets[-1], config.max_model_len)


def tower_buckets(vision: VisionConfig, config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of rows that the tower is compiled for. config: resolved."""
    most = most_image_tokens(vision, config)
    return (*(size for size in vision.buckets if size < most), most)


def tower_scratch(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of a device that the tower's largest call takes beside its weights; 0 where
    no prompt may have images. config: resolved.
    """
    if not config.images or model.vision is None:
        return 0
    return model.vision.scratch(tower_buckets(model.vision, config)[-1])


class ImageRows:
    """Encodes the images of one runner's steps. choices: what multiplies. seconds: of compiles, by
    name; where those of the tower are noted.
    """

    def __init__(
        self,
        vision: VisionConfig,
        config: EngineConfig,
        placement: Placement,
        choices: Choices,
        transfers: Transfers,
        seconds: dict[Any, float],
    ):
        is_one = placement.mesh is None
        self.encoder = ImageEncoder(
            vision,
            buckets=tower_buckets(vision, config),
            step=tower_step(placement.device, choices.products) if is_one else StepContext(),
            alone=bool(config.deterministic),
            sharding=None if is_one else placement.replicated,
            put=put,
        )
        self.cache = EmbeddingCache(int(config.image_cache_gib * GIB))
        self._transfers, self._seconds = transfers, seconds
        self._last: dict[bytes, ImageSpan] = {}  # of the step before, if the cache has no room
        self._version = 0

    def encoded(self, pieces: tuple[Piece, ...], tower: Tower, version: int) -> tuple[Piece, ...]:
        """Return parts of spans with the embeddings of those that are of images. tower, version: of
        the weights that are served.
        """
        images = {p.span.digest: p.span.image for p in pieces if isinstance(p.span.image, Prepared)}
        if not images:
            return pieces
        if version != self._version:
            self._last, self._version = {}, version
        rows = {digest: self._kept(digest, version) for digest in images}
        missing = [image for digest, image in images.items() if rows[digest] is None]
        if missing:
            for span in self._encode(tower, missing):
                rows[span.digest] = span
                self.cache.put(span, version)
        self._last = {digest: span for digest, span in rows.items() if span is not None}
        return tuple(
            piece if piece.span.image is None else _with_rows(piece, self._last[piece.span.digest])
            for piece in pieces
        )

    def compile(self, pieces: tuple[Piece, ...], tower: Tower, version: int) -> None:
        """Compile the tower for what `encoded` would encode of the same."""
        images = {p.span.digest: p.span.image for p in pieces if isinstance(p.span.image, Prepared)}
        last = self._last if version == self._version else {}
        missing = [
            image
            for digest, image in images.items()
            if digest not in last and not self.cache.has(digest, version)
        ]
        for bucket in self.encoder.needed(missing):
            self._compile(tower, bucket)

    def warmup(self, tower: Tower) -> None:
        """Compile the tower for all of its buckets."""
        for bucket in self.encoder.buckets:
            self._compile(tower, bucket)

    def report(self) -> dict[str, Any]:
        """Return what was encoded, and what is kept."""
        return {**self.encoder.stats(), **self.cache.stats()}

    def _kept(self, digest: bytes, version: int) -> ImageSpan | None:
        last = self._last.get(digest)
        return self.cache.get(digest, version) if last is None else last

    def _encode(self, tower: Tower, images: list[Prepared]) -> list[ImageSpan]:
        for bucket in self.encoder.needed(images):
            self._compile(tower, bucket)
        before = self.encoder.calls
        # Both ways at once: the host waits for what it puts into the pool.
        with jax.transfer_guard("allow"):
            spans = self.encoder.encode(tower, images)
        self._transfers.ups += self.encoder.calls - before
        self._transfers.downs += self.encoder.calls - before
        return spans

    def _compile(self, tower: Tower, bucket: int) -> None:
        if bucket in self.encoder.programs:
            return
        began = time.perf_counter()
        self.encoder.compile(tower, bucket)
        self._seconds[f"encode_images {bucket}"] = time.perf_counter() - began


def _with_rows(piece: Piece, image: ImageSpan) -> Piece:
    span = Span(
        start=piece.span.start,
        embeddings=image.embeddings,
        deepstack=image.deepstack,
        grid=piece.span.grid,
        digest=piece.span.digest,
    )
    return piece._replace(span=span)
