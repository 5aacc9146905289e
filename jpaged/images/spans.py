"""Prepared, an image as patches; ImageSpan, an image as embeddings; and `packed`, which puts images
beside each other for a tower.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpaged.models.vision.tower import Grid, Patches, VisionConfig, patches_per_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """An image as a tower takes it. patches: f32 [N, C], in the tower's order. grid: frames, rows
    and columns of patches, which are N together. digest: of its pixels and of what prepared them.
    time_interval: how far its frames are from each other on the time axis of positions.
    """

    patches: np.ndarray
    grid: Grid
    digest: bytes
    time_interval: float = 1.0

    def rows(self, config: VisionConfig) -> Grid:
        """Return the grid of its rows of embeddings."""
        return rows_grid(self.grid, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """An image as embeddings, which stand in a prompt in place of n placeholders.

    embeddings: [n, E], in the model's dtype. grid: frames, rows and columns that the n have, in
    this order. digest: of the image. deepstack: [J, n, E], what is added after each of the text
    model's first J layers; None for models without. Nobody may write to these arrays.
    """

    embeddings: np.ndarray
    grid: Grid
    digest: bytes
    deepstack: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert len(self.embeddings) == self.grid.size, (self.embeddings.shape, self.grid)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        deep = 0 if self.deepstack is None else self.deepstack.nbytes
        return self.embeddings.nbytes + deep


def rows_grid(grid: Grid, config: VisionConfig) -> Grid:
    """Return the grid of the rows of embeddings that a tower makes of a grid of patches."""
    return Grid(grid.t, grid.h // config.merge, grid.w // config.merge)


def packed(images: Sequence[Prepared], config: VisionConfig, num_rows: int) -> Patches:
    """Return the patches of images beside each other, padded to a bucket of so many rows of
    embeddings: numpy arrays.
    """
    square = patches_per_row(config)
    bucket = num_rows * square
    values = np.zeros((bucket, config.num_features), np.float32)
    image = np.full(bucket, -1, np.int32)
    position, size = np.zeros((bucket, 2), np.int32), np.ones((bucket, 2), np.int32)
    row = np.full(bucket, num_rows, np.int32)
    start, frame, first_row = 0, 0, 0
    for prepared in images:
        grid = prepared.grid
        end = start + grid.size
        values[start:end] = prepared.patches
        within = positions(grid, config)
        image[start:end] = frame + np.repeat(np.arange(grid.t), grid.h * grid.w)
        position[start:end] = np.tile(within, (grid.t, 1))
        size[start:end] = (grid.h, grid.w)
        rows = rows_grid(grid, config)
        at = within // config.merge
        of_frame = at[:, 0] * rows.w + at[:, 1]
        frames = np.repeat(np.arange(grid.t), grid.h * grid.w) * rows.h * rows.w
        row[start:end] = first_row + frames + np.tile(of_frame, grid.t)
        start, frame, first_row = end, frame + grid.t, first_row + rows.size
    return Patches(
        values_NC=values,  # pyright: ignore[reportArgumentType]
        image_N=image,  # pyright: ignore[reportArgumentType]
        position_N2=position,  # pyright: ignore[reportArgumentType]
        size_N2=size,  # pyright: ignore[reportArgumentType]
        row_N=row,  # pyright: ignore[reportArgumentType]
    )


def packed_form(config: VisionConfig, num_rows: int) -> Patches:
    """Return what `packed` makes as ShapeDtypeStructs."""
    count = num_rows * patches_per_row(config)

    def of(*shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct((count, *shape), dtype)

    return Patches(
        values_NC=of(config.num_features, dtype=np.float32),
        image_N=of(),
        position_N2=of(2),
        size_N2=of(2),
        row_N=of(),
    )


def positions(grid: Grid, config: VisionConfig) -> np.ndarray:
    """Return the row and the column of each patch of a frame, int32 [h * w, 2], in the tower's
    order.
    """
    merge = config.merge if config.in_blocks else 1
    at = np.stack(np.meshgrid(np.arange(grid.h), np.arange(grid.w), indexing="ij"), axis=-1)
    at = at.reshape(grid.h // merge, merge, grid.w // merge, merge, 2)
    return at.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)
