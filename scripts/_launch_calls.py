"""What a decode step launches beside products and attention, by every kernel of the device at hand
and by XLA: what prepares attention, and the reading of logits. gpu_states.py times and compares
them, as it does the layers that keep a state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from _state_calls import BF16, F32, P, StateCall, noise
from jax import Array

from jpaged.models.layers.heads import Heads
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.layers.rope import Rotary
from kernels_pallas import vocab_tiles
from kernels_pallas.implementation import CUDA, Implementation
from kernels_pallas.paged_attention import head_write
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.kv_write import write_kv
from kernels_pallas.paged_attention.pool_layout import plain_pool_layout

D, TILE, EPS = 128, 128, 1e-6


def launch_calls(dry: bool) -> dict[str, dict[str, StateCall]]:
    """Return by what is done, and by who does it: Qwen3-0.6B's sizes at 256 rows."""
    device = jax.devices()[0]
    rows, K, G, tiles, blocks = (5, 1, 1, 71, 4) if dry else (256, 8, 2, 1187, 2000)
    shapes = Shapes(
        dtype=BF16, head_dim=D, block_size=P, num_heads=K * G, num_kv_heads=K, num_rows=rows
    )
    layout = plain_pool_layout(K, D)
    heads = {"xla": heads_written(None, rows, K, G, blocks)}
    for name, writer in kernels_of(head_write.IMPLEMENTATIONS):
        if writer.module().unsupported(shapes, layout, device) is None:
            heads[name] = heads_written(writer, rows, K, G, blocks)
    sums = {"xla": tiles_read(None, rows, tiles)}
    for name, reader in kernels_of(vocab_tiles.IMPLEMENTATIONS):
        if reader.module().unsupported(rows, tiles * TILE, TILE, device) is None:
            sums[name] = tiles_read(reader, rows, tiles)
    return {"heads written": heads, "logits read": sums}


def kernels_of(implementations: dict[str, Implementation]) -> list[tuple[str, Implementation]]:
    """Return what compiles for a card, by name: a dry run interprets it."""
    return [(name, x) for name, x in implementations.items() if x.is_compiled_for(CUDA[0])]


def heads_written(writer: Implementation | None, rows: int, K: int, G: int, N: int) -> StateCall:
    """What is between a layer's first product and its attention, into the second of two layers."""

    def values() -> tuple[Array, tuple[Any, ...]]:
        angles = noise(3, rows, D // 2)
        slots = jax.random.permutation(jax.random.key(4), N * P)[:rows].astype(jnp.int32)
        scales = tuple(1 + noise(i, D, dtype=BF16) / 4 for i in (5, 6))
        pool = noise(0, 2 * N, P, 2 * K, D, dtype=BF16)
        return pool, (
            noise(1, rows, K, G + 2, D, dtype=BF16),
            slots,
            scales,
            (jnp.cos(angles), jnp.sin(angles)),
        )

    def run(pool: Array, qkv: Array, slots: Array, scales: Any, turn: Any) -> tuple[Any, Any]:
        if writer is None:
            q_norm, k_norm = (RMSNorm(scale=x, config=NormConfig(eps=EPS)) for x in scales)
            heads = Heads(q_norm=q_norm, k_norm=k_norm, rotary=Rotary(cos=turn[0], sin=turn[1]))
            q, k, v = heads(qkv)
            kv = plain_pool_layout(K, D).token(k, v)
            return write_kv(pool, 1, kv, slots, num_layers=2), q
        q, pool = writer.module().write_heads(
            qkv,
            pool,
            1,
            slots,
            scales=scales,
            norm=head_write.HeadNorm(EPS),
            rotation=turn,
            num_layers=2,
            interpret=jax.default_backend() == "cpu",
        )
        return pool, q

    return StateCall(run=run, values=values, moved=4 * rows * K * (G + 2) * D)


def tiles_read(reader: Implementation | None, rows: int, tiles: int) -> StateCall:
    """The maxima and sums of a draw. The logits stand in the place of a pool."""

    def values() -> tuple[Array, tuple[Any, ...]]:
        return 3 * noise(0, rows, tiles * TILE), tuple(
            jnp.full(rows, x, F32) for x in (0.7, -2.0, 1.0)
        )

    def run(z: Array, tau: Array, floor: Array, all_tau: Array) -> tuple[Array, Array]:
        if reader is not None:
            is_interpreted = jax.default_backend() == "cpu"
            read = functools.partial(reader.module().read_tiles, interpret=is_interpreted)
            return z, jnp.stack(read(z, tau, floor, all_tau, tile=TILE))
        parts = z.reshape(rows, tiles, TILE)
        top = jnp.max(parts, axis=2)
        below = parts - top[:, :, None]
        kept = jnp.where(
            parts >= floor[:, None, None], jnp.exp(below / tau[:, None, None]), jnp.float32(0)
        )
        every = jnp.exp(below / all_tau[:, None, None])
        return z, jnp.stack([top, jnp.sum(kept, axis=2), jnp.sum(every, axis=2)])

    return StateCall(run=run, values=values, moved=4 * rows * tiles * TILE)
