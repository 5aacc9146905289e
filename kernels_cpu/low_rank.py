"""The products of low rank that adapters add, for bf16 on CPU; see low_rank.cc.

Shapes: T tokens, of which the first `count` (an int32 scalar) are wanted; E features in (whole
32s), N outputs of each part of a weight.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def supported(x: Array, a: Array) -> bool:
    """Whether these arrays are multiplied here: bf16 x [T, E] and a [parts, slots, rank, E]."""
    return x.dtype == a.dtype == jnp.bfloat16 and x.ndim == 2 and a.shape[3] % 32 == 0


def add(
    y: Array,
    x: Array,
    a: Array,
    b: tuple[Array, ...],
    slot_T: Array,
    count: Array | int,
    leads: int = 1,
) -> Array:
    """Return y + x a^T b, f32 [T, N of all parts]: each token by the a and b of its slot. A token
    whose slot is past the last one keeps its y. A row's bits depend on that row alone.

    y: [T, N of all parts], f32. x: [T, E]. a: [parts, slots, rank, E]; where E is 0, x is what the
    first product would give, [T, parts * rank]. b: [slots, rank, N] of each part. slot_T: int32.
    leads: into how many equal pieces a part's outputs are cut; in y the first pieces of all parts
    follow each other, then the second ones.
    """
    result = jax.ShapeDtypeStruct(y.shape, jnp.float32)
    call = jax.ffi.ffi_call("jpaged_low_rank", result, input_output_aliases={0: 0})
    return call(y, x, a, slot_T, jnp.asarray(count, jnp.int32), *b, leads=np.int64(leads))
