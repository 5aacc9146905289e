"""Check and time the attention kernels and the engine on the GPU at hand; scripts/gpu_check.sh runs
all the parts.

    python scripts/gpu_check.py PART --out FOLDER [--dry]

PART is one of: torch (upper marks: copy, matmul, SDPA over contiguous KV), kernels (every kernel
compiled against the float64 reference, then timed), peers (what else jax has, timed on the same
shapes: its own Triton kernel, cuDNN over contiguous and over paged KV), engine (nano-vllm's
workload end to end), report (a table of what the parts wrote). Each part writes FOLDER/PART.json;
what could not run is there as its reason. --dry does it all with tiny shapes on any backend,
kernels interpreted.

A decode call must read its context's keys and values once, a prefill must do 4 * D operations for
each query head and visible token: over the copy bandwidth and the matmul rate that the same run
measured, these make the fractions printed.
"""

import argparse
import dataclasses
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
# of a kernel in one timed step, each over another layer of the pool and fed by the one before
CALLS = 8


def bench_cases(dry: bool) -> Any:
    from kernels_pallas.paged_attention.cases import BENCH, BENCH_DRY

    return BENCH_DRY if dry else BENCH


def moved_bytes(case: Any) -> int:
    """That a call must move: the context's bf16 keys and values, queries and results."""
    return 2 * case.D * (2 * case.K * sum(case.contexts) + 2 * case.H * sum(case.query_lens))


def flops(case: Any) -> int:
    visible = sum(
        n * q - q * (q - 1) // 2 for n, q in zip(case.contexts, case.query_lens, strict=True)
    )
    return 4 * visible * case.H * case.D


def contiguous(case: Any) -> str:
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


# ---- torch: what the machine can do ----


def torch_part(dry: bool) -> Iterator[dict[str, Any]]:
    """Copy bandwidth (bytes read and written), bf16 matmul rate, and SDPA over contiguous keys and
    values.
    """
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
        return {
            "copy_gb_s": 2 * x.nbytes / copied / 1e9,
            "matmul_tflop_s": 2 * n**3 / multiplied / 1e12,
        }

    record = marks(256, 2**16) if dry else marks(8192, 2**30)
    record["sdpa_s"] = {}
    for case in bench_cases(dry):
        if contiguous(case) in record["sdpa_s"]:
            continue
        rows, context, queries = len(case.contexts), case.contexts[0], case.query_lens[0]
        try:
            q = torch.randn((rows, case.H, queries, case.D), device=device, dtype=torch.bfloat16)
            kv = torch.randn(
                (2, rows, case.K, context, case.D), device=device, dtype=torch.bfloat16
            )
            causal = (
                queries == context and queries > 1
            )  # a cached prefix has no mask that FlashAttention takes

            def run(q: Any = q, kv: Any = kv, causal: bool = causal) -> Any:
                attention = torch.nn.functional.scaled_dot_product_attention
                return attention(q, kv[0], kv[1], is_causal=causal, enable_gqa=True)

            record["sdpa_s"][contiguous(case)] = timed(run)
        except RuntimeError as e:  # out of memory: the others are worth having
            record["sdpa_s"][contiguous(case)] = reason(e)
    yield record


# ---- kernels ----


def kernels_part(dry: bool) -> Iterator[dict[str, Any]]:
    import jax

    record: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **jax_marks(dry),
    }
    names = (
        IMPLEMENTATIONS if dry else IMPLEMENTATIONS[:2]
    )  # XLA's own is held to the reference on any machine
    record |= {"checks": {name: check(name, dry) for name in names}, "times": {}}
    yield record
    for case in bench_cases(dry):
        record["times"][case.name] = {name: timed(our_kernel, name, case, dry) for name in names}
        print(case.name, record["times"][case.name], flush=True)
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
    return {
        "copy_gb_s": 2 * x.nbytes / copied / 1e9,
        "matmul_tflop_s": 2 * n**3 / multiplied / 1e12,
    }


def module(name: str) -> Any:
    return importlib.import_module(f"kernels_pallas.paged_attention.{name}")


def check(name: str, dry: bool) -> dict[str, Any]:
    """Every case that an implementation takes, against the float64 reference: how many are right,
    and the others.
    """
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
                done["failed"][f"{case.name} {values}"] = reason(e)
    return done


