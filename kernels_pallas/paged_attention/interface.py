"""What every implementation of paged attention is asked and told; `IMPLEMENTATIONS` lists them.

Nothing here needs jax, so that `cases` can be read without it. Shapes: T packed tokens, S rows, M
blocks a row, H query heads, D head dim.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What one device attends over, as far as it decides whether an implementation can run.

    dtype: of queries, and of the pool unless kv_dtype names another, in 8 bits with scales.
    num_heads, num_kv_heads: of one device. num_rows, blocks_per_row: of the largest block table.
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
        """Why an implementation without scales cannot run with these, or None."""
        return None if self.kv_dtype is None else f"keys and values in {self.kv_dtype} with scales"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a call is compiled for beside the shapes of its arrays.

    scale: of the scores. num_layers: L of the pool. num_kv_heads: of the pool; None is half of its
    rows. sliding_window: tokens that a query sees, itself included. soft_cap: c of c * tanh(score /
    c). interpret: whether a Pallas kernel is interpreted, or how; None interprets where the default
    backend is the CPU.
    """

    scale: float
    num_layers: int = 1
    num_kv_heads: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    interpret: Any = None


def prepare_nothing(
    query_start_loc_S1: Any,
    context_lens_S: Any,
    *,
    num_tokens: int,
    shapes: Shapes,
    sliding_window: int | None,
) -> None:
    """`prepare` of an implementation whose layers share nothing."""


def shapes_of(q_THD: Any, pool: Any, block_table_SM: Any, options: Options) -> Shapes:
    """The shapes of a call over a pool without padding, or with num_kv_heads in its options."""
    is_scaled = pool.dtype.itemsize == 1
    return Shapes(
        dtype=q_THD.dtype if is_scaled else pool.dtype,
        kv_dtype=pool.dtype if is_scaled else None,
        head_dim=q_THD.shape[2],
        block_size=pool.shape[1],
        num_heads=q_THD.shape[1],
        num_kv_heads=options.num_kv_heads or pool.shape[2] // 2,
        num_rows=block_table_SM.shape[0],
        blocks_per_row=block_table_SM.shape[1],
    )
