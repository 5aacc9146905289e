"""The jobs that gpu_check times on the GPU at hand. Each writes FOLDER/JOB.jsonl as it goes.

    python scripts/gpu_timed.py JOB --out FOLDER [--dry] [--only CASE ... | --list]

JOB: marks (copy bandwidth and matmul rate: the two ceilings, with clocks and power), health
(whether the card computes at all), rates (one decode and one prefill by Mosaic), kernels (ours,
over the cases that tell most, compiled side by side first), peers_jax (jax's own Triton kernel,
cuDNN over contiguous and over paged keys and values), peers_torch (SDPA by FlashAttention and by
cuDNN, causal over equal work, and flex_attention), engine (nano-vllm's workload end to end, also
with Qwen's own sampling and with 8 steps a dispatch), quantised, adapters, states.

A timed step holds several calls, each over another layer of the pool and fed by the one before, so
that together they read far more than L2 holds; the layers change from step to step. A kernel's own
time comes from jax's profiler, where that sees the device.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import _common as common
import gpu_products
import gpu_states
import jax
import jax.numpy as jnp
import numpy as np
from _attention_cases import BENCH, BENCH_DRY, Case
from gpu_jobs import Cases, Found, add_job_flags, run_chosen
from gpu_products import noise
from gpu_seconds import clocks, kernel_seconds, seconds_of

from jpaged.cli import bench
from kernels_pallas.paged_attention.pool_layout import ScaledPool

# A function of q and more arguments, and these arguments for each layer of the pool.
Built = tuple[Callable[..., Any], list[Any]]

CALLS = 8  # of a kernel in one timed step
L2 = 60 << 20  # bytes that a card may keep; what is read has to be a multiple of it
MOST_BYTES = 16 << 30  # of a pool
PEER_CASES = 6  # of BENCH, that others are timed on too
# Of BENCH, the decodes that are timed in other ways too.
WAYS: tuple[dict[str, Any], ...] = (
    {"splits": 1},
    {"splits": 2},
    {"splits": 4},
    {"fastest": "rows"},
    {"thread_blocks": 1 << 20},  # one for each item
)
# Seconds that one case may take: of kernels a compile may come first.
LIMITS = {
    "marks": 15,
    "health": 20,
    "rates": 20,
    "kernels": 90,
    "peers_jax": 60,
    "peers_torch": 60,
    "engine": 400,
    "quantised": 180,
    "adapters": 30,
    "states": 60,
}


def bench_cases(dry: bool) -> tuple[Case, ...]:
    return BENCH_DRY if dry else BENCH


# ---- marks ----


def held_busy(run: Callable[[], Any], dry: bool) -> Found:
    """Return clocks and power while a call runs again and again for a second or two."""
    with clocks() as seen:
        end = time.perf_counter() + (0 if dry else 1.5)
        while time.perf_counter() < end:
            jax.block_until_ready([run() for _ in range(10)])
    return {**seen}


def marks(dry: bool) -> Cases:
    n, size = (256, 2**16) if dry else (8192, 2**30)

    def copy() -> Found:
        x, function = jnp.ones((size,), jnp.bfloat16), jax.jit(lambda x: x + 1)
        seconds = seconds_of(lambda: function(x), jax.block_until_ready, dry)
        rate = {"gb_s": 2 * x.nbytes / seconds / 1e9}
        return common.environment() | rate | held_busy(lambda: function(x), dry)

    def matmul() -> Found:
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
        function = jax.jit(lambda a, b: a @ b)
        seconds = seconds_of(lambda: function(a, b), jax.block_until_ready, dry)
        return {"tflop_s": 2 * n**3 / seconds / 1e12} | held_busy(lambda: function(a, b), dry)

    return {"copy": copy, "matmul": matmul}


def health(dry: bool) -> Cases:
    """Return what shows whether the card still computes after a kernel has crashed or hung."""

    def compute() -> Found:
        x = jnp.arange(1 << 20, dtype=jnp.int32)
        if (wrong := int(jnp.sum(jnp.flip(x) + x != x.size - 1))) > 0:
            raise ValueError(f"{wrong} of {x.size} sums are wrong")
        return {"right": True}

    return {"compute": compute}


# ---- our kernels ----


def context_bytes(case: Case) -> int:
    """Return the bytes of the keys and values of all contexts; in 8 bits with scales in f32."""
    of_a_vector = 2 * case.D if case.kv_dtype is None else case.D + 4
    return 2 * case.K * of_a_vector * sum(case.contexts)


def num_layers(case: Case, dry: bool) -> int:
    """Return the layers of the pool: so many that they do not fit L2, as memory allows."""
    kv_bytes = context_bytes(case)
    wanted = max(CALLS, min(64, -(-4 * L2 // kv_bytes)))
    return 1 if dry else max(1, min(wanted, MOST_BYTES // kv_bytes))


def rows_of(case: Case) -> list[Any]:
    """Return the permuted block table of one layer, the contexts and, for a prefill, where rows
    start.
    """
    rows, per_row = len(case.contexts), -(-case.contexts[0] // case.P)
    ids = np.random.default_rng(0).permutation(np.arange(1, rows * per_row + 1))
    starts = [np.cumsum([0, *case.query_lens])] if case.queries else []
    arrays = (ids.reshape(rows, per_row), case.contexts, *starts)
    return [np.asarray(x, np.int32) for x in arrays]


def our_step(
    name: str, case: Case, layers: int, setting: dict[str, Any], *, dry: bool, **fields: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of its first layer, q, the pool and `rows_of`, and the shapes of these.

    setting: keyword arguments of the kernel. fields: fields of the kernel's Options.
    """
    kernel = importlib.import_module(f"kernels_pallas.paged_attention.{name}")
    function = kernel.prefill if case.queries else kernel.decode
    if case.sinks:
        setting = setting | {"sinks_H": np.zeros(case.H, np.float32)}
    options = dataclasses.replace(case.options, num_layers=layers, **fields)

    def step(first: Any, q: Any, pool: Any, *rest: Any) -> Any:
        for i in range(1 if dry else CALLS):
            layer = jax.lax.rem(first + i, jnp.int32(layers))
            q = function(q, pool, layer, *rest, options=options, **setting)
        return q

    rest = rows_of(case)
    shapes = [
        ((), jnp.int32),
        ((sum(case.query_lens), case.H, case.D), jnp.bfloat16),
        *((x.shape, x.dtype) for x in rest),
    ]
    first, q, *others = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return step, [first, q, pool_of(kernel, case, layers * (rest[0].size + 1)), *others]


