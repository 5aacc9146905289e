"""The two forms of decode's products: a row of scores is a slot of the KV tile, or it is a query.

wgmma computes 64 rows and 8 columns or more. A KV head has few queries, so they are the columns: 8
in place of 64 rows most of which nobody reads. Keys are the first operand of the first product, and
values, transposed, of the second; both are read where they lie. Weights go through shared memory.
Where there are many queries, registers for those columns and for what is summed at the end lack,
and queries are the rows, as they are in prefill.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kernels_pallas.paged_attention.common import NEG
from kernels_pallas.paged_attention.mosaic_gpu.pieces import (
    WGMMA,
    Q,
    add_values,
    along_slots,
    fold,
    iota,
    normalized,
    scores,
    softmax_start,
    store_flat,
    tiled_smem,
)

TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


class BySlot(NamedTuple):
    """Scores [C, rows], an accumulator [D, rows].

    rows: of queries, a multiple of 8. C: slots of a tile. interpret: whether the interpreter runs.
    """

    rows: int
    C: int
    D: int
    dtype: DTypeLike
    interpret: Any

    def buffers(self, places: int, out_dtype: DTypeLike) -> tuple[Any, ...]:
        """Return the types of shared memory for queries of so many items and results, for weights,
        and for the logarithms of sums.
        """
        rows, C, D, dtype = self.rows, self.C, self.D, self.dtype
        q_and_o = tiled_smem((places, rows, D), dtype), plgpu.SMEM((rows, D), out_dtype)
        return q_and_o, tiled_smem((rows, C), dtype), plgpu.SMEM((rows,), jnp.float32)

    def bytes(self, places: int, out_dtype: DTypeLike) -> int:
        """Return how many bytes `buffers` takes, without the logarithms."""
        in_16 = (places * self.D + self.C) * jnp.dtype(self.dtype).itemsize
        return self.rows * (in_16 + self.D * jnp.dtype(out_dtype).itemsize)

    def start(self) -> tuple[Array, Array, Array]:
        """Return the accumulator, running maximum [rows] and running sums [C, rows], a slot of all
        tiles each, of an online softmax before its first score.
        """
        acc, totals = (
            plgpu.layout_cast(jnp.zeros((n, self.rows), jnp.float32), WGMMA)
            for n in (self.D, self.C)
        )
        m = plgpu.layout_cast(jnp.full((self.rows,), NEG, jnp.float32), WGMMA.reduce(0))
        return acc, m, totals

    def slots(self) -> Array:
        """Return the slot of each score."""
        return iota((self.C, self.rows), 0)

    def scores(self, kv_sm, q_sm) -> Array:
        """Return k . q in f32."""

        def product(acc_ref):
            plgpu.wgmma(acc_ref, kv_sm.at[:, pl.ds(0, self.D)], q_sm.transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((self.C, self.rows), jnp.float32))

    def scales(self, scales_sm) -> Array:
        """Return a tile's scales [C] broadcast to the shape of scores."""
        of_slot = plgpu.load(scales_sm, layout=WGMMA.reduce(1))
        return lax.broadcast_in_dim(of_slot, (self.C, self.rows), [0])

    def fold(self, s, acc, m, totals, scales) -> tuple[Array, Array, Array, Array]:
        """Do what `pieces.fold` does. Sums stay apart, a slot each, until the end."""
        s = plgpu.layout_cast(s, WGMMA)
        highest = plgpu.layout_cast(jnp.max(s, axis=0), WGMMA.reduce(0))
        m_new = jnp.maximum(m, highest)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [1]))
        totals = totals * lax.broadcast_in_dim(alpha, s.shape, [1]) + p
        p = p if scales is None else p * scales
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
        return p.astype(self.dtype), acc, m_new, totals

    def add(self, acc, p, p_sm, kv_sm) -> Array:
        """Return acc + v^T . p, by way of p_sm [rows, C].

        jax's search for a layout of a store to a transposed buffer ends if the layout is named.
        """
        p = plgpu.layout_cast(plgpu.layout_cast(p, WGMMA), TRANSPOSED)
        plgpu.store(p_sm.transpose((1, 0)), p, optimized=False)
        plgpu.commit_smem()
        v_sm = kv_sm.at[:, pl.ds(self.D, self.D)]
        if self.interpret:  # see add_values
            acc = acc + jnp.dot(v_sm[...].T, p, preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            return acc

        def product(acc_ref):
            plgpu.wgmma(acc_ref, v_sm.transpose((1, 0)), p_sm.transpose((1, 0)))

        return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]

    def total(self, totals) -> Array:
        """Return the sum of weights [rows]."""
        return plgpu.layout_cast(jnp.sum(totals, axis=0), WGMMA.reduce(0))

    def store(self, o_sm, lse_sm, acc, m, total) -> None:
        """Write the results, and the logarithms of sums, to base 2, if lse_sm is not None."""
        weight = 1.0 / jnp.where(total > 0, total, 1.0)
        o = plgpu.layout_cast(acc * lax.broadcast_in_dim(weight, acc.shape, [1]), WGMMA)
        o = plgpu.layout_cast(o.astype(o_sm.dtype), TRANSPOSED)
        plgpu.store(o_sm.transpose((1, 0)), o, optimized=False)
        if lse_sm is not None:
            lse_sm[...] = plgpu.layout_cast(log_of(m, total), WGMMA.reduce(0))


class ByQuery(NamedTuple):
    """Scores [Q, C], an accumulator [Q, D]; the rest is as BySlot has it."""

    rows: int
    C: int
    D: int
    dtype: DTypeLike
    interpret: Any

    def buffers(self, places: int, out_dtype: DTypeLike) -> tuple[Any, ...]:
        """Results of a single item take the place of its queries."""
        q_and_o = tiled_smem((places, Q, self.D), self.dtype), plgpu.SMEM((Q, self.D), out_dtype)
        lse = plgpu.SMEM((Q,), jnp.float32)
        return plgpu.RefUnion(*q_and_o) if places == 1 else q_and_o, None, lse

    def bytes(self, places: int, out_dtype: DTypeLike) -> int:
        queries = places * jnp.dtype(self.dtype).itemsize if places > 1 else 0
        return Q * self.D * (queries + jnp.dtype(out_dtype).itemsize)

    def start(self) -> tuple[Array, Array, Array]:
        return softmax_start(self.D)

    def slots(self) -> Array:
        return iota((Q, self.C), 1)

    def scores(self, kv_sm, q_sm) -> Array:
        return scores(q_sm, kv_sm)

    def scales(self, scales_sm) -> Array:
        return along_slots(scales_sm)

    def fold(self, s, acc, m, total, scales) -> tuple[Array, Array, Array, Array]:
        return fold(s, acc, m, total, self.dtype, scales)

    def add(self, acc, p, p_sm, kv_sm) -> Array:
        return add_values(acc, p, kv_sm, self.interpret)

    def total(self, totals) -> Array:
        return totals

    def store(self, o_sm, lse_sm, acc, m, total) -> None:
        store_flat(o_sm, normalized(acc, total).astype(o_sm.dtype))
        if lse_sm is not None:
            lse_sm[...] = log_of(m, total)


def log_of(m, total) -> Array:
    """Return the logarithm of sums of weights. A sum is at least 1, its maximum's weight, or 0."""
    return m + jnp.log2(jnp.maximum(total, 1.0))
