"""What adapters add to a product, for bf16 on CPU; see low_rank.cc.

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
    """y [T, N of all parts], f32, and for each token x times a transposed, [parts, slots, rank, E],
    times b, of each part [slots, rank, N], of its own slot; a token whose slot is none has y as it
    was. A row's bits depend on that row alone.

    a of E = 0: x [T, parts * rank] is what its product would give. leads: equal pieces of a part's
    outputs; in y the first ones of all parts follow each other, then the second ones.
    """
    result = jax.ShapeDtypeStruct(y.shape, jnp.float32)
    call = jax.ffi.ffi_call("jpaged_low_rank", result, input_output_aliases={0: 0})
    return call(y, x, a, slot_T, jnp.asarray(count, jnp.int32), *b, leads=np.int64(leads))