def timed(build: Callable[..., Any], name: str, case: Any, dry: bool) -> Any:
    """Seconds of one call, compiled; a string that says why there are none.

    build(name, case, layers, dry) gives a function of q and more arguments, and these arguments for
    each layer.
    """
    import jax
    import jax.numpy as jnp

    try:
        kv_bytes = 4 * case.K * case.D * sum(case.contexts)
        calls, layers = (1, 1) if dry else (CALLS, min(CALLS, max(1, (16 << 30) // kv_bytes)))
        q = jax.random.normal(
            jax.random.key(0), (sum(case.query_lens), case.H, case.D), jnp.bfloat16
        )
        call, arguments = build(name, case, layers, dry)

        @jax.jit
        def step(q: Any, arguments: Any) -> Any:
            for i in range(calls):
                q = call(q, *arguments[i % layers])
            return q

        return seconds_a_call(lambda: step(q, arguments), jax.block_until_ready, calls, dry)
    except Exception as e:  # the others are worth having
        return reason(e)


def our_kernel(
    name: str, case: Any, layers: int, dry: bool
) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    kernel, rows, per_row = module(name), len(case.contexts), -(-case.contexts[0] // case.P)
    N = rows * per_row + 1
    pool = jax.random.normal(
        jax.random.key(0), (layers * N, case.P, 2 * case.K, case.D), jnp.bfloat16
    )
    table = np.random.default_rng(0).permutation(np.arange(1, N)).reshape(rows, per_row)
    rest = [
        jnp.asarray(x, jnp.int32) for x in (table, case.contexts, np.cumsum([0, *case.query_lens]))
    ]
    decode = case.queries is None
    function, rest = (kernel.decode, rest[:2]) if decode else (kernel.prefill, rest)
    options = dataclasses.replace(case.options, num_layers=layers)

    def call(q: Any, pool: Any, layer: Any) -> Any:
        return function(q, pool, layer, *rest, options=options)

    return call, [(pool, jnp.int32(layer)) for layer in range(layers)]


# ---- peers: what else jax has ----


def peers_part(dry: bool) -> Iterator[dict[str, Any]]:
    record: dict[str, Any] = {"times": {}}
    for case in bench_cases(dry):
        record["times"][case.name] = {name: timed(peer, name, case, dry) for name in PEERS}
        print(case.name, record["times"][case.name], flush=True)
        yield record


def jax_triton(
    case: Any, k_RSKD: Any, v_RSKD: Any, dry: bool
) -> tuple[Callable[..., Any], list[Any]]:
    """jax's own Triton kernel, over pages of [K, N, P, D]; it does not scale."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if case.queries is not None:
        raise NotImplementedError("decode alone")
    (rows, S, K, D), P, lens = k_RSKD.shape, case.P, jnp.asarray(case.contexts, jnp.int32)
    table = jnp.arange(rows * S // P, dtype=jnp.int32).reshape(rows, S // P)
    # It wants whole numbers of pages a split, and of steps: enough splits to fill a card, and steps
    # of 128 slots.
    splits = math.gcd(S // P, 1 << min(4, max(0, math.ceil(math.log2(264 / (rows * K))))))
    sizes = {
        "k_splits": splits,
        "pages_per_compute_block": math.gcd(S // P // splits, max(1, 128 // P)),
    }

    def call(q: Any, k: Any, v: Any) -> Any:
        return paged_attention(q * case.D**-0.5, k, v, table, lens, interpret=dry, **sizes)

    return call, [x.reshape(-1, P, K, D).transpose(2, 0, 1, 3) for x in (k_RSKD, v_RSKD)]


def cudnn(case: Any, k_RSKD: Any, v_RSKD: Any, dry: bool) -> tuple[Callable[..., Any], list[Any]]:
    """cuDNN's attention over contiguous keys and values; dry, XLA's."""
    import jax

    rows, context, queries = len(case.contexts), case.contexts[0], case.query_lens[0]
    how: Any = {"is_causal": queries > 1, "implementation": "xla" if dry else "cudnn"}

    def call(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(rows, queries, case.H, case.D)
        return jax.nn.dot_product_attention(q, k, v, scale=case.D**-0.5, **how).reshape(
            -1, case.H, case.D
        )

    return call, [x[:, :context] for x in (k_RSKD, v_RSKD)]


def cudnn_paged(
    case: Any, k_RSKD: Any, v_RSKD: Any, dry: bool
) -> tuple[Callable[..., Any], list[Any]]:
    """cuDNN's attention over pages of [N, P, K, D], which jax has no public name for."""
    import jax.numpy as jnp
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


PEERS: dict[str, Callable[..., Any]] = {
    "jax_triton": jax_triton,
    "cudnn": cudnn,
    "cudnn_paged": cudnn_paged,
}


def peer(name: str, case: Any, layers: int, dry: bool) -> tuple[Callable[..., Any], list[Any]]:
    """Random keys and values as it takes them, the pages of each row one after another."""
    import jax
    import jax.numpy as jnp

    if name != "jax_triton" and case.query_lens[0] not in (1, case.contexts[0]):
        raise NotImplementedError("its causal mask knows no cached prefix")
    calls = []
    for key in jax.random.split(jax.random.key(1), layers):
        shape = (2, len(case.contexts), -(-case.contexts[0] // case.P) * case.P, case.K, case.D)
        calls.append(PEERS[name](case, *jax.random.normal(key, shape, jnp.bfloat16), dry))
    return calls[0][0], [arrays for _, arrays in calls]


# ---- engine ----


def engine_part(dry: bool) -> Iterator[dict[str, Any]]:
    """nano-vllm's workload on Qwen3-0.6B of random weights, with each implementation."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import bench

    size = [
        "--requests",
        "4",
        "--output",
        "3",
        "5",
        "--input",
        "5",
        "9",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
    ]
    record: dict[str, Any] = {}
    for name in ("auto", "xla") if dry else ("auto", "xla", "triton"):
        flags = ["--random", "tiny" if dry else "0.6b", "--workload", "nano", "--attention", name]
        flags += size if dry else []
        try:
            record[name] = bench.bench(bench.parse_args(flags))
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
    parts = {
        name: json.loads((out / f"{name}.json").read_text())
        for name in PARTS
        if (out / f"{name}.json").exists()
    }
    kernels, torch_marks = parts.get("kernels", {}), parts.get("torch", {})
    lines = [f"device {kernels.get('device')}, jax {kernels.get('jax')}"]
    marks = {
        k: max(p[k] for p in (kernels, torch_marks) if k in p)
        for k in ("copy_gb_s", "matmul_tflop_s")
        if kernels
    }
    lines += [f"{name:<16}{value:10.1f}" for name, value in marks.items()]
    for name, done in kernels.get("checks", {}).items():
        counts = f"{done.get('passed', 0)} right, {len(done.get('failed', {}))} wrong"
        lines.append(
            f"{name:<12}{done.get('skipped') or counts}, "
            f"{len(done.get('unsupported', {}))} cases not taken"
        )
        lines += [f"  WRONG {case}: {why}" for case, why in done.get("failed", {}).items()]
    lines.append(
        f"{'case':<32}{'kernel':<12}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>10}{'of best':>10} "
        " best"
    )
    for case in [*bench_cases(False), *bench_cases(True)]:
        ours, others = (
            parts.get(part, {}).get("times", {}).get(case.name, {}) for part in ("kernels", "peers")
        )
        others = (
            {"sdpa": torch_marks.get("sdpa_s", {}).get(contiguous(case), "not timed")} | others
            if ours
            else {}
        )
        best = min(((t, name) for name, t in others.items() if isinstance(t, float)), default=None)
        for name, seconds in (ours | others).items():
            if isinstance(seconds, str):
                lines.append(f"{case.name:<32}{name:<12}{seconds}")
                continue
            gb_s, tflop_s = moved_bytes(case) / seconds / 1e9, flops(case) / seconds / 1e12
            limit = (
                gb_s / marks["copy_gb_s"]
                if case.queries is None
                else tflop_s / marks["matmul_tflop_s"]
            )
            ratio = f"{best[0] / seconds:10.1%}  {best[1]}" if best and name in ours else ""
            lines.append(
                f"{case.name:<32}{name:<12}{seconds * 1e6:10.1f}{gb_s:9.0f}{tflop_s:9.1f}{limit:10.1%}{ratio}"
            )
    for name, done in parts.get("engine", {}).items():
        rate = (
            f"{done['output_tok_s']:.0f} output tok/s" if "output_tok_s" in done else done["error"]
        )
        lines.append(f"engine {name:<12}{rate}")
    return "\n".join(lines)


PARTS = {"torch": torch_part, "kernels": kernels_part, "peers": peers_part, "engine": engine_part}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    for record in PARTS[args.part](
        args.dry
    ):  # written as it grows: a part that is cut off keeps what it had
        (args.out / f"{args.part}.json").write_text(json.dumps(record, indent=1))
        wrong = any(done.get("failed") for done in record.get("checks", {}).values())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
