"""Time the attention kernels and the engine on the GPU at hand; scripts/gpu_check.sh runs all the
parts, and the checks of tests/kernels/on_device.py.

    python scripts/gpu_check.py PART --out FOLDER [--dry]

PART is one of: torch (upper marks: copy, matmul, SDPA over contiguous KV), kernels (every kernel
timed), peers (what else jax has, timed on the same shapes: its own Triton kernel, cuDNN over
contiguous and over paged KV), engine (nano-vllm's workload end to end), report (a table of what the
parts wrote). Each part writes FOLDER/PART.json; what could not run is there as its reason. --dry
does it all with tiny shapes on any backend, kernels interpreted.

A decode call must read its context's keys and values once, a prefill must do 4 * D operations for
each query head and visible token: over the copy bandwidth and the matmul rate that the same run
measured, these make the fractions printed.
"""

import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _common as common
import bench
import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention.cases import BENCH, BENCH_DRY, Case

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
# of a kernel in one timed step, each over another layer of the pool and fed by the one before
CALLS = 8
# A function of q and more arguments, and these arguments for each layer of the pool.
Built = tuple[Callable[..., Any], list[Any]]


def bench_cases(dry: bool) -> tuple[Case, ...]:
    return BENCH_DRY if dry else BENCH


def moved_bytes(case: Case) -> int:
    """That a call must move: the context's bf16 keys and values, queries and results."""
    return 2 * case.D * (2 * case.K * sum(case.contexts) + 2 * case.H * sum(case.query_lens))


