"""The two forms of decode's products: a row of scores is a slot of the KV tile, or it is a query.

wgmma computes 64 rows and 8 columns or more. A KV head has few queries, so they are the columns: 8
in place of 64 rows most of which nobody reads. Keys are the first operand of the first product, and
values, transposed, of the second; both are read where they lie. Weights go through shared memory.
Where there are many queries, registers for those columns and for what is summed at the end lack,
and queries are the rows, as they are in prefill.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

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
# Weights are at most 2^LEAP. A float16 takes them times the scale of values in 8 bits, which is at
# most 65,504 / 127.
LEAP = 6.0


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
        return q_and_o, tiled_smem((2, rows, C), dtype), plgpu.SMEM((rows,), jnp.float32)

    def bytes(self, places: int, out_dtype: DTypeLike) -> int:
        """Return how many bytes `buffers` takes, without the logarithms."""
        in_16 = (places * self.D + 2 * self.C) * jnp.dtype(self.dtype).itemsize
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

    def add(self, s, state, scales, p_sm, kv_sm) -> tuple[Array, Array, Array]:
        """Return the state of the softmax, which `start` begins, with a tile of scores s and the
        values of kv_sm. scales: of the values in 8 bits. p_sm [2, rows, C]: where weights go.

        The running maximum stays as it is while no score is above it by more than LEAP: weights are
        numbers of floating point, which may as well be above 1, and sums are divided in the end.
        What a new maximum takes, exchanges between lanes and warps above all, few tiles need. Sums
        stay apart, a slot each, until the end.
        """
        acc, m, totals = state
        s = plgpu.layout_cast(s, WGMMA)

        def above(m):
            return plgpu.layout_cast(s - lax.broadcast_in_dim(m, s.shape, [1]), WGMMA)

        def store(p):
            p = plgpu.layout_cast((p if scales is None else p * scales).astype(self.dtype), WGMMA)
            p = plgpu.layout_cast(p, TRANSPOSED)
            # jax's search for a layout of a store to a transposed buffer ends if it is named.
            plgpu.store(p_sm.transpose((1, 0)), p, optimized=False)

        p = jnp.exp2(above(m))
        store(p)
        totals += p
        leaps = commit_and_ask(above(m), LEAP, self.interpret)

        def raise_maximum():
            highest = plgpu.layout_cast(jnp.max(s, axis=0), WGMMA.reduce(0))
            m_new = jnp.maximum(m, highest)
            alpha = jnp.exp2(m - m_new)
            p_new = jnp.exp2(above(m_new))
            store(p_new)
            plgpu.commit_smem()
            # The sums before this tile. Subtracting loses what alpha makes nothing of; but p may be
            # infinite.
            p = jnp.exp2(above(m))
            before = jnp.where(p < 2.0**100, totals - p, 0.0)
            before, scaled_acc = (
                x * lax.broadcast_in_dim(alpha, x.shape, [1]) for x in (before, acc)
            )
            return scaled_acc, m_new, before + p_new

        acc, m, totals = lax.cond(leaps, raise_maximum, lambda: (acc, m, totals))
        v_sm = kv_sm.at[:, pl.ds(self.D, self.D)]
        if self.interpret:  # see add_values
            acc = acc + jnp.dot(v_sm[...].T, p_sm[...].T, preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            return acc, m, totals

        def product(acc_ref):
            plgpu.wgmma(acc_ref, v_sm.transpose((1, 0)), p_sm.transpose((1, 0)))

        acc = pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))
        return acc, m, totals  # pyright: ignore[reportReturnType]

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

    def add(self, s, state, scales, p_sm, kv_sm) -> tuple[Array, Array, Array]:
        acc, m, total = state
        p, acc, m, total = fold(s, acc, m, total, self.dtype, scales)
        return add_values(acc, p, kv_sm, self.interpret), m, total

    def total(self, totals) -> Array:
        return totals

    def store(self, o_sm, lse_sm, acc, m, total) -> None:
        store_flat(o_sm, normalized(acc, total).astype(o_sm.dtype))
        if lse_sm is not None:
            lse_sm[...] = log_of(m, total)


def log_of(m, total) -> Array:
    """Return the logarithm of sums of weights. A sum is at least 1, its maximum's weight, or 0."""
    return m + jnp.log2(jnp.maximum(total, 1.0))


def commit_and_ask(x: Array, limit: float, interpret: Any) -> Array:
    """Return whether any number of a warpgroup's x [C, rows] is above a limit.

    What its threads have stored to shared memory is then there for wgmma, as it is after
    plgpu.commit_smem, whose barrier carries the question.
    """
    if interpret:
        plgpu.commit_smem()
        return jnp.max(x) > limit
    answer = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.bool_), layout=WGMMA)
    ask = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=answer)
    return ask(functools.partial(_commit_and_ask, limit=limit))(x)


def _commit_and_ask(_, x, *, limit: float):
    numbers = [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for register in x.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]
    while len(numbers) > 1:
        pairs = itertools.batched(numbers, 2)
        numbers = [arith.maxnumf(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    f32, i1 = ir.F32Type.get(), ir.IntegerType.get_signless(1)
    is_above = arith.cmpf(arith.CmpFPredicate.OGT, numbers[0], utils.c(limit, f32))
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
    any_is = utils.inline_ptx(
        f"bar.red.or.pred $0, $1, {utils.WARPGROUP_SIZE}, $2;",
        *(utils.warpgroup_barrier_idx(sync=False), is_above),
        result_types=i1,
        has_side_effects=True,
        convergent=True,
    )
    return mgpu.FragmentedArray.splat(any_is, (), is_signed=False)
