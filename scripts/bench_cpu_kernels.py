"""The C++ kernels of the CPU beside what XLA:CPU makes of the same: medians of rounds in turn, and
their ratio.

    python scripts/bench_cpu_kernels.py [--rounds 9] [--json FILE]

Every call has another weight, or another layer of the pool, so that what a step reads from memory
is read from memory here. Products are bf16 [M, K] . [N, K]; attention is of rows alike, blocks of
64 tokens, in bf16.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_cpu import paged_attention as native
from kernels_cpu.library import unavailable
from kernels_cpu.linear import linear
from kernels_pallas.paged_attention import xla
from kernels_pallas.paged_attention.interface import Options

WEIGHTS = [
    (6144, 1024),
    (1024, 3072),
    (3072, 512),
    (512, 1536),
]  # N, K: gate_up and down of the 0.6B and the 60M model
ROWS = (8, 16, 32, 64, 128, 1024)
HEADS = {"60m": (8, 4, 64), "0.6b": (16, 8, 128)}  # H, K, D
ATTENTION = [
    ("60m", 32, 200, None),
    ("0.6b", 16, 300, None),
    ("0.6b", 1, 4000, None),
    ("60m", 8, 128, 128),
    ("0.6b", 4, 250, 250),
    ("0.6b", 1, 2048, 2048),
]
BYTES = 150 << 20  # of weights or pool that one call goes through
BLOCK = 64


def times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())  # compiles
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    product = jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return product.astype(x.dtype)


def products(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    for N, K in WEIGHTS:
        count = max(4, min(40, BYTES // (2 * N * K)))
        weights = [
            jnp.asarray(rng.standard_normal((N, K)) / K**0.5, jnp.bfloat16) for _ in range(count)
        ]
        for M in ROWS:
            x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)

            def chain(
                multiply: Callable[..., jax.Array], x: jax.Array, weights: list[jax.Array]
            ) -> jax.Array:
                size = min(x.shape[1], weights[0].shape[0])
                for weight in weights:  # each waits for the one before
                    x = jax.lax.optimization_barrier(
                        x.at[:, :size].add(multiply(x, weight)[:, :size])
                    )
                return x

            run = jax.jit(chain, static_argnums=0)
            forms = {"xla": plain, "native": lambda x, w: linear(x, w, x.shape[0], x.dtype)}
            calls = {name: functools.partial(run, form, x, weights) for name, form in forms.items()}
            seconds = times(calls, rounds)
            rates = {
                f"{name}_gflops": 2 * M * N * K * count / s / 1e9 for name, s in seconds.items()
            }
            yield {
                "product": f"[{M}, {K}] . [{N}, {K}]",
                **rates,
                "ratio": seconds["native"] / seconds["xla"],
            }


def attention(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    for model, S, context, queries in ATTENTION:
        H, K, D = HEADS[model]
        M = -(-context // BLOCK)
        blocks, layer_bytes = S * M + 1, 4 * (S * M + 1) * BLOCK * K * D
        L = max(2, min(10, BYTES // layer_bytes))
        pool = jnp.asarray(
            rng.standard_normal((L * blocks, BLOCK, 2 * K, D), np.float32), jnp.bfloat16
        )
        table = jnp.asarray(1 + rng.permutation(S * M).reshape(S, M), jnp.int32)
        lens, size = jnp.full((S,), context, jnp.int32), queries or 1
        q = jnp.asarray(rng.standard_normal((S * size, H, D)), jnp.bfloat16)
        starts = jnp.arange(S + 1, dtype=jnp.int32) * size

        def layers(
            module: Any,
            q: jax.Array,
            pool: jax.Array,
            *,
            L: int,
            decode: bool,
            args: tuple[jax.Array, ...],
        ):
            attend = module.decode if decode else module.prefill
            options = Options(num_layers=L, scale=q.shape[-1] ** -0.5)
            for layer in range(L):
                q = q + attend(q, pool, jnp.int32(layer), *args, options=options)
            return q

        run = jax.jit(layers, static_argnums=0, static_argnames=("L", "decode"))
        args = (table, lens) if queries is None else (table, lens, starts)
        how = {"L": L, "decode": queries is None, "args": args}
        calls = {
            name: functools.partial(run, m, q, pool, **how)
            for name, m in (("xla", xla), ("native", native))
        }
        seconds = times(calls, rounds)
        ms = {f"{name}_ms": 1e3 * s / L for name, s in seconds.items()}
        gb_s = S * context * 4 * K * D * L / seconds["native"] / 1e9
        kind = f"{model} {'decode' if queries is None else 'prefill'} {S} x {context}"
        yield {
            "attention": kind,
            **ms,
            "ratio": seconds["native"] / seconds["xla"],
            "native_gb_s": gb_s,
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="of which the median counts (default: 9)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows here, a JSON object a line"
    )
    args = parser.parse_args(argv)
    if reason := unavailable():
        print(f"bench_cpu_kernels: the kernels cannot run: {reason}", file=sys.stderr)
        return 1
    rng, rows = np.random.default_rng(0), []
    print(f"{'product':<28}{'XLA GFLOP/s':>12}{'native':>8}{'ratio of times':>16}")
    for row in products(rng, args.rounds):
        print(
            f"{row['product']:<28}{row['xla_gflops']:>12.0f}{row['native_gflops']:>8.0f}{row['ratio']:>16.2f}",
            flush=True,
        )
        rows.append(row)
    print(
        f"\n{'attention':<28}{'XLA ms':>12}{'native':>8}{'ratio of times':>16}{'native GB/s':>13}"
    )
    for row in attention(rng, args.rounds):
        figures = f"{row['xla_ms']:>12.3f}{row['native_ms']:>8.3f}{row['ratio']:>16.2f}{row['native_gb_s']:>13.1f}"
        print(f"{row['attention']:<28}{figures}", flush=True)
        rows.append(row)
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
