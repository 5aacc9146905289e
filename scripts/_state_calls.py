"""Calls of the layers that keep a state or latents, with the sizes of models: compiled for absent
chips by tests/kernels/aot_states.py, and timed on the card at hand by gpu_states.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import short_conv
from kernels_pallas.gated_delta import triton as delta_triton
from kernels_pallas.gated_delta import xla as delta_xla
from kernels_pallas.mamba2 import triton as mamba2_triton
from kernels_pallas.mamba2 import xla as mamba2_xla
from kernels_pallas.packed_rows import PackedRows
from kernels_pallas.paged_attention import tpu, triton, xla
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.kv_write import write_kv

F32, BF16 = jnp.float32, jnp.bfloat16
P = 64  # slots of a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows, tokens of their prompts together, slots of the pool of states, heads of states and
    their width; blocks of each row, width of a latent and of its rotated key.
    """

    rows: int
    tokens: int
    slots: int
    heads: int
    width: int
    blocks: int
    latent: int
    rotated: int


# A layer of Qwen3-Next (with as many key heads, of Kimi Linear), and one of DeepSeek V2 Lite.
FULL = Sizes(
    rows=32, tokens=2048, slots=512, heads=32, width=128, blocks=40, latent=512, rotated=64
)
TINY = Sizes(rows=4, tokens=40, slots=9, heads=8, width=16, blocks=2, latent=64, rotated=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateCall:
    """One layer's step ("decode") or prompts.

    run: of a pool, which it changes, and `rest`; returns it and the result. values: makes the pool
    and the rest, of which jax.eval_shape makes the shapes alone. moved: bytes of the rows' states
    there and back, or of the latents that they attend to: what has to pass through memory.
    """

    run: Callable[..., tuple[Any, Any]]
    values: Callable[[], tuple[Any, tuple[Any, ...]]]
    moved: int


def noise(seed: int, *shape: int, dtype: Any = F32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def delta(module: Any, phase: str, sizes: Sizes, channels: int = 1) -> StateCall:
    """The gated delta rule with two value heads a key head; with a decay for each of several
    channels of a key, one.
    """
    heads, width, tokens = sizes.heads, sizes.width, _tokens(phase, sizes)
    key_heads = heads // 2 if channels == 1 else heads

    def of_tokens() -> tuple[Array, ...]:
        q, k = (noise(i, tokens, key_heads, width) * width**-0.5 for i in (1, 2))
        decays = -jnp.abs(noise(4, tokens, heads, channels))
        strengths = jax.nn.sigmoid(noise(5, tokens, heads))
        return q * width**-0.5, k, noise(3, tokens, heads, width), decays, strengths

    return _of_states(module, phase, sizes, (heads, width, width), of_tokens)


def mamba(module: Any, phase: str, sizes: Sizes) -> StateCall:
    """Mamba-2 with twice the heads, half as wide, eight of them a group: Nemotron 3 Nano's."""
    heads, width, tokens = 2 * sizes.heads, sizes.width, _tokens(phase, sizes)

    def of_tokens() -> tuple[Array, ...]:
        keys = (noise(i, tokens, heads // 8, width) * width**-0.5 for i in (1, 2))
        return noise(3, tokens, heads, width // 2), -jnp.abs(noise(4, tokens, heads)), *keys

    return _of_states(module, phase, sizes, (heads, width // 2, width), of_tokens)


def convolution(phase: str, sizes: Sizes) -> StateCall:
    """The short convolution of 4 taps before the gated delta rule."""
    channels, function = 2 * sizes.heads * sizes.width, getattr(short_conv, phase)

    def values() -> tuple[Array, tuple[Any, ...]]:
        x = noise(1, _tokens(phase, sizes), channels, dtype=BF16)
        pool = noise(0, 8 * sizes.slots, 3, channels, dtype=BF16)  # more than a TPU's VMEM
        return pool, (_rows(phase, sizes), x, noise(2, channels, 4, dtype=BF16))

    def run(pool: Array, rows: PackedRows, x: Array, weight: Array) -> tuple[Array, Array]:
        y, pool = function(x, weight, pool, rows)
        return pool, y

    return StateCall(run=run, values=values, moved=2 * sizes.rows * 3 * channels * 2)


def latents(module: Any, phase: str, sizes: Sizes, interpret: bool | None) -> StateCall:
    """16 heads over the latents of the second of two layers."""
    attention = AttentionOptions(scale=0.1, value_dim=sizes.latent, latent=True)
    options = Options(attention=attention, num_layers=2, interpret=interpret)
    function, width, count = getattr(module, phase), sizes.latent + sizes.rotated, sizes.blocks
    layout = module.pool_layout(1, sizes.latent, sizes.rotated)

    def values() -> tuple[Array, tuple[Any, ...]]:
        q = noise(1, _tokens(phase, sizes), 16, width, dtype=BF16)
        blocks = sizes.rows * count
        pool = layout.pack(noise(0, 4 * blocks, P, 1, width, dtype=BF16))
        table = jax.random.permutation(jax.random.key(2), blocks).reshape(sizes.rows, count)
        contexts = jnp.full(sizes.rows, count * P - 3, jnp.int32)
        starts = () if phase == "decode" else (_starts(phase, sizes),)
        return pool, (q, jnp.int32(1), table.astype(jnp.int32), contexts, *starts)

    def run(pool: Array, q: Array, layer: Array, *rows: Array) -> tuple[Array, Array]:
        slots = jnp.arange(q.shape[0], dtype=jnp.int32)
        pool = write_kv(pool, layer, layout.pack(q[:, :1]), slots, num_layers=2)
        return pool, function(q, pool, layer, *rows, options=options)

    return StateCall(run=run, values=values, moved=sizes.rows * count * P * width * 2)


def calls(sizes: Sizes, interpret: bool | None = None) -> dict[str, StateCall]:
    """By name; behind a comma is the implementation, where there are several: a kernel for CUDA
    (triton) or TPUs (tpu), or XLA's form. interpret: as in Options, of the kernels of latents.
    """
    by_name = {}
    for name, phase in (("step", "decode"), ("chunks", "prefill")):
        for way, rule, scan in (
            ("xla", delta_xla, mamba2_xla),
            ("triton", delta_triton, mamba2_triton),
        ):
            by_name[f"delta {name}, {way}"] = delta(rule, phase, sizes)
            by_name[f"KDA {name}, {way}"] = delta(rule, phase, sizes, sizes.width)
            by_name[f"Mamba-2 {name}, {way}"] = mamba(scan, phase, sizes)
    by_name["convolution step"] = convolution("decode", sizes)
    by_name["convolution of prompts"] = convolution("packed", sizes)
    for name, phase in (("step", "decode"), ("prompts", "prefill")):
        by_name[f"latents {name}, xla"] = latents(xla, phase, sizes, interpret)
        by_name[f"latents {name}, triton"] = latents(triton, phase, sizes, interpret)
        by_name[f"latents {name}, tpu"] = latents(tpu, phase, sizes, interpret)
    return by_name


def _of_states(
    module: Any,
    phase: str,
    sizes: Sizes,
    state: tuple[int, int, int],
    of_tokens: Callable[[], tuple[Array, ...]],
) -> StateCall:
    """Return the call of a module over a pool of such states in f32."""
    function = getattr(module, phase)

    def values() -> tuple[Array, tuple[Any, ...]]:
        return noise(0, sizes.slots, *state), (_rows(phase, sizes), *of_tokens())

    def run(pool: Array, rows: PackedRows, *tokens: Array) -> tuple[Array, Array]:
        o, pool = function(*tokens, pool, rows)
        return pool, o

    heads, *matrix = state
    return StateCall(
        run=run, values=values, moved=2 * sizes.rows * heads * matrix[0] * matrix[1] * 4
    )


def _tokens(phase: str, sizes: Sizes) -> int:
    return sizes.rows if phase == "decode" else sizes.tokens


def _starts(phase: str, sizes: Sizes) -> Array:
    tokens_per_row = _tokens(phase, sizes) // sizes.rows
    return tokens_per_row * jnp.arange(sizes.rows + 1, dtype=jnp.int32)


def _rows(phase: str, sizes: Sizes) -> PackedRows:
    """Return rows that go on from the states that they write."""
    slots = jnp.arange(sizes.rows, dtype=jnp.int32)
    return PackedRows(_starts(phase, sizes), jnp.full_like(slots, P), slots, slots)
