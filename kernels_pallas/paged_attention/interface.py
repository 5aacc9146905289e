"""The arguments of every implementation of paged attention; `IMPLEMENTATIONS` lists them.

Nothing here imports jax, so that cases for tests and benches can be read without it. Shapes: T
packed tokens, S rows, M blocks a row, H query heads, D head dim.
"""

import dataclasses
from collections.abc import Collection
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes on one device that decide whether an implementation can run.

    dtype: of queries, and of the pool if kv_dtype is None. kv_dtype: an 8-bit dtype of a pool with
    scales. num_heads, num_kv_heads: on one device. num_rows, blocks_per_row: of the largest block
    table.
    """

    dtype: Any
    head_dim: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    num_rows: int = 1
    blocks_per_row: int = 1
    kv_dtype: Any = None

    @property
    def scaled(self) -> str | None:
        """The reason why an implementation without scales cannot run with these, or None."""
        return None if self.kv_dtype is None else f"keys and values in {self.kv_dtype} with scales"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The mathematics of one kind of layer: a static value that goes from the layer to the kernel.

    What stands between them passes it on unopened, so a new option is a field here, a field of the
    layer's config, and code in the reference and in the kernels. An option that is an array is an
    operand of the call instead, as `sinks_H` is.

    scale: factor of the scores. soft_cap: c of c * tanh(score / c), None for plain scores. window:
    tokens that a query sees, itself included; None for the whole context. value_dim: Dv, the width
    of a value where it is not D. sinks: each head has one more score, the operand sinks_H. latent:
    what the pool holds of a KV head is a latent of value_dim numbers and a rotated key: both
    together are its key, of D numbers, and the latent is its value (arXiv:2405.04434). causal: a
    query sees nothing after itself; otherwise all of its context, or, with a window w, what is less
    than w tokens away on either side.

    `unknown_options` names those that an implementation does not have: it is never called with one.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    value_dim: int | None = None
    sinks: bool = False
    latent: bool = False
    causal: bool = True

    def value_width(self, head_dim: int) -> int:
        """Return the width of a value beside keys of head_dim."""
        return head_dim if self.value_dim is None else self.value_dim

    def places(self, head_dim: int) -> tuple[int, slice]:
        """Return how many numbers the pool holds of a head beside padding, of which the first
        head_dim are its key, and where in them its value is.
        """
        width = self.value_width(head_dim)
        if self.latent:
            return head_dim, slice(0, width)
        return head_dim + width, slice(head_dim, head_dim + width)


def unknown_options(attention: AttentionOptions, known: Collection[str]) -> str | None:
    """Return the reason why an implementation that has the options `known` cannot compute these;
    None: it can. An option at its default changes nothing, and nobody needs to know it.
    """
    fields = {field.name: field for field in dataclasses.fields(attention)}
    values = {name: getattr(attention, name) for name in fields.keys() - set(known)}
    asked = [f"{n}={v!r}" for n, v in sorted(values.items()) if v != fields[n].default]
    return f"it does not have the option {', '.join(asked)}" if asked else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a call is compiled for beside the shapes of its arrays.

    num_layers: L of the pool. num_kv_heads: KV heads of the pool; None is half of its rows.
    interpret: True or an interpreter's parameters to interpret a Pallas kernel, False to compile
    it; None interprets it if the default backend is the CPU.
    """

    attention: AttentionOptions
    num_layers: int = 1
    num_kv_heads: int | None = None
    interpret: Any = None


def prepare_nothing(
    query_start_loc_S1: Any,
    context_lens_S: Any,
    *,
    num_tokens: int,
    shapes: Shapes,
    window: int | None,
) -> None:
    """`prepare` of an implementation whose layers share nothing."""


def kv_heads_of(pool: Any, attention: AttentionOptions) -> int:
    """Return the KV heads of a pool without padding: a head has two rows of equal width, or, where
    values are of another width than keys, one.
    """
    return pool.shape[2] // (2 if attention.value_dim is None else 1)


def shapes_of(q_THD: Any, pool: Any, block_table_SM: Any, options: Options) -> Shapes:
    """Return the shapes of a call; options.num_kv_heads is needed if the pool is padded."""
    is_scaled = pool.dtype.itemsize == 1
    return Shapes(
        dtype=q_THD.dtype if is_scaled else pool.dtype,
        kv_dtype=pool.dtype if is_scaled else None,
        head_dim=q_THD.shape[2],
        block_size=pool.shape[1],
        num_heads=q_THD.shape[1],
        num_kv_heads=options.num_kv_heads or kv_heads_of(pool, options.attention),
        num_rows=block_table_SM.shape[0],
        blocks_per_row=block_table_SM.shape[1],
    )
