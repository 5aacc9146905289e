"""From patches to embeddings: ImageEncoder runs a vision tower over images, several in a call, in
one compiled program a bucket.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jpaged.errors import ConfigError, RequestError
from jpaged.images.spans import ImageSpan, Prepared, packed, packed_form, rows_grid
from jpaged.models.layers.linear import StepContext
from jpaged.models.params import Params, parameters
from jpaged.models.vision.tower import Encoded, Grid, Patches, Tower, VisionConfig


@jax.jit
def run_tower(tower: Tower, patches: Patches, step: StepContext) -> Encoded:
    """Run a tower; compiled once a form of weights and a bucket."""
    return tower(patches, step)


class ImageEncoder:
    """Encodes images by a tower whose weights are an argument, so that new ones compile nothing.

    buckets: the numbers of rows of embeddings that a program is compiled for; None: those of the
    config. step: how products are computed. alone: an image is never encoded beside others, so that
    the bits of its embeddings depend on the image alone. sharding: where patches are put, and
    embeddings are left; None leaves that to jax. put: puts an array there; jax's own takes no
    sharding over processes.

    programs: what is compiled so far, by bucket. Towers of new weights must be of the same form.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        buckets: Sequence[int] | None = None,
        step: StepContext | None = None,
        alone: bool = False,
        sharding: jax.sharding.Sharding | None = None,
        put: Callable[[np.ndarray, jax.sharding.Sharding], jax.Array] = jax.device_put,
    ):
        self.config, self.alone, self.sharding, self._put = config, alone, sharding, put
        self._run: Any = run_tower
        if sharding is not None:  # each process reads all embeddings
            self._run = jax.jit(run_tower, out_shardings=sharding)
        self.programs: dict[int, Any] = {}
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

    def needed(self, images: Sequence[Prepared]) -> list[int]:
        """Return the buckets that images take, each once."""
        return list(dict.fromkeys(self._bucket(self._grids(x)) for x in self._groups(images)))

    def warmup(self, tower: Tower) -> None:
        """Compile the programs of all buckets."""
        for bucket in self.buckets:
            self.compile(tower, bucket)

    def compile(self, tower: Tower, bucket: int) -> Any:
        """Return the program of a bucket, which is compiled the first time."""
        if bucket not in self.programs:
            form = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding),
                packed_form(self.config, bucket),
            )
            self.programs[bucket] = self._run.lower(tower, form, self.step).compile()
        return self.programs[bucket]

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

    def _grids(self, images: Sequence[Prepared]) -> list[Grid]:
        return [rows_grid(image.grid, self.config) for image in images]

    def _bucket(self, grids: Sequence[Grid]) -> int:
        return self.buckets[bisect.bisect_left(self.buckets, sum(grid.size for grid in grids))]

    def _encode(self, tower: Tower, group: list[Prepared]) -> list[ImageSpan]:
        grids = self._grids(group)
        total, bucket = sum(grid.size for grid in grids), self._bucket(grids)
        program, patches = self.compile(tower, bucket), packed(group, self.config, bucket)
        if self.sharding is not None:
            put, sharding = self._put, self.sharding
            patches = jax.tree.map(lambda x: put(x, sharding), patches)
        encoded = jax.device_get(program(tower, patches, self.step))
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


def bind_tower(params: Params) -> Tower:
    """Return the vision tower of params; ConfigError where they have none."""
    config = params.config.vision
    if config is None:
        raise ConfigError(
            f"params of {params.config.family} have no vision tower: load_params(FOLDER, "
            "images=True) reads one where the files have it"
        )
    return config.build(parameters(params.config, params))