def pool_of(kernel: Any, case: Case, blocks: int) -> Any:
    """Return the form of a pool of so many blocks as a kernel takes it; in 8 bits with scales."""
    struct = jax.ShapeDtypeStruct
    layout = kernel.pool_layout(case.K, *case.vectors)
    if case.kv_dtype is None:
        return struct((blocks, case.P, 2 * case.K, case.D), jnp.bfloat16)
    values = struct((blocks, case.P, layout.rows, layout.width), jnp.dtype(case.kv_dtype))
    scales = struct((blocks, *layout.scales(case.P)), jnp.float32)
    return ScaledPool(values, scales, layout.slots_last, layout.key_width)


def filled(form: Any) -> Any:
    """Return noise in the place of every array of a form."""
    return jax.tree.map(lambda x: noise(x.shape).astype(x.dtype), form)


def time_ours(case: Case, layers: int, compiled: Callable[[], Any], dry: bool) -> Found:
    step, (_, q, pool, *_) = compiled()
    arrays = [noise(q.shape), filled(pool), *map(jnp.asarray, rows_of(case))]
    firsts = itertools.cycle([jnp.int32(i) for i in range(0, layers, min(CALLS, layers))])

    def run() -> Any:
        return step(next(firsts), *arrays)

    calls = 1 if dry else CALLS
    record = {"seconds": seconds_of(run, jax.block_until_ready, dry) / calls}
    if (inside := kernel_seconds(run, ("mosaic_gpu", "paged_attention"))) is not None:
        record["kernel_seconds"] = inside / calls
    kv_bytes = context_bytes(case)
    return record | {"fits_l2": kv_bytes * layers < 4 * L2}


def rates(dry: bool) -> Cases:
    """Return what times the decode and the prefill that tell most, by Mosaic."""
    return timed_cases([mosaic(case, {}) for case in bench_cases(dry)[:2]], dry)


Wanted = tuple[str, str, Case, dict[str, Any]]  # a case's name, the kernel's, the case, its setting


