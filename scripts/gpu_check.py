"""Check and time the attention kernels and the engine on the GPU at hand; scripts/gpu_check.sh runs all the parts.

    python scripts/gpu_check.py PART --out FOLDER [--dry]

PART is one of: torch (upper marks: copy, matmul, SDPA over contiguous KV), kernels (every kernel compiled against the
float64 reference, then timed), engine (nano-vllm's workload end to end), report (a table of what the parts wrote).
Each part writes FOLDER/PART.json. --dry does it all with tiny shapes on any backend, kernels interpreted.

A decode call must read its context's keys and values once, a prefill must do 4 * D operations for each query head and
visible token: over the copy bandwidth and the matmul rate that the same run measured, these make the fractions printed.
"""

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
CALLS = 8  # of a kernel in one timed step, each over another layer of the pool and fed by the one before


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention call: `rows` of `context` tokens; queries None is decode, else how many of them are queries."""

    rows: int
    context: int
    queries: int | None = None
    G: int = 2
    K: int = 8
    D: int = 128
    P: int = 64

    @property
    def name(self) -> str:
        kind = "decode" if self.queries is None else "fresh" if self.queries == self.context else "cached"
        return f"{kind} {self.rows}x{self.context} G{self.G} D{self.D} P{self.P}"

    @property
    def bytes(self) -> int:
        """That must move: the context's bf16 keys and values, queries and results."""
        tokens = self.rows if self.queries is None else self.rows * self.queries
        return 2 * (self.rows * self.context * 2 * self.K * self.D + 2 * tokens * self.G * self.K * self.D)

    @property
    def flops(self) -> int:
        queries = self.queries or 1
        visible = sum(self.context - i for i in range(queries))
        return 4 * self.rows * visible * self.G * self.K * self.D


