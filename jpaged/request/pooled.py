"""What `pool`, `embed` and `classify` are asked, and what they make of hidden states."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.checks import check_whole
from jpaged.errors import RequestError
from jpaged.models.forward import Forward
from jpaged.models.pooling import POOLED, Dense, Pooled, PoolingConfig, product

# Vectors that go through a head at once: one shape for any number of sequences, so that the numbers
# of one do not depend on how many others there are.
VECTORS = 32

type States = Literal["last", "first", "mean", "all"]
# A matrix [E, Y] or [E], or a function of hidden states [R, E] that returns R rows.
type PoolHead = jax.Array | np.ndarray | Callable[[jax.Array], jax.Array | np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """at: the states that are wanted. head: takes them, or their mean; None returns them. of_model:
    the head is the model's own, of labels or of the dense layers of embeddings. normalize: vectors
    are divided by their length, once only the first `dimensions` of their numbers are left.
    """

    at: States = "last"
    head: PoolHead | None = None
    of_model: Literal["score", "dense"] | None = None
    normalize: bool = False
    dimensions: int | None = None

    def check(self, hidden_size: int) -> None:
        """Raise RequestError where the model has no such states."""
        check_states(self.at)
        head = self.head
        if head is None or (callable(head) and not isinstance(head, jax.Array | np.ndarray)):
            return
        shape = getattr(head, "shape", None)
        if shape is None or len(shape) not in (1, 2) or shape[0] != hidden_size:
            what = type(head).__name__ if shape is None else f"an array {list(shape)}"
            raise RequestError(
                f"head={what}: must be an array [{hidden_size}, outputs] or [{hidden_size}], or a "
                f"function of hidden states [rows, {hidden_size}]"
            )


def check_states(at: object) -> None:
    """Raise RequestError unless it says which states are wanted."""
    if at not in (*POOLED, "all"):
        raise RequestError(f"at={at!r}: must be 'last', 'first', 'mean' or 'all'")


def embedding_options(
    config: PoolingConfig | None,
    hidden_size: int,
    pooling: Pooled | None,
    normalize: bool | None,
    dimensions: int | None,
) -> PoolOptions:
    """Return what `embed` asks. config: of the model; None where its files say nothing. Raises
    RequestError.
    """
    known = config or PoolingConfig()
    if pooling is not None and pooling not in POOLED:
        raise RequestError(f"pooling={pooling!r}: must be 'last', 'first', 'mean' or None")
    if normalize is not None and not isinstance(normalize, bool):
        raise RequestError(f"normalize={normalize!r}: must be True, False or None")
    if dimensions is not None:
        check_whole("dimensions", dimensions, 1, known.width(hidden_size))
    return PoolOptions(
        at=pooling or known.at,
        of_model="dense" if known.dense else None,
        normalize=known.normalize if normalize is None else normalize,
        dimensions=None if dimensions is None else int(dimensions),
    )


def padded_len(length: int) -> int:
    """Return the rows of the array in which the states of a sequence lie: a power of two."""
    return 1 << max(length - 1, 0).bit_length()


@jax.jit
def mean_of(states_TE: jax.Array, length: int) -> jax.Array:
    """Return the mean of the first `length` states, f32 [E]. Its bits are those of this length."""
    is_real_T = jnp.arange(states_TE.shape[0]) < length
    states_TE = jnp.where(is_real_T[:, None], states_TE.astype(jnp.float32), 0)
    return jnp.sum(states_TE, axis=0) / length


def through(vectors: Sequence[np.ndarray], options: PoolOptions, model: Forward) -> np.ndarray:
    """Return what becomes of one vector [E] of each sequence: f32 [N, ...]."""
    outs: list[np.ndarray] = []
    for first in range(0, len(vectors), VECTORS):
        some = np.stack(vectors[first : first + VECTORS])
        padded = np.zeros((VECTORS, *some.shape[1:]), np.float32)
        padded[: len(some)] = some
        outs.append(rows_of(jnp.asarray(padded), len(some), options, model))
    made = np.concatenate(outs)
    if options.dimensions is not None:
        made = made[:, : options.dimensions]
    if options.normalize:
        length = np.linalg.norm(made, axis=-1, keepdims=True)
        made = made / np.maximum(length, 1e-12)  # as torch.nn.functional.normalize
    return made


def rows_of(states: jax.Array, count: int, options: PoolOptions, model: Forward) -> np.ndarray:
    """Return what the head makes of the first `count` of these states [R, E]: f32 [count, ...]."""
    head = options.head
    if options.of_model == "score":
        assert model.score is not None
        made = _product(states, model.score.weight)
    elif options.of_model == "dense":
        made = _through_dense(states, model.dense)
    elif head is None:
        made = states
    elif isinstance(head, jax.Array | np.ndarray):
        weight = head if head.ndim == 2 else head[:, None]
        made = _product(states, weight.T)
        made = made[:, 0] if weight.shape[1] == 1 else made
    else:
        made = head(states)
        if getattr(made, "shape", (None,))[:1] != states.shape[:1]:
            raise RequestError(
                f"head returned {getattr(made, 'shape', type(made).__name__)} for states of "
                f"{list(states.shape)}: must be a row for each of them"
            )
    return np.asarray(made, np.float32)[:count]


_product = jax.jit(product)


@jax.jit
def _through_dense(states: jax.Array, layers: tuple[Dense, ...]) -> jax.Array:
    x = states.astype(jnp.float32)
    for layer in layers:
        x = layer(x)
    return x