def mosaic(case: Case, setting: dict[str, Any]) -> Wanted:
    way = "".join(f"{knob}={value}" for knob, value in setting.items())
    return f"{case} | {way or 'mosaic_gpu'}", "mosaic_gpu", case, setting


def kernels(dry: bool) -> Cases:
    """Return what times every case by Mosaic, then the first ones in other ways and by Triton."""
    cases = bench_cases(dry)
    first = cases[:PEER_CASES]
    wanted = [mosaic(case, {}) for case in cases]
    if not dry:
        decodes = [case for case in first if case.queries is None]
        wanted += [mosaic(case, setting) for case in decodes for setting in WAYS]
    wanted += [(f"{case} | triton", "triton", case, {}) for case in first]
    return timed_cases(wanted, dry)


def timed_cases(wanted: list[Wanted], dry: bool) -> Cases:
    """Return what times each of these. All are compiled at once, in the order of their turns, as
    soon as the first is timed.
    """
    threads = ThreadPoolExecutor(1 if dry else 12)
    layers = {key: num_layers(case, dry) for key, _, case, _ in wanted}

    @functools.cache
    def futures() -> dict[str, Any]:
        def compiled(key: str, name: str, case: Case, setting: dict[str, Any]) -> Any:
            step, shapes = our_step(name, case, layers[key], setting, dry=dry)
            return jax.jit(step).lower(*shapes).compile(), shapes

        return {one[0]: threads.submit(compiled, *one) for one in wanted}

    def time_one(key: str, case: Case) -> Found:
        return time_ours(case, layers[key], lambda: futures()[key].result(), dry)

    return {key: functools.partial(time_one, key, case) for key, _, case, _ in wanted}


# ---- what else there is ----


def peer_case(case: Case) -> bool:
    """Return whether a peer can take the case: a causal mask of whole prompts, or of one last
    token, says all that its queries see.
    """
    return case.query_lens[0] in (1, case.contexts[0])


