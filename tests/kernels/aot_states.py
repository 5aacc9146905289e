"""Layers that keep a state or latents, compiled for chips that are not there.

    python -m tests.kernels.aot_states cuda sm_90a
    python -m tests.kernels.aot_states tpu v5e:2x2

compiles one layer's step and its chunks of a prompt over a donated pool, and prints a JSON line for
each: instructions that would copy the pool, bytes of temporaries, those of the rows' states or
latents (once), and on CUDA the loops and branches at which the host waits for the card (asked). The
control does not donate its pool. Names in the command line: these alone. The exit status is 1 where
a pool is copied, or the control's is not.
"""

import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding

from kernels_pallas import short_conv
from kernels_pallas.gated_delta import triton as delta_triton
from kernels_pallas.gated_delta import xla as delta_xla
from kernels_pallas.mamba2 import xla as mamba2
from kernels_pallas.packed_rows import PackedRows
from kernels_pallas.paged_attention import triton, xla
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from scripts._common import absent_device, stay_on_cpu
from tests.hlo import pool_copies
from tests.kernels.aot_decode import asked

ROWS, TOKENS, SLOTS = 32, 2048, 512
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
CONTROL = "control, not donated"
Call = tuple[Callable[..., tuple[Any, Any]], Any, tuple[Any, ...], int]


def shape(*sizes: int, dtype: Any = I32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def delta(module: Any, phase: str, channels: int = 1) -> Call:
    """A layer of Qwen3-Next: 16 key heads, 32 value heads of 128; of Kimi Linear with as many key
    heads and a decay for each of 128 channels.
    """
    tokens = ROWS if phase == "decode" else TOKENS
    keys, values = (shape(tokens, n, 128, dtype=F32) for n in (16 if channels == 1 else 32, 32))
    decays, strengths = shape(tokens, 32, channels, dtype=F32), shape(tokens, 32, dtype=F32)
    return _of_states(module, phase, (32, 128, 128), (keys, keys, values, decays, strengths))


def mamba(phase: str) -> Call:
    """A layer of Nemotron 3 Nano: 64 heads of 64 with states of 128, in 8 groups."""
    tokens = ROWS if phase == "decode" else TOKENS
    x, decays = shape(tokens, 64, 64, dtype=F32), shape(tokens, 64, dtype=F32)
    keys = shape(tokens, 8, 128, dtype=F32)
    return _of_states(mamba2, phase, (64, 64, 128), (x, decays, keys, keys))


def _of_states(module: Any, phase: str, state: tuple[int, ...], tokens: tuple[Any, ...]) -> Call:
    """Return the call of a module over a pool of such states in f32."""
    pool = shape(SLOTS, *state, dtype=F32)

    def run(pool: Array, rows: Any, *tokens: Array) -> tuple[Array, Array]:
        o, pool = getattr(module, phase)(*tokens, pool, PackedRows(*rows))
        return pool, o

    return run, pool, (_rows(), *tokens), pool.size // SLOTS * ROWS * 4


def convolution(phase: str) -> Call:
    """The same layer's convolution of 4 taps over 8192 channels."""
    tokens = ROWS if phase == "decode" else TOKENS
    pool = shape(SLOTS, 3, 8192, dtype=BF16)

    def run(pool: Array, rows: Any, x: Array, weight: Array) -> tuple[Array, Array]:
        y, pool = getattr(short_conv, phase)(x, weight, pool, PackedRows(*rows))
        return pool, y

    x, weight = shape(tokens, 8192, dtype=BF16), shape(8192, 4, dtype=BF16)
    return run, pool, (_rows(), x, weight), pool.size // SLOTS * ROWS * 2


def latents(module: Any, phase: str) -> Call:
    """16 heads over latents of 512 and rotated keys of 64, contexts of up to 2560."""
    attention = AttentionOptions(scale=0.1, value_dim=512, latent=True)
    options = Options(attention=attention, num_layers=2, interpret=False)
    blocks, tokens = 40, ROWS if phase == "decode" else TOKENS
    pool = shape(2 * SLOTS * 4, 64, 1, 576, dtype=BF16)
    starts = () if phase == "decode" else (shape(ROWS + 1),)

    def run(pool: Array, q: Array, layer: Array, *rows: Array) -> tuple[Array, Array]:
        pool = pool.at[0, 0].set(q[0, :1])  # something is written, in place
        return pool, getattr(module, phase)(q, pool, layer, *rows, options=options)

    q = shape(tokens, 16, 576, dtype=BF16)
    read_once = ROWS * blocks * 64 * 576 * 2
    return run, pool, (q, shape(), shape(ROWS, blocks), shape(ROWS), *starts), read_once


def _rows() -> tuple[Any, ...]:
    return shape(ROWS + 1), shape(ROWS), shape(ROWS), shape(ROWS)


PROGRAMS: dict[str, Call] = {
    "delta step, xla": delta(delta_xla, "decode"),
    "delta chunks, xla": delta(delta_xla, "prefill"),
    "KDA step, xla": delta(delta_xla, "decode", channels=128),
    "KDA chunks, xla": delta(delta_xla, "prefill", channels=128),
    "Mamba-2 step": mamba("decode"),
    "Mamba-2 chunks": mamba("prefill"),
    "convolution step": convolution("decode"),
    "convolution of a prompt": convolution("packed"),
    "latents step, xla": latents(xla, "decode"),
    "latents prompt, xla": latents(xla, "prefill"),
    CONTROL: delta(delta_xla, "decode"),
}
ON_CUDA: dict[str, Call] = {
    "delta step, triton": delta(delta_triton, "decode"),
    "KDA step, triton": delta(delta_triton, "decode", channels=128),
    "latents step, triton": latents(triton, "decode"),
    "latents prompt, triton": latents(triton, "prefill"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiled program takes; see the module."""

    name: str
    pool_copies: int
    temporary_bytes: int
    once: int
    asked: int


def compiled(platform: str, chip: str, name: str) -> Compiled:
    run, pool, args, once = (PROGRAMS | ON_CUDA)[name]
    with absent_device(platform, chip) as device, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        where = SingleDeviceSharding(device)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (pool, *args)
        )
        donated = () if name == CONTROL else (0,)
        program = jax.jit(functools.partial(run), donate_argnums=donated)
        made = program.trace(*placed).lower().compile()
    text, memory = made.as_text(), made.memory_analysis()
    assert text is not None and memory is not None
    return Compiled(
        name=name,
        pool_copies=len(pool_copies(text, pool.size)),
        temporary_bytes=memory.temp_size_in_bytes,
        once=once,
        asked=asked(text) if platform == "cuda" else 0,
    )


def main(platform: str, chip: str, names: list[str]) -> Iterator[Compiled]:
    for name in names or [*PROGRAMS, *(ON_CUDA if platform == "cuda" else ())]:
        yield compiled(platform, chip, name)


if __name__ == "__main__":
    stay_on_cpu()
    good = True
    for made in main(sys.argv[1], sys.argv[2], sys.argv[3:]):
        print(json.dumps(dataclasses.asdict(made)), flush=True)
        good &= (made.pool_copies > 0) == (made.name == CONTROL)
    sys.exit(0 if good else 1)