def shapes(dry: bool) -> list[Shape]:
    if dry:
        return [Shape(rows=2, context=40, K=1, D=64, P=16), Shape(rows=1, context=48, queries=32, K=1, D=64, P=16)]
    decode = [Shape(rows=rows, context=n) for rows in (1, 8, 32, 128, 256) for n in (512, 2048, 8192, 32768)]
    decode += [Shape(rows=128, context=2048, **other) for other in ({"G": 1}, {"G": 4}, {"G": 8}, {"D": 64})]
    decode += [Shape(rows=128, context=2048, P=16), Shape(rows=128, context=2048, P=128)]
    lengths = (512, 2048, 8192, 32768)
    prefill = [Shape(rows=max(1, 8192 // n), context=n, queries=n) for n in lengths]
    prefill += [Shape(rows=max(1, 8192 // n), context=n, queries=n // 4) for n in lengths]
    prefill += [
        Shape(rows=1, context=8192, queries=8192, **other) for other in ({"G": 1}, {"G": 4}, {"G": 8}, {"D": 64})
    ]
    prefill += [Shape(rows=1, context=8192, queries=8192, P=16), Shape(rows=1, context=8192, queries=8192, P=128)]
    return decode + prefill


def seconds_a_call(run: Callable[[], Any], wait: Callable[[Any], Any], calls: int, dry: bool) -> float:
    """Median seconds of one of the `calls` that a run holds; the runs that a sample holds take 20 ms together."""
    wait(run())
    began = time.perf_counter()
    wait(run())
    repeat = 1 if dry else max(1, int(0.02 / max(time.perf_counter() - began, 1e-6)))
    samples, last = [], None
    for _ in range(1 if dry else 7):
        began = time.perf_counter()
        for _ in range(repeat):
            last = run()
        wait(last)
        samples.append((time.perf_counter() - began) / repeat)
    return statistics.median(samples) / calls


# ---- torch: what the machine can do ----


def torch_part(dry: bool) -> Iterator[dict[str, Any]]:
    """Copy bandwidth (bytes read and written), bf16 matmul rate, and SDPA over contiguous keys and values."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        yield {"skipped": "torch is not installed"}
        return
    cuda = torch.cuda.is_available()
    if not cuda and not dry:
        yield {"skipped": "torch sees no CUDA device"}
        return
    device = "cuda" if cuda else "cpu"

    def wait(_: Any) -> None:
        if cuda:
            torch.cuda.synchronize()

    def timed(run: Callable[[], Any]) -> float:
        return seconds_a_call(run, wait, 1, dry)

    def marks(n: int, size: int) -> dict[str, Any]:
        x = torch.randn(size, device=device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        a, b = (torch.randn((n, n), device=device, dtype=torch.bfloat16) for _ in range(2))
        copied, multiplied = timed(lambda: y.copy_(x)), timed(lambda: a @ b)
        return {"copy_gb_s": 2 * x.nbytes / copied / 1e9, "matmul_tflop_s": 2 * n**3 / multiplied / 1e12}

    record = marks(256, 2**16) if dry else marks(8192, 2**30)
    record["sdpa_s"] = {}
    for shape in shapes(dry):
        if shape.P != 64 and not dry:
            continue  # contiguous: the block size means nothing
        queries = shape.queries or 1
        try:
            q = torch.randn((shape.rows, shape.G * shape.K, queries, shape.D), device=device, dtype=torch.bfloat16)
            kv = torch.randn((2, shape.rows, shape.K, shape.context, shape.D), device=device, dtype=torch.bfloat16)
            causal = queries == shape.context and queries > 1  # a cached prefix has no mask that FlashAttention takes

            def run(q: Any = q, kv: Any = kv, causal: bool = causal) -> Any:
                attention = torch.nn.functional.scaled_dot_product_attention
                return attention(q, kv[0], kv[1], is_causal=causal, enable_gqa=True)

            record["sdpa_s"][shape.name] = timed(run)
        except RuntimeError as e:  # out of memory: the others are worth having
            record["sdpa_s"][shape.name] = f"{type(e).__name__}: {str(e).splitlines()[0]}"
    yield record


# ---- kernels ----


def kernels_part(dry: bool) -> Iterator[dict[str, Any]]:
    import jax

    record: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **jax_marks(dry)}
    names = IMPLEMENTATIONS if dry else IMPLEMENTATIONS[:2]  # XLA's own is held to the reference on any machine
    record |= {"checks": {name: check(name, dry) for name in names}, "times": {}}
    yield record
    for shape in shapes(dry):
        record["times"][shape.name] = {name: kernel_time(name, shape, dry) for name in names}
        print(shape.name, record["times"][shape.name], flush=True)
        yield record


def jax_marks(dry: bool) -> dict[str, float]:
    """The same two ceilings as the torch part, by XLA."""
    import jax
    import jax.numpy as jnp

    n = 256 if dry else 8192
    x = jnp.ones((n * n if dry else 2**30,), jnp.bfloat16)
    copy, matmul = jax.jit(lambda x: x + 1), jax.jit(lambda a, b: a @ b)
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    copied = seconds_a_call(lambda: copy(x), jax.block_until_ready, 1, dry)
    multiplied = seconds_a_call(lambda: matmul(a, b), jax.block_until_ready, 1, dry)
    return {"copy_gb_s": 2 * x.nbytes / copied / 1e9, "matmul_tflop_s": 2 * n**3 / multiplied / 1e12}


def module(name: str) -> Any:
    return importlib.import_module(f"kernels_pallas.paged_attention.{name}")


def check(name: str, dry: bool) -> dict[str, Any]:
    """Every case that an implementation takes, against the float64 reference: how many are right, and the others."""
    from kernels_pallas.paged_attention.cases import DECODE, GPU, PREFILL
    from tests.kernels.suite import check as hold

    done: dict[str, Any] = {"passed": 0, "failed": {}, "unsupported": {}}
    try:
        implementation = module(name)
    except ImportError as e:
        return {"skipped": str(e)}
    for case in (*GPU, *DECODE, *PREFILL)[::9] if dry else GPU:
        for values in ("random", "coded"):
            try:
                hold(implementation, case, values)
                done["passed"] += 1
            except NotImplementedError as e:
                done["unsupported"][case.name] = str(e)
            except Exception as e:  # a kernel that breaks must not hide what the others do
                done["failed"][f"{case.name} {values}"] = f"{type(e).__name__}: {str(e)[:300]}"
    return done


def kernel_time(name: str, shape: Shape, dry: bool) -> Any:
    """Seconds of one call, compiled; a string that says why there are none."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    try:
        kernel = module(name)
        per_row = -(-shape.context // shape.P)
        N = shape.rows * per_row + 1
        block_bytes = 4 * shape.P * shape.K * shape.D
        layers = 1 if dry else min(CALLS, max(1, (16 << 30) // (N * block_bytes)))
        key = jax.random.key(0)
        pool = jax.random.normal(key, (layers * N, shape.P, 2 * shape.K, shape.D), jnp.bfloat16)
        tokens = shape.rows * (shape.queries or 1)
        q = jax.random.normal(key, (tokens, shape.G * shape.K, shape.D), jnp.bfloat16)
        table = np.random.default_rng(0).permutation(np.arange(1, N)).astype(np.int32).reshape(shape.rows, per_row)
        contexts = np.full(shape.rows, shape.context, np.int32)
        starts = np.arange(shape.rows + 1, dtype=np.int32) * (shape.queries or 1)
        call = kernel.paged_attention_decode if shape.queries is None else kernel.paged_attention
        rest = (jnp.asarray(table), jnp.asarray(contexts), *([] if shape.queries is None else [jnp.asarray(starts)]))
        calls = 1 if dry else CALLS

        @jax.jit
        def step(q: Any, pool: Any) -> Any:
            for i in range(calls):
                q = call(q, pool, jnp.int32(i % layers), *rest, num_layers=layers, scale=shape.D**-0.5)
            return q

        return seconds_a_call(lambda: step(q, pool), jax.block_until_ready, calls, dry)
    except Exception as e:  # the other shapes are worth having
        return f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"


# ---- engine ----


def engine_part(dry: bool) -> Iterator[dict[str, Any]]:
    """nano-vllm's workload on Qwen3-0.6B of random weights, with each implementation."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import bench

    size = ["--requests", "4", "--output", "3", "5", "--input", "5", "9", "--dtype", "float32", "--max-model-len", "64"]
    record: dict[str, Any] = {}
    for name in ("auto", "xla") if dry else ("auto", "xla", "triton"):
        flags = [
            "--random",
            "tiny" if dry else "0.6b",
            "--workload",
            "nano",
            "--attention",
            name,
            *(size if dry else ()),
        ]
        try:
            record[name] = bench.bench(bench.parse_args(flags))
            print(name, f"{record[name]['output_tok_s']:.0f} output tok/s", flush=True)
        except Exception as e:
            record[name] = {"error": f"{type(e).__name__}: {str(e)[:500]}"}
            print(name, record[name]["error"], flush=True)
        yield record


# ---- report ----


def report_part(out: Path) -> str:
    """The parts' records as a table: rates, fractions of the measured ceilings, and ratios to SDPA."""
    parts = {name: json.loads((out / f"{name}.json").read_text()) for name in PARTS if (out / f"{name}.json").exists()}
    kernels, torch_marks = parts.get("kernels", {}), parts.get("torch", {})
    lines = [f"device {kernels.get('device')}, jax {kernels.get('jax')}"]
    marks = {k: max(p[k] for p in (kernels, torch_marks) if k in p) for k in ("copy_gb_s", "matmul_tflop_s") if kernels}
    lines += [f"{name:<16}{value:10.1f}" for name, value in marks.items()]
    for name, done in kernels.get("checks", {}).items():
        counts = f"{done.get('passed', 0)} right, {len(done.get('failed', {}))} wrong"
        lines.append(f"{name:<12}{done.get('skipped') or counts}, {len(done.get('unsupported', {}))} cases not taken")
        lines += [f"  WRONG {case}: {why}" for case, why in done.get("failed", {}).items()]
    lines.append(f"{'shape':<32}{'kernel':<12}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>10}{'SDPA us':>10}")
    for shape in [*shapes(False), *shapes(True)]:
        for name, seconds in kernels.get("times", {}).get(shape.name, {}).items():
            if isinstance(seconds, str):
                lines.append(f"{shape.name:<32}{name:<12}{seconds}")
                continue
            gb_s, tflop_s = shape.bytes / seconds / 1e9, shape.flops / seconds / 1e12
            limit = gb_s / marks["copy_gb_s"] if shape.queries is None else tflop_s / marks["matmul_tflop_s"]
            sdpa = torch_marks.get("sdpa_s", {}).get(shape.name)
            best = f"{sdpa * 1e6:10.1f}" if isinstance(sdpa, float) else f"{'-':>10}"
            lines.append(f"{shape.name:<32}{name:<12}{seconds * 1e6:10.1f}{gb_s:9.0f}{tflop_s:9.1f}{limit:10.1%}{best}")
    for name, done in parts.get("engine", {}).items():
        rate = f"{done['output_tok_s']:.0f} output tok/s" if "output_tok_s" in done else done["error"]
        lines.append(f"engine {name:<12}{rate}")
    return "\n".join(lines)


PARTS = {"torch": torch_part, "kernels": kernels_part, "engine": engine_part}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any backend")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part == "report":
        print(report_part(args.out))
        return 0
    wrong = False
    for record in PARTS[args.part](args.dry):  # written as it grows: a part that is cut off keeps what it had
        (args.out / f"{args.part}.json").write_text(json.dumps(record, indent=1))
        wrong = any(done.get("failed") for done in record.get("checks", {}).values())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