def jax_triton(case: Case, k_RSKD: Any, v_RSKD: Any, dry: bool) -> Built:
    """Call jax's own Triton kernel, over pages of [K, N, P, D]. It does not scale the scores."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if case.queries is not None:
        raise NotImplementedError("decode alone")
    (rows, S, K, D), P, lens = k_RSKD.shape, case.P, jnp.asarray(case.contexts, jnp.int32)
    table = jnp.arange(rows * S // P, dtype=jnp.int32).reshape(rows, S // P)
    # It wants whole numbers of pages a split, and of steps: enough splits to fill a card, and steps
    # of 128 slots.
    splits = math.gcd(S // P, 1 << min(4, max(0, math.ceil(math.log2(264 / (rows * K))))))
    pages = math.gcd(S // P // splits, max(1, 128 // P))
    options = {"k_splits": splits, "pages_per_compute_block": pages, "interpret": dry}

    def call(q: Any, k: Any, v: Any) -> Any:
        return paged_attention(q * case.D**-0.5, k, v, table, lens, **options)

    return call, [x.reshape(-1, P, K, D).transpose(2, 0, 1, 3) for x in (k_RSKD, v_RSKD)]


def cudnn(case: Case, k_RSKD: Any, v_RSKD: Any, dry: bool) -> Built:
    """Call cuDNN's attention over contiguous keys and values; with --dry it is XLA's."""
    if not peer_case(case):
        raise NotImplementedError("its causal mask knows no cached prefix")
    rows, context, queries = len(case.contexts), case.contexts[0], case.query_lens[0]
    options: Any = {"is_causal": queries > 1, "implementation": "xla" if dry else "cudnn"}
    options["scale"] = case.D**-0.5

    def call(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(rows, queries, case.H, case.D)
        return jax.nn.dot_product_attention(q, k, v, **options).reshape(-1, case.H, case.D)

    return call, [x[:, :context] for x in (k_RSKD, v_RSKD)]


def cudnn_paged(case: Case, k_RSKD: Any, v_RSKD: Any, dry: bool) -> Built:
    """Call cuDNN's attention over pages of [N, P, K, D], for which jax has no public name."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    if not peer_case(case):
        raise NotImplementedError("its causal mask knows no cached prefix")
    (rows, S, K, D), P, queries = k_RSKD.shape, case.P, case.query_lens[0]
    table = jnp.arange(rows * S // P, dtype=jnp.int32).reshape(rows, 1, S // P, 1)
    lens = (jnp.asarray(case.query_lens, jnp.int32), jnp.asarray(case.contexts, jnp.int32))
    mask = attention.MaskType.PADDING_CAUSAL if queries > 1 else attention.MaskType.PADDING

    def call(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(rows, queries, case.H, D)
        o = attention.paged_attention(q, k, v, *lens, table, table, scale=D**-0.5, mask_type=mask)
        return o.reshape(-1, case.H, D)

    return call, [x.reshape(-1, P, K, D) for x in (k_RSKD, v_RSKD)]


JAX_PEERS: dict[str, Callable[..., Built]] = {
    "jax_triton": jax_triton,
    "cudnn": cudnn,
    "cudnn_paged": cudnn_paged,
}


def time_jax_peer(name: str, case: Case, dry: bool) -> Found:
    """Time one of jax's kernels over random keys and values, the pages of each row one after
    another.
    """
    layers = min(num_layers(case, dry), CALLS)
    shape = (2, len(case.contexts), -(-case.contexts[0] // case.P) * case.P, case.K, case.D)
    built = [JAX_PEERS[name](case, *noise(shape), dry) for _ in range(layers)]
    call, arguments = built[0][0], [arrays for _, arrays in built]

    @jax.jit
    def step(q: Any, arguments: Any) -> Any:
        for i in range(1 if dry else CALLS):
            q = call(q, *arguments[i % layers])
        return q

    q = noise((sum(case.query_lens), case.H, case.D))
    seconds = seconds_of(lambda: step(q, arguments), jax.block_until_ready, dry)
    return {"seconds": seconds / (1 if dry else CALLS)}


def peers_jax(dry: bool) -> Cases:
    return {
        f"{case} | {name}": functools.partial(time_jax_peer, name, case, dry)
        for case in bench_cases(dry)[:PEER_CASES]
        for name in JAX_PEERS
    }


def peers_torch(dry: bool) -> Cases:
    ways = ("sdpa_flash", "sdpa_cudnn", "flex_attention")
    return {
        f"{case} | {way}": functools.partial(time_torch, way, case, dry)
        for case in bench_cases(dry)[:PEER_CASES]
        for way in ways
    }


def time_torch(way: str, case: Case, dry: bool) -> Found:
    """Time one of torch's kernels over contiguous keys and values. Each query sees what is before
    it.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torch.nn import attention  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise NotImplementedError("torch is not installed") from e
    cuda = torch.cuda.is_available()
    if not cuda and not dry:
        raise NotImplementedError("torch sees no CUDA device")
    rows, context, queries = len(case.contexts), case.contexts[0], case.query_lens[0]
    options: Any = {"device": "cuda" if cuda else "cpu", "dtype": torch.bfloat16}
    q = torch.randn((rows, case.H, queries, case.D), **options)
    layers = min(num_layers(case, dry), CALLS)
    kv = [torch.randn((2, rows, case.K, context, case.D), **options) for _ in range(layers)]
    turn = itertools.cycle(kv)
    if way == "flex_attention":
        flex = attention.flex_attention
        skipped = context - queries

        def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i + skipped >= j

        mask = flex.create_block_mask(sees, None, None, queries, context, device=options["device"])
        compiled = flex.flex_attention if dry else torch.compile(flex.flex_attention)

        def call(k: Any, v: Any) -> Any:
            return compiled(q, k, v, block_mask=mask, enable_gqa=True)
    else:
        backends = {
            "sdpa_flash": attention.SDPBackend.FLASH_ATTENTION,
            "sdpa_cudnn": attention.SDPBackend.CUDNN_ATTENTION,
        }
        masked: Any = {"is_causal": queries > 1}
        if not peer_case(case):
            lower_right = attention.bias.causal_lower_right(queries, context)
            masked = {"attn_mask": lower_right}

        def call(k: Any, v: Any) -> Any:
            backend = attention.SDPBackend.MATH if dry else backends[way]
            with attention.sdpa_kernel(backend):
                sdpa = torch.nn.functional.scaled_dot_product_attention
                return sdpa(q, k, v, enable_gqa=True, **masked)

    def wait(_: Any) -> None:
        if cuda:
            torch.cuda.synchronize()

    return {"seconds": seconds_of(lambda: call(*next(turn)), wait, dry)}


# ---- engine ----

ENGINE = (
    "--random 0.6b --workload nano --attention auto --num-blocks 5632 --seq-buckets 128 256 "
    "--token-buckets 2048 8192"
)
ENGINE_DRY = (
    "--random tiny --workload nano --requests 4 --output 3 5 --input 5 9 --dtype float32 "
    "--max-model-len 64 --max-num-seqs 8 --max-num-batched-tokens 64 --seq-buckets 8 --num-blocks 9"
)


# Of Qwen3's own generation_config.json.
QWEN: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def engine(dry: bool) -> Cases:
    """Return what runs nano-vllm's workload on a Qwen3-0.6B of random weights: the start, a
    warm-up, timed runs, one of them with Qwen's own sampling, and the same with 8 steps a dispatch.
    """
    cases, llm = served(dry)
    by_steps, _ = served(dry, "--decode-steps", "8")

    def run_by_steps() -> Found:
        if llm.cache_info().currsize:
            llm().close()
        return by_steps["warm"]() | by_steps["run 1"]()

    return {**cases, "decode_steps 8": run_by_steps}


def served(dry: bool, *flags: str) -> tuple[Cases, Any]:
    """Return the cases of an LLM, and the cached function that makes it."""
    args = bench.parse_args([*(ENGINE_DRY if dry else ENGINE).split(), *flags])
    config = common.model_config(args)
    work = bench.full_workload(args, config.vocab_size)
    prompts, outputs = work.requests_of()
    # Every token of a completion reads all before it.
    read = sum(n * len(p) + n * (n - 1) // 2 for p, n in zip(prompts, outputs, strict=True))
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    llm = functools.cache(lambda: bench.make_llm(args, config, work))

    def warm() -> Found:
        return {"warmup_s": llm().warmup(use_tqdm=False), "attention": llm().stats()["attention"]}

    def run(work: bench.Workload = work) -> Found:
        timing = bench.timed(llm(), prompts, work, outputs)
        figures = bench.figures([timing], sum(map(len, prompts)), 0, math.inf)
        names = ("output_tok_s", "prefill_tok_s", "decode_tok_s", "host_ms_per_step", "steps")
        more = ("device_ms_per_step", "outside_steps_s", "best_s", "compiles", "preemptions")
        weights = timing["decode_steps"] * common.num_weights(config) * 2
        return {name: figures[name] for name in (*names, *more)} | {
            "read_bytes": weights + read * token_bytes,
        }

    start = {"start": lambda: {"ready": llm() is not None}}
    filtered = functools.partial(run, dataclasses.replace(work, **QWEN))
    return {**start, "warm": warm, "run 1": run, "run 2": run, "Qwen's sampling": filtered}, llm


FORMS = {
    "int8": ("--quantization", "int8"),
    "fp8": ("--quantization", "fp8"),
    "int4": ("--quantization", "int4"),
    "KV int8": ("--kv-cache-dtype", "int8"),
}


def quantised(dry: bool) -> Cases:
    """Return what times single products and experts, then nano-vllm's workload with weights in 8
    and 4 bits and with keys and values in 8: one run of each after its warm-up.
    """

    def case(*flags: str) -> Found:
        cases, llm = served(dry, *flags)
        record = cases["warm"]() | cases["run 1"]()
        llm().close()
        return record

    names = ("int8", "KV int8") if dry else FORMS  # int4 has no groups in heads of 16
    cases = {name: functools.partial(case, *FORMS[name]) for name in names}
    return {**gpu_products.in_fp8(dry), **gpu_products.mixtures(dry), **cases}


JOBS: dict[str, Callable[[bool], Cases]] = {
    "marks": marks,
    "health": health,
    "rates": rates,
    "kernels": kernels,
    "peers_jax": peers_jax,
    "peers_torch": peers_torch,
    "engine": engine,
    "quantised": quantised,
    "adapters": gpu_products.adapters,
    "states": gpu_states.states,
}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("gpu_timed", __doc__)
    add_job_flags(parser, JOBS)
    args = parser.parse_args(argv)
    run_chosen(args, args.job, JOBS[args.job](args.dry), LIMITS[args.job])
    return 0


if __name__ == "__main__":
    sys.exit(main())
