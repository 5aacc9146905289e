"""The C++ kernels of the CPU beside what XLA:CPU makes of the same: medians of rounds in turn, and
their ratio.

    python scripts/bench_cpu_kernels.py [--rounds 9] [--json FILE]

Every call has another weight, or another layer of the pool, so that what a step reads from memory
is read from memory here. Products are bf16 [M, K] . [N, K]; attention is of rows alike, blocks of
64 tokens, in bf16. Decode over long contexts is in bf16 and in 8 bits, of a pool on huge pages, its
share that of a plain read. Products with weights in 8 and 4 bits, interleaved where they are served
so, are beside the native one in bf16: GB/s are of their values and scales, and of a plain read. A
layer of experts (8 of 64) is computed for all of them (dense), in XLA's tiles and natively; its
GB/s are of the weights of those that were drawn. The gated delta rule is that of a layer of
Qwen3.5-35B-A3B, Mamba-2's scan that of one of Nemotron 3 Nano; their GB/s are of the states that
are read and written, and of a plain read of as many bytes.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import _common as common
import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.layers.mlp import gated
from jpaged.models.quantized import FORMS, QuantizedWeight, quantized
from jpaged.models.weight import aligned
from kernels_cpu import experts as native_experts
from kernels_cpu import gated_delta as native_delta
from kernels_cpu import mamba2 as native_scan
from kernels_cpu import paged_attention as native
from kernels_cpu import quantized as native_quantized
from kernels_cpu.library import level, unavailable
from kernels_cpu.linear import linear
from kernels_pallas.experts import tiles
from kernels_pallas.experts.interface import ExpertWeights
from kernels_pallas.gated_delta import xla as delta_xla
from kernels_pallas.mamba2 import xla as scan_xla
from kernels_pallas.packed_rows import PackedRows
from kernels_pallas.paged_attention import xla
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.pool_layout import ScaledPool

# N, K: gate_up and down of the 0.6B and of the 60M model
WEIGHTS = [(6144, 1024), (1024, 3072), (3072, 512), (512, 1536)]
ROWS = (8, 16, 32, 64, 128, 1024)
QUANTIZED_ROWS = (1, 4, 16, 64, 256)
QUANTIZED = ("int8", "fp8", "int4")
HEADS = {"60m": (8, 4, 64), "0.6b": (16, 8, 128)}  # H, K, D
# Model, rows, context, and queries a row, where it is a prefill.
ATTENTION = [
    ("60m", 32, 200, None),
    ("60m", 1, 512, None),
    ("60m", 1, 16384, None),
    ("0.6b", 16, 300, None),
    ("0.6b", 1, 4000, None),
    ("60m", 8, 128, 128),
    ("0.6b", 4, 250, 250),
    ("0.6b", 1, 2048, 2048),
]
# H, K, D of decode over long contexts, its rows, and their tokens.
LONG = [
    *((heads, 1, 16384) for heads in ((4, 4, 64), (8, 4, 64), (16, 4, 64), (32, 4, 64))),
    *((heads, 1, 16384) for heads in ((8, 8, 128), (16, 8, 128), (32, 8, 128), (64, 8, 128))),
    *((heads, 16, 16384) for heads in ((8, 4, 64), (16, 8, 128), (32, 8, 128), (64, 8, 128))),
]
EXPERTS = (64, 8, 1024, 384)  # X, of which A a token; E, F
EXPERT_ROWS = (1, 8, 32, 128, 512)
DELTA = (16, 32, 128)  # key heads, value heads and their width
STATE_ROWS = ((1, 1), (8, 1), (32, 1), (1, 512), (8, 64), (1, 2048))  # and tokens of each
DELTA_FORMS = {"native": native_delta, "xla": delta_xla}
SCAN = (64, 8, 64, 128)  # heads, groups, width of a head and of its state
SCAN_FORMS = {"native": native_scan, "xla": scan_xla}
BYTES = 150 << 20  # of weights or pool that one call goes through
BLOCK = 64


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time these calls in turn. Return the median seconds of each."""
    timers = {name: functools.partial(common.seconds_of, call) for name, call in calls.items()}
    return {name: statistics.median(s) for name, s in common.in_turn(timers, rounds).items()}


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32).astype(x.dtype)


def native_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return linear(x, weight, x.shape[0], x.dtype)


