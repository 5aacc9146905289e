"""Paged attention in Pallas' Triton backend, for CUDA cards before Hopper: one kernel for decode
and prefill.

A program takes one KV head and a tile of queries of one row, the G query heads of a token side by
side as M = B * G rows of its matmuls, and walks over the context C slots at a time with an online
softmax. Decode has one query a tile and splits its context over several programs, whose results are
combined afterwards. Block ids are loaded one step ahead: otherwise the pipelined loads of keys and
values would wait for them.

Latents are one KV head for all query heads, a part of which a program takes. A latent is read once:
it is the key's first columns, and the value. The rotated key makes a product of its own, since
Triton's tiles are powers of two wide.

Pallas' Triton backend is deprecated by jax; Mosaic GPU is the one to use on Hopper.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads (parts of the query heads of latents), G = H/K, D head dim, V width of a value; A
query tiles, B tokens of a tile, C slots a step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.implementation import before_ampere, capability_of
from kernels_pallas.paged_attention.common import (
    LOG2E,
    NEG,
    combine,
    interpretation,
    multiprocessors,
    rows_of,
)
from kernels_pallas.paged_attention.interface import (
    AttentionOptions,
    Options,
    Shapes,
    kv_heads_of,
    shapes_of,
    unknown_options,
)
from kernels_pallas.paged_attention.pool_layout import ScaledPool, slots_last_layout

MIN_ROWS = 16  # of a Triton matmul
# Half of it, and half of C, for heads over 128: Ada has 99 KiB of shared memory for queries and
# pipeline.
PREFILL_ROWS = 128
LATENT_ROWS = 32  # of a product, at most: V numbers a row are in registers, D in shared memory
SLOTS = 64  # C
PROGRAMS = 2  # a multiprocessor; decode splits its contexts to have so many
MAX_SPLITS = 16

OPTIONS = ("scale", "soft_cap", "window", "value_dim", "sinks", "latent", "ends")

pool_layout = slots_last_layout


def unsupported(shapes: Shapes, attention: AttentionOptions, device: Any) -> str | None:
    """Return why these shapes and options cannot run on a device, or None."""
    if reason := unknown_options(attention, OPTIONS):
        return reason
    dtype, head_dim = jnp.dtype(shapes.dtype), shapes.head_dim
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}: only bfloat16 and float16"
    if attention.latent:
        latent = attention.value_width(head_dim)
        rotated = head_dim - latent
        if latent not in (64, 128, 256, 512) or rotated not in (16, 32, 64, 128):
            sizes = "only 64 to 512 and 16 to 128, powers of two"
            return f"latents of {latent} and rotated keys of {rotated}: {sizes}"
    elif attention.value_dim is not None:
        return f"values of {attention.value_dim}: only the keys' width, {head_dim}"
    elif head_dim not in (32, 64, 128, 256):
        return f"head_dim {head_dim}: only 32, 64, 128 and 256"
    capability = capability_of(device)
    if shapes.kv_dtype == jnp.float8_e4m3fn and capability is not None and capability < 8.9:
        return f"{shapes.scaled}: compute capability {capability}, only from 8.9"
    return before_ampere(device)


class Tiles(NamedTuple):
    """The query tiles of a step, int32 [A] each: a tile's row, -1 for no tile, and its first query
    in the row.
    """

    row: Array
    first: Array


def prepare(
    query_start_loc_S1: Array,
    context_lens_S: Array,
    *,
    num_tokens: int,
    shapes: Shapes,
    window: int | None,
    ends_T: Array | None = None,
) -> Tiles:
    """Return the query tiles of a step, the same for all layers. num_tokens is T."""
    del context_lens_S, window, ends_T
    tokens = _tile_tokens(shapes)
    tiles_S = (query_start_loc_S1[1:] - query_start_loc_S1[:-1] + tokens - 1) // tokens
    A = -(-num_tokens // tokens) + shapes.num_rows
    row_A, nth_A = rows_of(tiles_S, jnp.arange(A, dtype=jnp.int32))
    return Tiles(jnp.where(nth_A < tiles_S[row_A], row_A, -1), nth_A * tokens)


def prefill(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    prepared: Tiles | None = None,
    *,
    options: Options,
    sinks_H: Array | None = None,
    ends_T: Array | None = None,
) -> Array:
    """Causal attention of packed queries, any number a row; see `reference.prefill`.

    Raises NotImplementedError with the reason that `unsupported` gives.
    """
    T, shapes = q_THD.shape[0], shapes_of(q_THD, pool, block_table_SM, options)
    query_start_loc_S1 = jnp.asarray(query_start_loc_S1)
    if prepared is None:
        prepared = prepare(
            query_start_loc_S1,
            context_lens_S,
            num_tokens=T,
            shapes=shapes,
            window=options.attention.window,
        )
    rows = (block_table_SM, context_lens_S, query_start_loc_S1)
    args = (q_THD, pool, layer, *rows, prepared, sinks_H, ends_T)
    o_THD = _attend(*args, tokens=_tile_tokens(shapes), splits=1, options=options)
    live_T = jnp.arange(T) < query_start_loc_S1[-1]
    return jnp.where(live_T[:, None, None], o_THD, 0)


def decode(
    q_SHD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    *,
    options: Options,
    sinks_H: Array | None = None,
    splits: int | None = None,
) -> Array:
    """Attention of one query a row, the last token of its context; see `reference.decode`.

    splits: programs for one context; None chooses. Raises NotImplementedError with the reason that
    `unsupported` gives.
    """
    (S, M), P, K = block_table_SM.shape, pool.shape[1], _parts(q_SHD, pool, options, tokens=1)
    context_lens_S = jnp.asarray(context_lens_S)
    rows_S = jnp.where(context_lens_S > 0, jnp.arange(S, dtype=jnp.int32), -1)
    tiles, starts_S1 = Tiles(rows_S, jnp.zeros_like(rows_S)), jnp.arange(S + 1, dtype=jnp.int32)
    programs = PROGRAMS * multiprocessors()
    splits = splits or min(max(-(-programs // (S * K)), 1), MAX_SPLITS, M * P // SLOTS + 1)
    args = (q_SHD, pool, layer, block_table_SM, context_lens_S, starts_S1, tiles, sinks_H, None)
    o_SHD = _attend(*args, tokens=1, splits=splits, options=options)
    return jnp.where((context_lens_S > 0)[:, None, None], o_SHD, 0)


def _parts(q_THD: Array, pool: Array | ScaledPool, options: Options, *, tokens: int) -> int:
    """Return K: into how many parts programs cut the query heads. tokens: of a tile."""
    if not options.attention.latent:
        return kv_heads_of(pool, options.attention)
    H = q_THD.shape[1]
    return min(H // G for G in range(1, max(1, LATENT_ROWS // tokens) + 1) if H % G == 0)


def _tile_tokens(shapes: Shapes) -> int:
    """Return B of prefill."""
    rows = PREFILL_ROWS if shapes.head_dim <= 128 else PREFILL_ROWS // 2
    return max(1, rows // pl.next_power_of_2(shapes.num_heads // shapes.num_kv_heads))


@functools.partial(jax.jit, static_argnames=("options", "tokens", "splits"))
def _attend(
    q_THD: Array,
    pool: Array | ScaledPool,
    layer: Array | int,
    block_table_SM: Array,
    context_lens_S: Array,
    query_start_loc_S1: Array,
    tiles: Tiles,
    sinks_H: Array | None,
    ends_T: Array | None,
    *,
    options: Options,
    tokens: int,
    splits: int,
) -> Array:
    """Return the results of every query that is in a tile; other rows of the result are undefined.

    tokens: of a tile.
    """
    (T, H, D), (blocks, P, rows, width) = q_THD.shape, pool.shape
    attention, V = options.attention, options.attention.value_width(q_THD.shape[2])
    shapes = shapes_of(q_THD, pool, block_table_SM, options)
    interpret = interpretation("triton", unsupported, shapes, options)
    K = _parts(q_THD, pool, options, tokens=tokens)
    G = H // K
    # Rows of a token in a tile, G of them real.
    heads = max(pl.next_power_of_2(G), MIN_ROWS // tokens)
    C, stages = (SLOTS, 3) if D <= 128 else (SLOTS // 2, 2)
    if D > 256:  # of latents
        C, stages = SLOTS // 2 if tokens * heads <= MIN_ROWS else SLOTS // 4, 1
    kernel = functools.partial(
        _kernel,
        G=G,
        heads=heads,
        tokens=tokens,
        P=P,
        C=C,
        attention=attention,
        scaled=isinstance(pool, ScaledPool),
        has_ends=ends_T is not None,
    )
    values: Any = pool
    scales: tuple[Array, ...] = ()
    if isinstance(pool, ScaledPool):
        # Pallas counts in signed 32 bits up to 2**32 bytes, which only single bytes overflow.
        if 2**31 < pool.values.size <= 2**32:
            raise NotImplementedError(
                f"triton: {shapes.scaled} in a pool of {pool.values.size} bytes, which must not be "
                "between 2**31 and 2**32: change num_blocks"
            )
        assert pool.slots_last, "as its pool_layout has them"
        values, scales = pool.values, (pool.scales,)
    outputs = (
        ((T, splits, K, G, V), jnp.float32 if splits > 1 else q_THD.dtype),
        ((T, splits, K, G), jnp.float32),
    )
    o, lse = pl.pallas_call(
        kernel,
        grid=(tiles.row.shape[0], K, splits),
        out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if (splits > 1 or tokens == 1) and D <= 256 else 8, num_stages=stages
        ),
        name="paged_attention",
    )(
        q_THD.reshape(T, K, G, D),
        jnp.reshape(values, (blocks * P, rows, width)),
        jnp.asarray(block_table_SM),
        jnp.asarray(context_lens_S),
        query_start_loc_S1,
        *tiles,
        jnp.reshape(jnp.asarray(layer, jnp.int32) * (blocks // options.num_layers), (1,)),
        *scales,
        *(() if ends_T is None else (jnp.asarray(ends_T, jnp.int32),)),
        *(() if sinks_H is None else (jnp.asarray(sinks_H, jnp.float32),)),
    )
    return (o[:, 0] if splits == 1 else combine(o, lse).astype(q_THD.dtype)).reshape(T, H, V)


def _kernel(
    q_ref,
    pool_ref,
    table_ref,
    contexts_ref,
    starts_ref,
    rows_ref,
    firsts_ref,
    first_block_ref,
    *refs,
    G: int,
    heads: int,
    tokens: int,
    P: int,
    C: int,
    attention: AttentionOptions,
    scaled: bool,
    has_ends: bool,
):
    *more, out_ref, lse_ref = refs
    scales, more = (more[:1], more[1:]) if scaled else ([], more)
    ends, sinks = (more[:1], more[1:]) if has_ends else ([], more)
    tile, head, split, splits = (
        pl.program_id(0),
        pl.program_id(1),
        pl.program_id(2),
        out_ref.shape[1],
    )
    row = rows_ref[tile]
    D, rows, window, soft_cap = (
        q_ref.shape[-1],
        tokens * heads,
        attention.window,
        attention.soft_cap,
    )
    V = attention.value_width(D)
    # Row of the pool, first column and width of each part of a key, then of the value.
    sources = [(2 * head, 0, D), (2 * head + 1, 0, D)]
    if attention.latent:
        sources = [(0, 0, V), (0, V, D - V)]

    @pl.when(row >= 0)
    def _():
        start, first, context = starts_ref[row], firsts_ref[tile], contexts_ref[row]
        count = starts_ref[row + 1] - start
        at_R = jnp.arange(rows)
        token_R, head_R = first + lax.div(at_R, heads), lax.rem(at_R, heads)
        real_R = (token_R < count) & (head_R < G)
        position_R = context - count + token_R
        here = ((start + token_R)[:, None], head, head_R[:, None])

        def columns(first, count):
            return (first + jnp.arange(count))[None, :]

        def queries(first, count):
            source = q_ref.at[*here, columns(first, count)]
            return plgpu.load(source, mask=real_R[:, None], other=0.0)

        qs = [queries(*columns) for _, *columns in sources[: 2 if attention.latent else 1]]

        # Slots that some query of the tile sees.
        end, last_R = jnp.minimum(context - count + first + tokens, context), position_R
        if ends:
            ends_R = plgpu.load(ends[0].at[start + token_R], mask=real_R, other=0)
            end = jnp.minimum(jnp.maximum(end, jnp.max(ends_R)), context)
            last_R = jnp.maximum(position_R, ends_R - 1)
        begin = 0 if window is None else jnp.maximum(context - count + first + 1 - window, 0)
        steps_from = lax.div(begin, C)
        steps = pl.cdiv(end, C) - steps_from
        share = pl.cdiv(steps, splits)
        step0 = steps_from + split * share
        step1 = jnp.minimum(step0 + share, steps_from + steps)
        slot_C = jnp.arange(C)

        def blocks(step):
            slot = step * C + slot_C
            return plgpu.load(table_ref.at[row, lax.div(slot, P)], mask=slot < end, other=0)

        def body(step, carry):
            top, total, acc, block_C = carry
            slot_C_ = step * C + slot_C
            following = blocks(step + 1)
            seen_C = (slot_C_ >= begin) & (slot_C_ < end)
            of_block_C = lax.rem(slot_C_, P)
            slots = ((first_block_ref[0] + block_C) * P + of_block_C)[:, None]

            def part(nth):
                """Return one of the sources of the slots, and its scales."""
                pool_row, *place = sources[nth]
                source = pool_ref.at[slots, pool_row, columns(*place)]
                x = plgpu.load(source, mask=seen_C[:, None], other=jnp.zeros((), pool_ref.dtype))
                if not scaled:
                    return x, None
                nth_scale = nth if attention.latent else pool_row
                source = scales[0].at[first_block_ref[0] + block_C, nth_scale, of_block_C]
                return x.astype(q_ref.dtype), plgpu.load(source, mask=seen_C, other=0.0)[None, :]

            def product(q, k, of_keys):
                s = plgpu.dot(q, k.T) * attention.scale
                return s if of_keys is None else s * of_keys

            first = part(0)
            s = product(qs[0], *first)
            if attention.latent:
                s += product(qs[1], *part(1))
            s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
            visible = (slot_C_[None, :] <= last_R[:, None]) & seen_C[None, :]
            if window is not None:
                visible &= slot_C_[None, :] > position_R[:, None] - window
            s = jnp.where(visible, s * LOG2E, NEG)
            new = jnp.maximum(top, jnp.max(s, axis=1))
            p, alpha = jnp.exp2(s - new[:, None]), jnp.exp2(top - new)
            v, of_values = first if attention.latent else part(1)
            weights = p if of_values is None else p * of_values
            acc = acc * alpha[:, None] + plgpu.dot(weights.astype(v.dtype), v)
            return new, total * alpha + jnp.sum(p, axis=1), acc, following

        nothing = jnp.zeros((rows,), jnp.float32)
        softmax = nothing + NEG, nothing
        if sinks:  # a score of the first split
            sink_R = plgpu.load(sinks[0].at[head * G + head_R], mask=real_R, other=0.0)
            softmax = (
                jnp.where(split == 0, sink_R * LOG2E, NEG),
                jnp.where(split == 0, nothing + 1, 0),
            )
        state = (*softmax, jnp.zeros((rows, V), jnp.float32), blocks(step0))
        top, total, acc, _ = lax.fori_loop(step0, step1, body, state)
        # A query that has seen only masked keys has weights of exp2(0); its maximum shows that they
        # are void.
        total = jnp.where(top > NEG, total, 0.0)
        out = acc / jnp.where(total > 0, total, 1.0)[:, None]
        real = jnp.broadcast_to(real_R[:, None], out.shape)
        plgpu.store(
            out_ref.at[here[0], split, *here[1:], columns(0, V)],
            out.astype(out_ref.dtype),
            mask=real,
        )
        if splits > 1:
            # A sum is at least 1, its maximum's weight, or 0.
            lse = top + jnp.log2(jnp.maximum(total, 1.0))
            plgpu.store(lse_ref.at[start + token_R, split, head, head_R], lse, mask=real_R)
