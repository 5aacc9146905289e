"""Lowering and compiling for a TPU that is not there.

Lowering needs jax alone. A compile needs libtpu, which runs in a process of its own: `python -m
tests.kernels.aot_tpu v5e:2x2` compiles every program below for that chip (or those that are named
after it) and prints one JSON line for each.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jpaged.runtime.compiled_steps import compile_options
from kernels_pallas.paged_attention import tpu
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.kv_write import write_kv
from kernels_pallas.paged_attention.pool_layout import PoolLayout, ScaledPool
from scripts._common import LIBTPU, absent_devices
from tests.hlo import pool_copies
from tests.kernels import jax_tpu

LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """Write, then attend, in each of a few layers, for K KV heads of G query heads each; decode has
    T = S.
    """

    name: str
    T: int
    K: int = 8
    G: int = 2
    D: int = 128
    V: int | None = None  # the width of a value, or of a latent, where it is not D
    latent: bool = False
    P: int = 64
    S: int = 16
    M: int = 8
    N: int = (
        700  # 700 blocks of 64: a pool that does not fit in VMEM, where XLA would keep a small one
    )
    dtype: Any = jnp.bfloat16
    donate: bool = True
    is_offloaded: bool = False  # compiled without the options of engines
    is_jax: bool = False  # attention by jax's own kernel
    loop: bool = False  # over the layers, instead of a copy of the kernel for each
    sinks: bool = False
    window: int | None = None
    ends: bool = False  # queries see up to the end of an image
    kv_dtype: Any = None  # of 8 bits, with scales

    def pool(self, sharding: Any = None) -> Any:
        """As ShapeDtypeStructs."""
        layout, blocks = self.layout, LAYERS * self.N
        shape = (blocks, self.P, layout.rows, layout.width)
        values = jax.ShapeDtypeStruct(shape, self.kv_dtype or self.dtype, sharding=sharding)
        if self.kv_dtype is None:
            return values
        shape = (blocks, *layout.scales(self.P))
        scales = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        return ScaledPool(values, scales, layout.slots_last, layout.key_width)

    @property
    def layout(self) -> PoolLayout:
        return tpu.pool_layout(self.K, *self.vectors)

    @property
    def vectors(self) -> tuple[int, int | None]:
        """The widths of the two vectors that the pool holds of a KV head."""
        if self.latent and self.V is not None:
            return self.V, self.D - self.V
        return self.D, self.V

    @property
    def token(self) -> tuple[int, int]:
        """What a step writes of a token, before it is packed."""
        first, second = self.vectors
        return (2 * self.K, first) if second is None else (self.K, first + second)


F8 = jnp.float8_e4m3fn
latents = functools.partial(Program, K=1, G=16, D=576, V=512, latent=True)
PROGRAMS = (
    Program("decode_d128", 16),
    Program("prefill_d128", 320),
    Program("decode_d128_f32", 16, dtype=jnp.float32),
    Program("decode_d64", 16, D=64, N=1400),
    Program("prefill_d64", 320, D=64, N=1400),
    Program("prefill_d64_k3_g7", 320, K=3, G=7, D=64, N=2800),
    # As Gemma 3's and 4's layers, whose images see themselves.
    Program("prefill_d256_images", 320, D=256, K=4, window=128, ends=True),
    Program("prefill_d64_k3_g7_images", 320, K=3, G=7, D=64, N=2800, ends=True),
    Program("decode_d64_sinks", 16, G=8, D=64, N=1400, sinks=True),
    Program("prefill_d64_sinks", 320, G=8, D=64, N=1400, sinks=True),
    Program("decode_d80_k1", 16, K=1, G=4, D=80, P=16, N=20000),
    Program("decode_d256_k1", 16, K=1, G=8, D=256, N=1400),
    Program("decode_d256_k4", 16, K=4, D=256),
    Program("prefill_d256_k2_f32", 320, K=2, D=256, P=16, N=1400, dtype=jnp.float32),
    # 256 rows of 128k tokens, as Llama 3.1's default context makes them, and of a million.
    Program("decode_128k", 256, K=8, G=4, S=256, M=2048),
    Program("prefill_128k", 2048, K=8, G=4, S=256, M=2048),
    Program("decode_largest_table", 256, K=2, S=256, M=16384, N=2800),
    Program("prefill_largest_block", 512, K=16, G=8, D=256, P=256, N=20),
    Program("prefill_most_heads", 512, K=32, G=8, N=700),
    Program("decode_loop", 16, loop=True),
    Program("prefill_loop", 320, loop=True),
    Program("control_without_donation", 16, donate=False),
    Program("control_scattered_by_sparse_cores", 16, is_offloaded=True),
    # In 8 bits. Scales are what has to be larger than VMEM.
    Program("decode_d128_int8", 16, kv_dtype=jnp.int8, N=6000),
    Program("prefill_d128_fp8", 320, kv_dtype=jnp.float8_e4m3fn, N=6000),
    Program("decode_d64_k4_fp8", 16, K=4, D=64, P=16, N=20000, kv_dtype=jnp.float8_e4m3fn),
    Program("prefill_d256_k2_int8", 320, K=2, D=256, P=16, N=22000, kv_dtype=jnp.int8),
    Program("decode_loop_int8", 16, P=128, kv_dtype=jnp.int8, N=6000, loop=True),
    Program("control_int8_without_donation", 16, kv_dtype=jnp.int8, N=6000, donate=False),
    # Latents as DeepSeek's, of 16 to 128 query heads, in one row of 640 a token.
    latents("decode_latents", 16, N=2800),
    latents("decode_latents_h128", 16, N=2800, G=128),
    latents("decode_latents_128k", 256, S=256, M=1024, N=2800, P=128),
    latents("prefill_latents", 320, N=2800),
    latents("prefill_latents_h128_p8", 2048, N=22400, G=128, P=8),
    latents("decode_latents_int8", 16, N=50000, kv_dtype=jnp.int8),
    latents("prefill_latents_fp8", 320, N=50000, kv_dtype=F8, P=16),
    latents("decode_latents_loop", 16, N=2800, loop=True),
    latents("control_latents_without_donation", 16, N=2800, donate=False),
    # One KV head of a device, whose values are narrower than its keys.
    Program("prefill_d192_v128_k1", 320, K=1, G=8, D=192, V=128, N=2800),
    Program("decode_jax", 16, is_jax=True),
    Program("prefill_jax", 320, is_jax=True),
)


def step(program: Program) -> Callable[..., Any]:
    """The program as a function of pool, q [T, H, D], kv [T, *program.token], slots [T], table,
    contexts, starts.
    """
    options = Options(
        attention=AttentionOptions(
            scale=0.1,
            value_dim=program.V,
            latent=program.latent,
            window=program.window,
            ends=program.ends,
        ),
        num_layers=LAYERS,
        num_kv_heads=program.K,
        interpret=False,
    )
    how: Any = {"options": options}
    module = jax_tpu if program.is_jax else tpu
    if program.sinks:
        how["sinks_H"] = jnp.arange(program.K * program.G, dtype=program.dtype)
    if program.ends:
        how["ends_T"] = jnp.where(jnp.arange(program.T) % 50 < 30, 40, 0)
    layout = program.layout

    def run(pool: Any, q_THD: Array, kv: Array, slots_T: Array, *rows: Array) -> tuple[Any, Array]:
        def run_layer(layer: Array | int, state: tuple[Any, Array]) -> tuple[Any, Array]:
            pool, x = state
            pool = write_kv(pool, layer, layout.pack(kv), slots_T, num_layers=LAYERS)
            if program.T == program.S:
                o = module.decode(x, pool, layer, *rows[:2], **how)
            else:
                o = module.prefill(x, pool, layer, *rows, **how)
            return pool, x.at[..., : o.shape[-1]].add(o)

        if program.loop:
            return jax.lax.fori_loop(0, LAYERS, run_layer, (pool, q_THD))
        return functools.reduce(
            lambda state, layer: run_layer(layer, state), range(LAYERS), (pool, q_THD)
        )

    return run


def arguments(program: Program, sharding: Any = None) -> Iterator[Any]:
    T, K, G, D, S, M, i32 = (
        program.T,
        program.K,
        program.G,
        program.D,
        program.S,
        program.M,
        jnp.int32,
    )
    floats = ((T, K * G, D), (T, *program.token))
    yield program.pool(sharding)
    yield from (jax.ShapeDtypeStruct(shape, program.dtype, sharding=sharding) for shape in floats)
    yield from (
        jax.ShapeDtypeStruct(shape, i32, sharding=sharding)
        for shape in ((T,), (S, M), (S,), (S + 1,))
    )


def lower(program: Program) -> str:
    """StableHLO of the program for TPU, the kernels in it lowered to Mosaic."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")  # jax's own kernel asks
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return (
            jax.jit(step(program))
            .trace(*arguments(program))
            .lower(lowering_platforms=("tpu",))
            .as_text()
        )