def quantized_product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Multiply by the arithmetic that the processor is fastest with."""
    best = level()
    assert best is not None
    parts = (w.values, w.scales, w.form.name, x.shape[0], w.zeros, best.activations)
    return native_quantized.linear(x, *parts, interleaved=w.form.interleaved)


def chain(multiply: Callable[..., jax.Array], x: jax.Array, weights: list[Any]) -> jax.Array:
    """Multiply with each weight in turn. Each product waits for the one before, and nothing else
    takes time.
    """
    for weight in weights:
        y = jax.lax.optimization_barrier(multiply(x, weight))
        x = x.at[0, 0].add(y[0, 0].astype(x.dtype))
    return x


def products(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    run = jax.jit(chain, static_argnums=0)
    for N, K in WEIGHTS:
        count = max(4, min(40, BYTES // (2 * N * K)))
        draws = (rng.standard_normal((N, K)) / K**0.5 for _ in range(count))
        weights = [jnp.asarray(draw, jnp.bfloat16) for draw in draws]
        for M in ROWS:
            x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
            forms = {"xla": plain, "native": native_product}
            calls = {name: functools.partial(run, form, x, weights) for name, form in forms.items()}
            seconds = medians(calls, rounds)
            operations = 2 * M * N * K * count / 1e9
            yield {
                "product": f"[{M}, {K}] . [{N}, {K}]",
                "xla_gflops": operations / seconds["xla"],
                "native_gflops": operations / seconds["native"],
                "ratio": seconds["native"] / seconds["xla"],
            }


def quantized_products(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    run = jax.jit(chain, static_argnums=0)
    for N, K in WEIGHTS[:2]:
        count = max(4, BYTES // (2 * N * K))
        draws = (rng.standard_normal((N, K), np.float32) / K**0.5 for _ in range(count))
        plain = [jnp.asarray(draw, jnp.bfloat16) for draw in draws]
        forms: dict[str, tuple[Any, list[Any]]] = {"bf16": (native_product, plain)}
        for form in QUANTIZED:
            best = level()
            assert best is not None
            interleaved = native_quantized.interleaves(form, N, best.activations)
            chosen = dataclasses.replace(FORMS[form], interleaved=interleaved)
            made = jax.jit(functools.partial(quantized, form=chosen, num_outputs=1))
            forms[form] = (quantized_product, [made(weight) for weight in plain])
        for M in QUANTIZED_ROWS:
            x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
            calls = {
                name: functools.partial(run, *form[:1], x, form[1]) for name, form in forms.items()
            }
            seconds, read = medians(calls, rounds), common.read_bandwidth()
            row: dict[str, Any] = {"weights": f"[{M}, {K}] . [{N}, {K}]", "read_gb_s": read}
            for name, (_, weights) in forms.items():
                size = sum(weight.nbytes for weight in weights)
                row[f"{name}_ms"] = 1e3 * seconds[name] / count
                row[f"{name}_gb_s"] = size / seconds[name] / 1e9
                row[f"{name}_ratio"] = seconds["bf16"] / seconds[name]
            yield row


def layers(
    module: Any, q: jax.Array, pool: Any, args: tuple[jax.Array, ...], num_layers: int
) -> jax.Array:
    """Attend over each layer of the pool in turn; with query starts in the args it is a prefill."""
    attend = module.decode if len(args) == 2 else module.prefill
    kind = AttentionOptions(scale=q.shape[-1] ** -0.5)
    options = Options(attention=kind, num_layers=num_layers, num_kv_heads=pool.shape[2] // 2)
    for layer in range(num_layers):
        q = q + attend(q, pool, jnp.int32(layer), *args, options=options)
    return q


def attention(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    run = jax.jit(layers, static_argnums=(0, 4))
    for model, S, context, queries in ATTENTION:
        H, K, D = HEADS[model]
        M, size = -(-context // BLOCK), queries or 1
        blocks = S * M + 1
        L = max(2, min(10, BYTES // (4 * blocks * BLOCK * K * D)))
        shape = (L * blocks, BLOCK, 2 * K, D)
        pool = jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
        table = jnp.asarray(1 + rng.permutation(S * M).reshape(S, M), jnp.int32)
        q = jnp.asarray(rng.standard_normal((S * size, H, D)), jnp.bfloat16)
        args = (table, jnp.full((S,), context, jnp.int32))
        if queries is not None:
            args += (jnp.arange(S + 1, dtype=jnp.int32) * size,)
        kernels = {"xla": xla, "native": native}
        calls = {k: functools.partial(run, m, q, pool, args, L) for k, m in kernels.items()}
        seconds = medians(calls, rounds)
        yield {
            "attention": f"{model} {'decode' if queries is None else 'prefill'} {S} x {context}",
            "xla_ms": 1e3 * seconds["xla"] / L,
            "native_ms": 1e3 * seconds["native"] / L,
            "ratio": seconds["native"] / seconds["xla"],
            "native_gb_s": S * context * 4 * K * D * L / seconds["native"] / 1e9,
        }


def decode(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    """Time native decode over long contexts. Its share is that of a plain read."""
    run = jax.jit(layers, static_argnums=(0, 4))
    drawn = rng.standard_normal(1 << 22, np.float32)
    for (H, K, D), S, context in LONG:
        M = context // BLOCK
        table = jnp.asarray(rng.permutation(S * M).reshape(S, M), jnp.int32)
        args = (table, jnp.full((S,), context, jnp.int32))
        q = jnp.asarray(rng.standard_normal((S, H, D)), jnp.bfloat16)
        for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8)):
            nbytes = 2 * S * context * K * D * dtype.itemsize  # of a layer
            L = max(1, BYTES // nbytes)
            values = aligned((L * S * M, BLOCK, 2 * K, D), dtype)
            numbers = (drawn if dtype.itemsize == 2 else 30 * drawn.clip(-4, 4)).astype(dtype)
            flat = values.reshape(-1)
            for begin in range(0, flat.size, numbers.size):
                part = flat[begin : begin + numbers.size]
                part[...] = numbers[: part.size]
            pool: Any = jax.device_put(values)
            if dtype.itemsize == 1:
                pool = ScaledPool(pool, jnp.full(values.shape[:3], 1 / 30, jnp.float32))
                nbytes += 8 * S * context * K
            calls = {"native": functools.partial(run, native, q, pool, args, L)}
            read, seconds = common.read_bandwidth(), medians(calls, rounds)["native"]
            rate = nbytes * L / seconds / 1e9
            yield {
                "decode": f"{dtype.name} K {K} G {H // K} D {D}, {S} x {context}",
                "native_ms": 1e3 * seconds / L,
                "native_gb_s": rate,
                "read_gb_s": read,
                "share": rate / read,
            }


def all_of_them(
    x: jax.Array, chosen: jax.Array, weight: jax.Array, weights: ExpertWeights, glu: Any
) -> jax.Array:
    """Compute every expert for every token, in two batched products."""
    at = jnp.arange(x.shape[0])[:, None]
    share = jnp.zeros((x.shape[0], EXPERTS[0]), jnp.float32).at[at, chosen].set(weight)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    gate, up = einsum("te,xgie->gxti", x, weights.gate_up)
    return einsum(
        "xte,tx->te", einsum("xti,xei->xte", glu(gate, up).astype(x.dtype), weights.down), share
    )


def experts(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    (X, A, E, F), glu = EXPERTS, functools.partial(gated, "silu")

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5, jnp.bfloat16)

    weights = ExpertWeights(gate_up=draw(X, 2, F, E), gate_up_bias=None, down=draw(X, E, F))
    forms = {"dense": all_of_them, "tiles": tiles.experts, "native": native_experts.experts}
    for T in EXPERT_ROWS:
        x, chosen = draw(T, E), np.stack([rng.permutation(X)[:A] for _ in range(T)])
        args = (x, jnp.asarray(chosen, jnp.int32), jnp.full((T, A), 1 / A, jnp.float32), weights)
        calls = {
            name: functools.partial(jax.jit(functools.partial(form, glu=glu)), *args)
            for name, form in forms.items()
        }
        seconds = medians(calls, rounds)
        drawn = len(np.unique(chosen))
        yield {
            "experts": f"{T} tokens, {drawn} of {X}",
            **{f"{name}_ms": 1e3 * seconds[name] for name in forms},
            "ratio": seconds["native"] / seconds["dense"],
            "native_gb_s": drawn * 6 * E * F / seconds["native"] / 1e9,
        }


def delta(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    key_heads, heads, width = DELTA
    for (count, length), by_channel in itertools.product(STATE_ROWS, (False, True)):
        tokens, channels = count * length, width if by_channel else 1
        drawn = (
            _draw(rng, tokens, key_heads, width),
            _draw(rng, tokens, key_heads, width),
            _draw(rng, tokens, heads, width),
            -abs(_draw(rng, tokens, heads, channels)),
            abs(_draw(rng, tokens, heads)),
        )
        name = f"{count} x {length}" + by_channel * " by channel"
        shape = (heads, width, width)
        yield {"gated delta": name} | _of_states(rng, rounds, DELTA_FORMS, drawn, count, shape)


def scan(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    heads, groups, width, columns = SCAN
    for count, length in STATE_ROWS:
        tokens = count * length
        drawn = (
            _draw(rng, tokens, heads, width),
            -abs(_draw(rng, tokens, heads)),
            _draw(rng, tokens, groups, columns),
            _draw(rng, tokens, groups, columns),
        )
        shape = (heads, width, columns)
        reached = _of_states(rng, rounds, SCAN_FORMS, drawn, count, shape)
        yield {"Mamba-2": f"{count} x {length}"} | reached


def _draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5)


def _of_states(
    rng: np.random.Generator,
    rounds: int,
    forms: Mapping[str, Any],
    tokens: tuple[jax.Array, ...],
    count: int,
    shape: tuple[int, ...],
) -> dict[str, Any]:
    """Return what a layer takes whose states are of this shape, of so many rows of these tokens,
    all as long; forms: modules by their names.
    """
    nbytes, length = 4 * count * math.prod(shape), tokens[0].shape[0] // count
    # Decode goes through the states of as many layers as do not fit into a cache.
    layers = max(1, BYTES // nbytes) if length == 1 else 1
    loc_S1 = jnp.arange(count + 1, dtype=jnp.int32) * length
    start_S = jnp.zeros(count, jnp.int32)

    def steps(module: Any, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        rule, outputs = module.decode if length == 1 else module.prefill, []
        for layer in range(layers):
            slot_S = jnp.arange(count, dtype=jnp.int32) + layer * count
            o, pool = rule(*tokens, pool, PackedRows(loc_S1, start_S, slot_S, slot_S))
            outputs.append(o)
        return jnp.stack(outputs), pool

    run = jax.jit(steps, static_argnums=0, donate_argnums=1)
    pools = {name: _draw(rng, layers * count, *shape) for name in forms}

    def call(name: str) -> jax.Array:
        o, pools[name] = run(forms[name], pools[name])
        return o

    calls: dict[str, Any] = {name: functools.partial(call, name) for name in forms}
    calls["read"] = functools.partial(jax.jit(jnp.sum), jnp.ones(layers * nbytes // 4))
    seconds = medians(calls, rounds)
    return {
        **{f"{name}_ms": 1e3 * seconds[name] / layers for name in forms},
        "ratio": seconds["native"] / seconds["xla"],
        "native_gb_s": 2 * layers * nbytes / seconds["native"] / 1e9,
        "read_gb_s": layers * nbytes / seconds["read"] / 1e9,
    }


PARTS = {
    "delta": delta,
    "scan": scan,
    "products": products,
    "attention": attention,
    "decode": decode,
    "experts": experts,
    "quantized": quantized_products,
}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_cpu_kernels", __doc__)
    add = parser.add_argument
    add(
        "--rounds",
        type=int,
        default=9,
        help="rounds; their median counts (default: 9)",
    )
    add("--only", choices=PARTS, nargs="+", default=list(PARTS), help="what to time (default: all)")
    add("--json", type=Path, metavar="FILE", help="write the rows here, a JSON object a line")
    args = parser.parse_args(argv)
    if reason := unavailable():
        print(f"bench_cpu_kernels: the kernels cannot run: {reason}", file=sys.stderr)
        return 1
    if chosen := level():
        print(f"kernels for {chosen.name}, x in {chosen.activations} with int8 and int4 weights\n")
    rng, written = np.random.default_rng(0), []
    for part in args.only:
        rows = list(PARTS[part](rng, args.rounds))
        cells = [[v if isinstance(v, str) else f"{v:.2f}" for v in row.values()] for row in rows]
        print("\n".join(common.aligned(list(rows[0]), cells, left=1)), end="\n\n", flush=True)
        written += [common.json_line(row) + "\n" for row in rows]
    if args.json is not None:
        args.json.write_text("".join(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
