"""From patches to embeddings: ImageEncoder runs a vision tower over images, several in a call, in
one compiled program a bucket; `encode_images` is all of it, from sources to embeddings.
"""

import bisect
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jpaged.errors import ConfigError, RequestError
from jpaged.images.cache import EmbeddingCache
from jpaged.images.limits import DEFAULT_LIMITS, ImageLimits
from jpaged.images.prepare import ImagePreparer
from jpaged.images.sources import ImageSource, load_image
from jpaged.images.spans import ImageSpan, Prepared, packed, rows_grid
from jpaged.models.layers.linear import StepContext
from jpaged.models.params import Params, parameters
from jpaged.models.quantized import is_quantized
from jpaged.models.vision.tower import Encoded, Patches, Tower, VisionConfig
from jpaged.runtime.choices import choose_products


@jax.jit
def run_tower(tower: Tower, patches: Patches, step: StepContext) -> Encoded:
    """Run a tower; compiled once a form of weights and a bucket."""
    return tower(patches, step)


class ImageEncoder:
    """Encodes images by a tower whose weights are an argument, so that new ones compile nothing.

    buckets: the numbers of rows of embeddings that a program is compiled for; None: those of the
    config. step: how products are computed. alone: an image is never encoded beside others, so that
    the bits of its embeddings depend on the image alone.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        buckets: Sequence[int] | None = None,
        step: StepContext | None = None,
        alone: bool = False,
    ):
        self.config, self.alone = config, alone
        self.buckets = tuple(sorted(set(config.buckets if buckets is None else buckets)))
        if not self.buckets or self.buckets[0] < 1:
            raise ConfigError(f"buckets={buckets!r}: must be numbers of rows of at least 1")
        self.step = StepContext() if step is None else step
        self.images, self.calls = 0, 0
        self.rows, self.padded_rows = 0, 0

    def check(self, image: Prepared) -> None:
        """RequestError for an image of more rows than the largest bucket."""
        rows = rows_grid(image.grid, self.config).size
        if rows > self.buckets[-1]:
            raise RequestError(
                f"an image of {rows} rows of embeddings ({image.grid.t} x {image.grid.h} x "
                f"{image.grid.w} patches): the largest of buckets={self.buckets} is "
                f"{self.buckets[-1]}; send fewer pixels or frames, or take a larger bucket"
            )

    def encode(self, tower: Tower, images: Sequence[Prepared]) -> list[ImageSpan]:
        """Return the embeddings of images, in order."""
        for image in images:
            self.check(image)
        spans: list[ImageSpan] = []
        for group in self._groups(images):
            spans += self._encode(tower, group)
        return spans

    def warmup(self, tower: Tower) -> None:
        """Compile the programs of all buckets."""
        for bucket in self.buckets:
            jax.block_until_ready(run_tower(tower, packed((), self.config, bucket), self.step))

    def stats(self) -> dict[str, int]:
        """Return how much was encoded, and how much of it was padding."""
        return {
            "images_encoded": self.images,
            "image_calls": self.calls,
            "image_rows": self.rows,
            "image_rows_padded": self.padded_rows,
        }

    def _groups(self, images: Sequence[Prepared]) -> list[list[Prepared]]:
        """Return neighbours that fit the largest bucket together."""
        groups: list[list[Prepared]] = []
        total = 0
        for image in images:
            rows = rows_grid(image.grid, self.config).size
            if self.alone or not groups or total + rows > self.buckets[-1]:
                groups.append([])
                total = 0
            groups[-1].append(image)
            total += rows
        return groups

    def _encode(self, tower: Tower, group: list[Prepared]) -> list[ImageSpan]:
        grids = [rows_grid(image.grid, self.config) for image in group]
        total = sum(grid.size for grid in grids)
        bucket = self.buckets[bisect.bisect_left(self.buckets, total)]
        encoded = jax.device_get(run_tower(tower, packed(group, self.config, bucket), self.step))
        self.images, self.calls = self.images + len(group), self.calls + 1
        self.rows, self.padded_rows = self.rows + total, self.padded_rows + bucket - total
        spans, start = [], 0
        for image, grid in zip(group, grids, strict=True):
            end, deep = start + grid.size, encoded.deepstack_JRE
            # Copies, so that a span that is kept does not keep its neighbours and the padding.
            span = ImageSpan(
                embeddings=np.array(encoded.rows_RE[start:end]),
                grid=grid,
                digest=image.digest,
                deepstack=None if deep is None else np.array(deep[:, start:end]),
            )
            spans.append(span)
            start = end
        return spans


def step_for(params: Params, *, deterministic: bool = False) -> StepContext:
    """Return how products are computed where params lie: by the C++ kernels of the text model's
    layers on a CPU that has them, otherwise by XLA, which also splits them over a mesh.
    deterministic: as of EngineConfig.
    """
    weights = jax.tree.leaves(params["vision"], is_leaf=is_quantized)
    array = jax.tree.leaves(weights[0])[0]
    devices = array.devices() if isinstance(array, jax.Array) else set(jax.devices()[:1])
    if len(devices) > 1:
        return StepContext()
    (device,) = devices
    products = choose_products(device, weights[0].dtype, deterministic=deterministic)
    return StepContext(products=products)


def bind_tower(params: Params) -> Tower:
    """Return the vision tower of params; ConfigError where they have none."""
    config = params.config.vision
    if config is None:
        raise ConfigError(
            f"params of {params.config.family} have no vision tower: load_params(FOLDER, "
            "images=True) reads one where the files have it"
        )
    return config.build(parameters(params.config, params))


def encode_images(
    params: Params,
    images: Sequence[ImageSource],
    *,
    preparer: ImagePreparer | None = None,
    encoder: ImageEncoder | None = None,
    cache: EmbeddingCache | None = None,
    weights: Hashable = None,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> list[ImageSpan]:
    """Return the embeddings of images, in order; one that occurs twice is encoded once.

    params: with a vision tower (load_params(FOLDER, images=True)). images: bytes, paths, data:
    URLs, arrays or Pillow's images. preparer: None is that of the folder that the params came from.
    encoder: None is one of the config's buckets. cache: where embeddings are looked up and kept;
    weights: what tells these weights from others there. RequestError for an image that cannot be
    taken.
    """
    vision, tower = params.config.vision, bind_tower(params)
    assert vision is not None
    if preparer is None:
        if params.source is None:
            raise ConfigError("params of no known folder: pass preparer=ImagePreparer(FOLDER, ...)")
        preparer = ImagePreparer(params.source, vision)
    encoder = ImageEncoder(vision, step=step_for(params)) if encoder is None else encoder
    pixels = [load_image(source, limits) for source in images]
    digests = [preparer.digest(x) for x in pixels]
    spans: dict[bytes, ImageSpan] = {}
    missing: dict[bytes, Any] = {}
    for digest, x in zip(digests, pixels, strict=True):
        if digest in spans or digest in missing:
            continue
        kept = None if cache is None else cache.get(digest, weights)
        if kept is None:
            missing[digest] = x
        else:
            spans[digest] = kept
    for span in encoder.encode(tower, [preparer.prepare(x) for x in missing.values()]):
        spans[span.digest] = span
        if cache is not None:
            cache.put(span, weights)
    return [spans[digest] for digest in digests]