def compile_all(chip: str, timeout: float) -> dict[str, dict[str, Any]]:
    """What `main` prints, by program."""
    command = [sys.executable, "-m", "tests.kernels.aot_tpu", chip]
    root = Path(__file__).parents[2]
    run = subprocess.run(
        command,
        cwd=root,
        env=os.environ | LIBTPU | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result for result in results}


def main(chip: str, *names: str) -> None:
    mesh = Mesh(np.array(absent_devices("tpu", chip)[:1]), ("x",), axis_types=(AxisType.Auto,))
    for program in (p for p in PROGRAMS if not names or p.name in names):
        start = time.perf_counter()
        # The abstract mesh tells Pallas which chip it is.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            args = arguments(program, NamedSharding(mesh, PartitionSpec()))
            donated = (0,) if program.donate else ()
            lowered = jax.jit(step(program), donate_argnums=donated).trace(*args).lower()
            options = None if program.is_offloaded else compile_options("tpu")
            compiled = lowered.compile(compiler_options=options)
        hlo, memory = compiled.as_text(), compiled.memory_analysis()
        assert hlo is not None and memory is not None
        result = {
            "name": program.name,
            "kernels": hlo.count('custom_call_target="tpu_custom_call"'),
            "pool_copies": [
                len(pool_copies(hlo, part.size)) for part in jax.tree.leaves(program.pool())
            ],
            "temporary_bytes": memory.temp_size_in_bytes,
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
