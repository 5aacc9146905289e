"""What every vision tower shares: Patches, the packed images that it takes; Encoded, what it gives;
and the protocols of a tower and of its config.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array

from jpaged.models.layers.linear import StepContext
from jpaged.models.param_spec import Parameters, ParamSpec

PREFIX = "vision."  # of the names of a tower's parameters in the canonical tree


class ImageTokens(NamedTuple):
    """The ids that stand for images in a prompt. image: one for each row of embeddings. begin, end:
    what stands before the first and after the last of an image; None where the model has none.
    """

    image: int
    begin: int | None = None
    end: int | None = None


class Grid(NamedTuple):
    """The size of an image in patches, or in rows of embeddings. t: frames, of a video."""

    t: int
    h: int
    w: int

    @property
    def size(self) -> int:
        """How many places it has."""
        return self.t * self.h * self.w


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Patches:
    """The patches of several images, one after another, and padding up to a bucket of N of them.

    values_NC: f32 [N, C], the numbers of each patch. image_N: int32, which image (or frame of a
    video) a patch is of; -1 in padding. position_N2: int32, the row and the column of the patch in
    its image. size_N2: int32, the rows and columns of that image. row_N: int32, the row of
    embeddings that a patch is part of; past the last one in padding.
    """

    values_NC: Array
    image_N: Array
    position_N2: Array
    size_N2: Array
    row_N: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """rows_RE: embeddings, which take the places of placeholders. deepstack_JRE: what is added to
    these places after each of the first J layers of the text model; None where the model has no
    such thing.
    """

    rows_RE: Array
    deepstack_JRE: Array | None = None


class Tower(Protocol):
    """The module of a vision tower, a pytree of its arrays."""

    def __call__(self, patches: Patches, step: StepContext) -> Encoded:
        """Return R rows of embeddings of N patches: R = N / config.patches_per_row."""
        ...


class VisionConfig(Protocol):
    """What a vision tower says of itself, beside its mathematics."""

    @property
    def tokens(self) -> ImageTokens:
        """The ids that stand for images."""
        ...

    @property
    def num_features(self) -> int:
        """C: the numbers of a patch."""
        ...

    @property
    def merge(self) -> int:
        """The side of the square of patches that one row of embeddings is made of."""
        ...

    @property
    def in_blocks(self) -> bool:
        """Whether the patches of such a square follow each other; otherwise patches are in order of
        rows and columns.
        """
        ...

    @property
    def on_axes(self) -> bool:
        """Whether the text model turns the rows of an image by positions on three axes."""
        ...

    @property
    def hidden_size(self) -> int:
        """E: the width of its rows of embeddings, which is that of the text model."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of rows of embeddings that it is compiled for, unless a caller says which."""
        ...

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters in the order of the forward pass, under full names."""
        ...

    def scratch(self, num_rows: int) -> int:
        """Return bytes that a call of so many rows of embeddings takes at most, beside weights."""
        ...

    def build(self, weights: Parameters) -> Tower:
        """Return the module of these parameters, which are by full names."""
        ...

    def write(self) -> dict[str, Any]:
        """Return the part of a config.json that its `read` reads back."""
        ...


def patches_per_row(config: VisionConfig) -> int:
    """Return how many patches one row of embeddings is made of."""
    return config.merge**2