def flops(case: Case) -> int:
    pairs = zip(case.contexts, case.query_lens, strict=True)
    return 4 * sum(n * q - q * (q - 1) // 2 for n, q in pairs) * case.H * case.D


def contiguous(case: Case) -> str:
    """The name of a case without its block size, which means nothing where keys and values are
    contiguous.
    """
    return case.name.rsplit(" ", 1)[0]


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def seconds_a_call(
    run: Callable[[], Any], wait: Callable[[Any], Any], calls: int, dry: bool
) -> float:
    """Median seconds of one of the `calls` that a run holds; the runs that a sample holds take 20
    ms together.
    """
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


def marks(copied: float, copied_bytes: int, multiplied: float, n: int) -> dict[str, float]:
    """The two ceilings: bytes read and written, operations of [n, n] . [n, n]."""
    copy_gb_s, matmul_tflop_s = 2 * copied_bytes / copied / 1e9, 2 * n**3 / multiplied / 1e12
    return {"copy_gb_s": copy_gb_s, "matmul_tflop_s": matmul_tflop_s}


# ---- torch: what the machine can do ----


def torch_part(dry: bool) -> Iterator[dict[str, Any]]:
    """Copy bandwidth, bf16 matmul rate, and SDPA over contiguous keys and values."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        yield {"skipped": "torch is not installed"}
        return
    cuda = torch.cuda.is_available()
    if not cuda and not dry:
        yield {"skipped": "torch sees no CUDA device"}
        return
    how: Any = {"device": "cuda" if cuda else "cpu", "dtype": torch.bfloat16}

    def wait(_: Any) -> None:
        if cuda:
            torch.cuda.synchronize()

    def timed(run: Callable[[], Any]) -> float:
        return seconds_a_call(run, wait, 1, dry)

    n, size = (256, 2**16) if dry else (8192, 2**30)
    x, y = torch.randn(size, **how), torch.empty(size, **how)
    a, b = torch.randn((2, n, n), **how)
    record: dict[str, Any] = marks(timed(lambda: y.copy_(x)), x.nbytes, timed(lambda: a @ b), n)
    record["sdpa_s"] = {}
    attention = torch.nn.functional.scaled_dot_product_attention
    for case in {contiguous(case): case for case in bench_cases(dry)}.values():
        rows, context, queries = len(case.contexts), case.contexts[0], case.query_lens[0]
        # A cached prefix has no mask that FlashAttention takes.
        options = {"is_causal": queries == context and queries > 1, "enable_gqa": True}
        try:
            q = torch.randn((rows, case.H, queries, case.D), **how)
            kv = torch.randn((2, rows, case.K, context, case.D), **how)
            record["sdpa_s"][contiguous(case)] = timed(
                lambda q=q, kv=kv, options=options: attention(q, kv[0], kv[1], **options)
            )
        except RuntimeError as e:  # out of memory: the others are worth having
            record["sdpa_s"][contiguous(case)] = reason(e)
    yield record


# ---- kernels, and what else jax has ----


def kernels_part(dry: bool) -> Iterator[dict[str, Any]]:
    names = IMPLEMENTATIONS if dry else IMPLEMENTATIONS[:2]
    record = common.environment() | jax_marks(dry)
    return timed_cases(record, dict.fromkeys(names, our_kernel), dry)


def peers_part(dry: bool) -> Iterator[dict[str, Any]]:
    return timed_cases({}, dict.fromkeys(PEERS, peer), dry)


def timed_cases(
    record: dict[str, Any], builders: dict[str, Callable[..., Built]], dry: bool
) -> Iterator[dict[str, Any]]:
    """The record with seconds of every case by each builder, as it grows."""
    record["times"] = {}
    for case in bench_cases(dry):
        times = {name: timed(build, name, case, dry) for name, build in builders.items()}
        record["times"][case.name] = times
        print(case.name, times, flush=True)
        yield record


def jax_marks(dry: bool) -> dict[str, float]:
    """The same two ceilings as the torch part, by XLA."""
    n = 256 if dry else 8192
    x = jnp.ones((n * n if dry else 2**30,), jnp.bfloat16)
    copy, matmul = jax.jit(lambda x: x + 1), jax.jit(lambda a, b: a @ b)
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    copied = seconds_a_call(lambda: copy(x), jax.block_until_ready, 1, dry)
    return marks(
        copied, x.nbytes, seconds_a_call(lambda: matmul(a, b), jax.block_until_ready, 1, dry), n
    )


def timed(build: Callable[..., Built], name: str, case: Case, dry: bool) -> float | str:
    """Seconds of one call, compiled; a string that says why there are none."""
    try:
        kv_bytes = 4 * case.K * case.D * sum(case.contexts)
        calls, layers = (1, 1) if dry else (CALLS, min(CALLS, max(1, (16 << 30) // kv_bytes)))
        shape = (sum(case.query_lens), case.H, case.D)
        q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        call, arguments = build(name, case, layers, dry)

        @jax.jit
        def step(q: Any, arguments: Any) -> Any:
            for i in range(calls):
                q = call(q, *arguments[i % layers])
            return q

        return seconds_a_call(lambda: step(q, arguments), jax.block_until_ready, calls, dry)
    except Exception as e:  # the others are worth having
        return reason(e)


def our_kernel(name: str, case: Case, layers: int, dry: bool) -> Built:
    kernel = importlib.import_module(f"kernels_pallas.paged_attention.{name}")
    rows, per_row = len(case.contexts), -(-case.contexts[0] // case.P)
    N = rows * per_row + 1
    shape = (layers * N, case.P, 2 * case.K, case.D)
    pool = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    table = np.random.default_rng(0).permutation(np.arange(1, N)).reshape(rows, per_row)
    starts = np.cumsum([0, *case.query_lens])
    rest = [jnp.asarray(x, jnp.int32) for x in (table, case.contexts, starts)]
    function = kernel.paged_attention
    if case.queries is None:
        function, rest = kernel.paged_attention_decode, rest[:2]

    def call(q: Any, pool: Any, layer: Any) -> Any:
        return function(q, pool, layer, *rest, num_layers=layers, scale=case.D**-0.5)

    return call, [(pool, jnp.int32(layer)) for layer in range(layers)]


def peer(name: str, case: Case, layers: int, dry: bool) -> Built:
    """Random keys and values as it takes them, the pages of each row one after another."""
    if name != "jax_triton" and case.query_lens[0] not in (1, case.contexts[0]):
        raise NotImplementedError("its causal mask knows no cached prefix")
    shape = (2, len(case.contexts), -(-case.contexts[0] // case.P) * case.P, case.K, case.D)
    calls = []
    for key in jax.random.split(jax.random.key(1), layers):
        calls.append(PEERS[name](case, *jax.random.normal(key, shape, jnp.bfloat16), dry))
    return calls[0][0], [arrays for _, arrays in calls]


def jax_triton(case: Case, k_RSKD: Any, v_RSKD: Any, dry: bool) -> Built:
    """jax's own Triton kernel, over pages of [K, N, P, D]; it does not scale."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if case.queries is not None:
        raise NotImplementedError("decode alone")
    (rows, S, K, D), P, lens = k_RSKD.shape, case.P, jnp.asarray(case.contexts, jnp.int32)
    table = jnp.arange(rows * S // P, dtype=jnp.int32).reshape(rows, S // P)
    # It wants whole numbers of pages a split, and of steps: enough splits to fill a card, and steps
    # of 128 slots.
    splits = math.gcd(S // P, 1 << min(4, max(0, math.ceil(math.log2(264 / (rows * K))))))
    pages = math.gcd(S // P // splits, max(1, 128 // P))
    how = {"k_splits": splits, "pages_per_compute_block": pages, "interpret": dry}

    def call(q: Any, k: Any, v: Any) -> Any:
        return paged_attention(q * case.D**-0.5, k, v, table, lens, **how)

    return call, [x.reshape(-1, P, K, D).transpose(2, 0, 1, 3) for x in (k_RSKD, v_RSKD)]


def cudnn(case: Case, k_RSKD: Any, v_RSKD: Any, dry: bool) -> Built:
    """cuDNN's attention over contiguous keys and values; dry, XLA's."""
    rows, context, queries = len(case.contexts), case.contexts[0], case.query_lens[0]
    how: Any = {"is_causal": queries > 1, "implementation": "xla" if dry else "cudnn"}
    how["scale"] = case.D**-0.5

    def call(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(rows, queries, case.H, case.D)
        return jax.nn.dot_product_attention(q, k, v, **how).reshape(-1, case.H, case.D)

    return call, [x[:, :context] for x in (k_RSKD, v_RSKD)]


def cudnn_paged(case: Case, k_RSKD: Any, v_RSKD: Any, dry: bool) -> Built:
    """cuDNN's attention over pages of [N, P, K, D], which jax has no public name for."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    (rows, S, K, D), P, queries = k_RSKD.shape, case.P, case.query_lens[0]
    table = jnp.arange(rows * S // P, dtype=jnp.int32).reshape(rows, 1, S // P, 1)
    lens = (jnp.asarray(case.query_lens, jnp.int32), jnp.asarray(case.contexts, jnp.int32))
    mask = attention.MaskType.PADDING_CAUSAL if queries > 1 else attention.MaskType.PADDING

    def call(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(rows, queries, case.H, D)
        o = attention.paged_attention(q, k, v, *lens, table, table, scale=D**-0.5, mask_type=mask)
        return o.reshape(-1, case.H, D)

    return call, [x.reshape(-1, P, K, D) for x in (k_RSKD, v_RSKD)]


PEERS: dict[str, Callable[..., Built]] = {
    "jax_triton": jax_triton,
    "cudnn": cudnn,
    "cudnn_paged": cudnn_paged,
}


# ---- engine ----


def engine_part(dry: bool) -> Iterator[dict[str, Any]]:
    """nano-vllm's workload on Qwen3-0.6B of random weights, with each implementation."""
    flags = "--random 0.6b --workload nano"
    if dry:
        flags = "--random tiny --workload nano --requests 4 --output 3 5 --input 5 9"
        flags += " --dtype float32 --max-model-len 64 --max-num-seqs 8 --max-num-batched-tokens 64"
    record: dict[str, Any] = {}
    for name in ("auto", "xla") if dry else ("auto", "xla", "triton"):
        try:
            args = bench.parse_args([*flags.split(), "--attention", name])
            record[name] = bench.bench(args)
            print(name, f"{record[name]['output_tok_s']:.0f} output tok/s", flush=True)
        except Exception as e:
            record[name] = {"error": reason(e)}
            print(name, record[name]["error"], flush=True)
        yield record


# ---- report ----


def report_part(out: Path) -> str:
    """The parts' records as a table: rates, fractions of the measured ceilings, and of the fastest
    peer's rate.
    """
    files = {name: out / f"{name}.json" for name in ("checks", *PARTS)}
    parts = {name: json.loads(f.read_text()) if f.exists() else {} for name, f in files.items()}
    kernels, torch_marks = parts["kernels"], parts["torch"]
    lines = [f"device {kernels.get('device')}, jax {kernels.get('jax')}"]
    limits: dict[str, float] = {}
    for name in ("copy_gb_s", "matmul_tflop_s"):
        measured = [part[name] for part in (kernels, torch_marks) if name in part]
        limits[name] = max(measured, default=math.nan)
        lines.append(f"{name:<16}{limits[name]:10.1f}")
    for name, done in parts["checks"].items():
        counts = f"{done.get('passed', 0)} right, {len(done.get('failed', {}))} wrong"
        unsupported = len(done.get("unsupported", {}))
        lines.append(f"{name:<12}{done.get('skipped') or counts}, {unsupported} cases not taken")
        lines += [f"  WRONG {case}: {why}" for case, why in done.get("failed", {}).items()]
    heads = ["case", "kernel", "us", "GB/s", "TFLOP/s", "of limit", "of best", "best"]
    rows = []
    for case in (*BENCH, *BENCH_DRY):
        if (ours := kernels.get("times", {}).get(case.name)) is None:
            continue
        others = {"sdpa": torch_marks.get("sdpa_s", {}).get(contiguous(case), "not timed")}
        others |= parts["peers"].get("times", {}).get(case.name, {})
        best = min(((t, name) for name, t in others.items() if isinstance(t, float)), default=None)
        for name, seconds in (ours | others).items():
            rows.append([case.name, name, *case_cells(case, seconds, limits)])
            if best is not None and name in ours and isinstance(seconds, float):
                rows[-1][-2:] = [f"{best[0] / seconds:.1%}", best[1]]
    lines += common.aligned(heads, rows, left=2)
    for name, done in parts["engine"].items():
        error = done.get("error")
        lines.append(f"engine {name:<12}{error or f'{done["output_tok_s"]:.0f} output tok/s'}")
    return "\n".join(lines)


def case_cells(case: Case, seconds: float | str, limits: dict[str, float]) -> list[str]:
    """A row's cells from "us" on; those of the best are left empty."""
    if isinstance(seconds, str):
        return ["-", "-", "-", "-", "", seconds]
    gb_s, tflop_s = moved_bytes(case) / seconds / 1e9, flops(case) / seconds / 1e12
    is_decode = case.queries is None
    share = gb_s / limits["copy_gb_s"] if is_decode else tflop_s / limits["matmul_tflop_s"]
    return [f"{seconds * 1e6:.1f}", f"{gb_s:.0f}", f"{tflop_s:.1f}", f"{share:.1%}", "", ""]


PARTS = {"torch": torch_part, "kernels": kernels_part, "peers": peers_part, "engine": engine_part}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("gpu_check", __doc__)
    add = parser.add_argument
    add("part", choices=[*PARTS, "report"])
    add("--out", type=Path, required=True, help="folder of the JSON files")
    add("--dry", action="store_true", help="tiny shapes, on any backend")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part == "report":
        print(report_part(args.out))
        return 0
    # Written as it grows: a part that is cut off keeps what it had.
    for record in PARTS[args.part](args.dry):
        (args.out / f"{args.part}.json").write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
