"""encode_images: from images wherever they are to the rows of embeddings that a vision tower makes
of them, without an engine.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jpaged.errors import ConfigError
from jpaged.images.cache import EmbeddingCache
from jpaged.images.encode import ImageEncoder, bind_tower
from jpaged.images.limits import DEFAULT_LIMITS, ImageLimits
from jpaged.images.prepare import ImagePreparer
from jpaged.images.sources import ImageSource, load_image
from jpaged.images.spans import ImageSpan
from jpaged.models.layers.linear import StepContext
from jpaged.models.params import Params
from jpaged.models.quantized import is_quantized
from jpaged.runtime.choices import choose_products, tower_step


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
    for span in encoder.encode(tower, [preparer.prepare(x, d) for d, x in missing.items()]):
        spans[span.digest] = span
        if cache is not None:
            cache.put(span, weights)
    return [spans[digest] for digest in digests]


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
    return tower_step(device, products)
