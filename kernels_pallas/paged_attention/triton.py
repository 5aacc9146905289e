"""Paged attention in Pallas' Triton backend, for CUDA cards before Hopper: one kernel for decode and prefill.

A program takes one KV head and a tile of queries of one row, the G query heads of a token side by side as M = B * G
rows of its matmuls, and walks over the context C slots at a time with an online softmax. Decode has one query a tile
and splits its context over several programs, whose results are combined afterwards. Block ids are loaded one step
ahead: otherwise the pipelined loads of keys and values would wait for them.

Pallas' Triton backend is deprecated by jax; Mosaic GPU is the one to use on Hopper.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query heads, K KV heads,
G = H/K, D head dim; A query tiles, B tokens of a tile, C slots a step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

NEG = -1e30  # masked score: finite, so that a step without any visible key does no harm
LOG2_E = 1.4426950408889634
MIN_ROWS = 16  # of a Triton matmul
PREFILL_ROWS = 128
SLOTS = 64  # C
PROGRAMS = 264  # that fill a card twice over: what decode splits its contexts for
MAX_SPLITS = 16


def unsupported(*, dtype: Any, head_dim: int, **_: Any) -> str | None:
    """Why these shapes cannot run here, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}: only bfloat16 and float16"
    if head_dim not in (32, 64, 128, 256):
        return f"head_dim {head_dim}: only 32, 64, 128 and 256"
    return None


