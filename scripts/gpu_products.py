"""The products that gpu_timed times beside attention: those with weights in 8 and 4 bits, those of
experts and those of adapters.
"""

import functools
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from gpu_jobs import Cases, Found
from gpu_seconds import seconds_of

from jpaged.models.layers import low_rank
from jpaged.models.layers.mlp import gated
from jpaged.models.quantized import fp8_product, quantized
from kernels_pallas.experts import mosaic_gpu, tiles, triton
from kernels_pallas.experts.interface import ExpertWeights, Shapes


@functools.partial(jax.jit, static_argnums=0)
def noise(shape: tuple[int, ...]) -> Any:
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def in_fp8(dry: bool) -> Cases:
    """Return what times an 8B model's FFN with fp8 weights, for x in bf16 and in fp8, and with bf16
    weights beside them.
    """
    rows, ways = (16,) if dry else (64, 256, 1024, 8192), ("x in bf16", "x in fp8", "bf16")
    return {
        f"fp8, {n} rows, {way}": functools.partial(product, dry, n, way)
        for n, way in itertools.product(rows, ways)
    }


def product(dry: bool, rows: int, way: str) -> Found:
    plain = noise((96, 64) if dry else (28672, 4096))
    x, weight = noise((rows, plain.shape[1])), quantized(plain, "fp8", 1)
    ways = {"x in bf16": lambda x, w: w.linear(x).astype(x.dtype), "bf16": lambda x, w: x @ w.T}
    call = ways.get(way, lambda x, w: fp8_product(x, w).astype(x.dtype))
    weight = plain if way == "bf16" else weight
    compiled = jax.jit(call).lower(x, weight).compile()
    seconds = seconds_of(lambda: compiled(x, weight), jax.block_until_ready, dry)
    size = jnp.abs(compiled(x, weight)).mean(dtype=jnp.float32)
    return {"us": 1e6 * seconds, "size": float(size)}


def mixtures(dry: bool) -> Cases:
    """Return what times the experts of a layer of GPT-OSS 20B, by Triton and in tiles by XLA, and
    those in 8 and 4 bits by Mosaic where it runs on the card.
    """
    forms, rows = ("int4", "fp8", "int8", "bf16"), (16,) if dry else (32, 2048)
    shapes = Shapes(dtype=jnp.bfloat16, hidden_size=2880, expert_size=2880, is_plain=False)
    device = None if dry else jax.devices()[0]
    ways = ("triton", "tiles", "mosaic_gpu")
    ways = ways if mosaic_gpu.unsupported(shapes, device) is None else ways[:2]
    # Of bf16 these widths are no whole tiles; an interpreter takes a minute for each.
    widened = ("int4",) if dry else forms[:-1]
    return {
        f"experts, {n} rows, {form}, {way}": functools.partial(mixture, dry, n, form, way)
        for n, form, way in itertools.product(rows, forms, ways)
        if way != "mosaic_gpu" or form in widened
    }


def mixture(dry: bool, rows: int, form: str, way: str) -> Found:
    X, width, A = (2, 128, 1) if dry else (32, 2880, 4)
    up, down = noise((X, 2, width, width)), noise((X, width, width)) / width**0.5
    if form != "bf16":
        up, down = (quantized(w, form, w.ndim - 1) for w in (up, down))
    weights = ExpertWeights(gate_up=up, gate_up_bias=None, down=down)
    chosen = jnp.arange(rows * A, dtype=jnp.int32).reshape(rows, A) * 7 % X
    args = noise((rows, width)), chosen, jnp.full((rows, A), 1 / A), weights
    options = {"interpret": True} if dry and way != "tiles" else {}
    modules = {"triton": triton, "tiles": tiles, "mosaic_gpu": mosaic_gpu}
    experts: Any = modules[way].experts
    call = functools.partial(experts, glu=functools.partial(gated, "silu"), **options)
    compiled = jax.jit(call).lower(*args).compile()
    seconds = seconds_of(lambda: compiled(*args), jax.block_until_ready, dry)
    return {"us": 1e6 * seconds, "size": float(jnp.abs(compiled(*args)).mean())}


def adapters(dry: bool) -> Cases:
    """Return what times a product alone, and with the adapters of its rows added in each way: `all`
    slots are multiplied, a `copy` of each row's pair is made, or jax's ragged_dot is called.
    """
    inputs, outputs, slots, rank = (64, 64, 8, 4) if dry else (1024, 3072, 64, 16)

    @functools.cache  # made for the first case
    def arrays() -> tuple[Any, Any, Any]:
        shapes = (1, slots, rank, inputs), (slots, rank, outputs), (outputs, inputs)
        a, b, weight = map(noise, shapes)
        return a, b, weight

    def ragged(x: Any, slot: Any) -> Any:
        a, b, _ = arrays()
        order, sizes = jnp.argsort(slot), jnp.bincount(slot, length=slots)
        h = jax.lax.ragged_dot(x[order], a[0].swapaxes(1, 2), sizes)
        y = jax.lax.ragged_dot(h, b, sizes, preferred_element_type=jnp.float32)
        return jnp.zeros_like(y).at[order].set(y)

    def case(rows: int, way: str) -> Found:
        a, b, weight = arrays()

        def added(x: Any, slot: Any) -> Any:
            adapter = low_rank.LowRank(a=a, b=(b,), slot_T=slot, joined=0)
            return adapter(x, lambda x, w, dtype: jnp.dot(x, w.T, preferred_element_type=dtype))

        ways = {"ragged": ragged, "alone": lambda x, _: x @ weight.T}
        x, slot = noise((rows, inputs)), jnp.arange(rows) * 7 % slots
        with mock.patch.object(low_rank, "PASSES", 0 if way == "copy" else 1 << 30):
            call = jax.jit(ways.get(way, added)).lower(x, slot).compile()
        seconds = seconds_of(lambda: call(x, slot), jax.block_until_ready, dry)
        return {"us": 1e6 * seconds, "size": float(jnp.abs(call(x, slot)).mean())}

    cases = itertools.product((4,) if dry else (4, 32, 256), ("alone", "all", "copy", "ragged"))
    return {f"{rows} rows, {way}": functools.partial(case, rows, way) for rows, way in cases}