def paged_attention_decode(
    q_SHD: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    block_table_SM: jax.Array,
    context_lens_S: jax.Array,
    *,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Attention of one query a row, the last token of its context; see `reference.paged_attention_decode`."""
    S, K = q_SHD.shape[0], pool.shape[2] // 2
    context_lens_S = jnp.asarray(context_lens_S)
    rows_S = jnp.where(context_lens_S > 0, jnp.arange(S, dtype=jnp.int32), -1)
    tiles = (rows_S, jnp.zeros_like(rows_S))
    starts_S1 = jnp.arange(S + 1, dtype=jnp.int32)
    splits = min(max(-(-PROGRAMS // (S * K)), 1), MAX_SPLITS, block_table_SM.shape[1] * pool.shape[1] // SLOTS + 1)
    out = _attend(
        q_SHD, pool, layer, block_table_SM, context_lens_S, starts_S1, tiles, num_layers=num_layers, scale=scale,
        window=sliding_window, soft_cap=soft_cap, tokens=1, splits=splits, interpret=interpret,
    )  # fmt: skip
    return jnp.where((context_lens_S > 0)[:, None, None], out, 0)


def paged_attention(
    q_THD: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    block_table_SM: jax.Array,
    context_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    *,
    num_layers: int = 1,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Causal attention of packed queries, any number a row; see `reference.paged_attention`."""
    T, H, _ = q_THD.shape
    query_starts_S1 = jnp.asarray(query_starts_S1)
    tokens = max(1, PREFILL_ROWS // pl.next_power_of_2(2 * H // pool.shape[2]))
    tiles = query_tiles(query_starts_S1, tokens, T)
    out = _attend(
        q_THD, pool, layer, block_table_SM, context_lens_S, query_starts_S1, tiles, num_layers=num_layers, scale=scale,
        window=sliding_window, soft_cap=soft_cap, tokens=tokens, splits=1, interpret=interpret,
    )  # fmt: skip
    return jnp.where((jnp.arange(T) < query_starts_S1[-1])[:, None, None], out, 0)


def query_tiles(query_starts_S1: jax.Array, tokens: int, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The row of each tile of `tokens` queries and its first query in the row, both int32 [A]; row -1 is no tile."""
    tiles_S = (query_starts_S1[1:] - query_starts_S1[:-1] + tokens - 1) // tokens
    end_S = jnp.cumsum(tiles_S)
    S = tiles_S.shape[0]
    tile_A = jnp.arange(-(-num_tokens // tokens) + S, dtype=jnp.int32)
    row_A = jnp.sum(end_S[None, :] <= tile_A[:, None], axis=1, dtype=jnp.int32)
    first_A = (tile_A - (end_S - tiles_S)[jnp.minimum(row_A, S - 1)]) * tokens
    return jnp.where(row_A < S, row_A, -1), first_A.astype(jnp.int32)


@functools.partial(
    jax.jit, static_argnames=("num_layers", "scale", "window", "soft_cap", "tokens", "splits", "interpret")
)
def _attend(
    q_THD: jax.Array, pool: jax.Array, layer: jax.Array | int, block_table_SM: jax.Array, context_lens_S: jax.Array,
    query_starts_S1: jax.Array, tiles: tuple[jax.Array, jax.Array], *, num_layers: int, scale: float,
    window: int | None, soft_cap: float | None, tokens: int, splits: int, interpret: bool | None,
) -> jax.Array:  # fmt: skip
    """Results of every query of a tile; whatever was there before for all others."""
    T, H, D = q_THD.shape
    blocks, P, K = pool.shape[0], pool.shape[1], pool.shape[2] // 2
    if reason := unsupported(dtype=pool.dtype, head_dim=D):
        raise NotImplementedError(f"triton: {reason}")
    G = H // K
    heads = pl.next_power_of_2(G)
    heads = max(heads, MIN_ROWS // tokens)  # all of a tile's rows, G of each token's heads real
    shape = (splits, T, K, G)
    kernel = functools.partial(
        _kernel, G=G, heads=heads, tokens=tokens, P=P, scale=scale, window=window, soft_cap=soft_cap, splits=splits
    )
    out, top, total = pl.pallas_call(
        kernel,
        grid=(tiles[0].shape[0], K, splits),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, D), jnp.float32 if splits > 1 else q_THD.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        interpret=jax.default_backend() == "cpu" if interpret is None else interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4 if splits > 1 or tokens == 1 else 8, num_stages=3),
        name="paged_attention",
    )(
        q_THD.reshape(T, K, G, D), pool.reshape(blocks * P, 2 * K, D), jnp.asarray(block_table_SM),
        jnp.asarray(context_lens_S), query_starts_S1, *tiles,
        jnp.reshape(jnp.asarray(layer, jnp.int32) * (blocks // num_layers), (1,)),
    )  # fmt: skip
    if splits == 1:
        return out[0].reshape(T, H, D)
    weight = total * jnp.exp2(top - jnp.max(top, axis=0, keepdims=True))
    mixed = jnp.sum(jnp.where(total[..., None] > 0, out, 0) * weight[..., None], axis=0)
    return (mixed / jnp.sum(weight, axis=0)[..., None]).astype(q_THD.dtype).reshape(T, H, D)


def _kernel(
    q_ref, pool_ref, table_ref, contexts_ref, starts_ref, rows_ref, firsts_ref, first_block_ref, out_ref, top_ref,
    total_ref, *, G: int, heads: int, tokens: int, P: int, scale: float, window: int | None, soft_cap: float | None,
    splits: int,
):  # fmt: skip
    tile, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = rows_ref[tile]
    D, rows = q_ref.shape[-1], tokens * heads

    @pl.when(row >= 0)
    def _():
        start, first, context = starts_ref[row], firsts_ref[tile], contexts_ref[row]
        count = starts_ref[row + 1] - start
        at_R = jnp.arange(rows)
        token_R, head_R = first + lax.div(at_R, heads), lax.rem(at_R, heads)
        real_R = (token_R < count) & (head_R < G)
        position_R = context - count + token_R
        dim_D = jnp.arange(D)[None, :]
        here = ((start + token_R)[:, None], head, head_R[:, None], dim_D)
        q = plgpu.load(q_ref.at[here], mask=real_R[:, None], other=0.0)

        end = jnp.minimum(context - count + first + tokens, context)  # slots that some query of the tile sees
        begin = 0 if window is None else jnp.maximum(context - count + first + 1 - window, 0)
        steps_from = lax.div(begin, SLOTS)
        steps = pl.cdiv(end, SLOTS) - steps_from
        share = pl.cdiv(steps, splits)
        step0 = steps_from + split * share
        step1 = jnp.minimum(step0 + share, steps_from + steps)
        slot_C = jnp.arange(SLOTS)

        def blocks(step):
            slot = step * SLOTS + slot_C
            return plgpu.load(table_ref.at[row, lax.div(slot, P)], mask=slot < end, other=0)

        def body(step, carry):
            top, total, acc, block_C = carry
            slot_C_ = step * SLOTS + slot_C
            following = blocks(step + 1)
            seen_C = (slot_C_ >= begin) & (slot_C_ < end)
            slots = ((first_block_ref[0] + block_C) * P + lax.rem(slot_C_, P))[:, None]
            k = plgpu.load(pool_ref.at[slots, 2 * head, dim_D], mask=seen_C[:, None], other=0.0)
            s = plgpu.dot(q, k.T) * scale
            s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
            visible = (slot_C_[None, :] <= position_R[:, None]) & seen_C[None, :]
            if window is not None:
                visible &= slot_C_[None, :] > position_R[:, None] - window
            s = jnp.where(visible, s * LOG2_E, NEG)
            new = jnp.maximum(top, jnp.max(s, axis=1))
            p, alpha = jnp.exp2(s - new[:, None]), jnp.exp2(top - new)
            v = plgpu.load(pool_ref.at[slots, 2 * head + 1, dim_D], mask=seen_C[:, None], other=0.0)
            acc = acc * alpha[:, None] + plgpu.dot(p.astype(v.dtype), v)
            return new, total * alpha + jnp.sum(p, axis=1), acc, following

        nothing = jnp.zeros((rows,), jnp.float32)
        state = (nothing + NEG, nothing, jnp.zeros((rows, D), jnp.float32), blocks(step0))
        top, total, acc, _ = lax.fori_loop(step0, step1, body, state)
        # A query that saw masked keys alone so far has weights of exp2(0): its maximum says that they are nothing.
        total = jnp.where(top > NEG, total, 0.0)
        out = acc / jnp.where(total > 0, total, 1.0)[:, None]
        plgpu.store(
            out_ref.at[split, *here], out.astype(out_ref.dtype), mask=jnp.broadcast_to(real_R[:, None], out.shape)
        )
        if splits > 1:
            plgpu.store(top_ref.at[split, start + token_R, head, head_R], top, mask=real_R)
            plgpu.store(total_ref.at[split, start + token_R, head, head_R], total, mask=real_R)
