"""Cases that only a device is quick enough for: what is checked there beside `cases`, and what is
timed.

Shapes: G query heads of each of K KV heads, D head dim, P block size.
"""

import dataclasses

from kernels_pallas.paged_attention.cases import Case

_BF16 = "bfloat16"
_ROWS = Case(name="", contexts=(), dtype=_BF16, num_layers=1, layer=0)


def _timed(
    rows: int,
    context: int,
    queries: int | None = None,
    G: int = 2,
    K: int = 8,
    D: int = 128,
    P: int = 64,
) -> Case:
    """Rows alike, in bfloat16; by default with the heads of Qwen3-0.6B."""
    kind = "decode" if queries is None else "fresh" if queries == context else "cached"
    name, query_lens = (
        f"{kind} {rows}x{context} G{G} D{D} P{P}",
        None if queries is None else (queries,) * rows,
    )
    sizes = {"H": G * K, "K": K, "D": D, "P": P}
    return dataclasses.replace(
        _ROWS, name=name, contexts=(context,) * rows, queries=query_lens, **sizes
    )


# What only a device is quick enough for: rings that wrap many times, thread blocks that take many
# turns, at the heads of Qwen3-0.6B and others; the first tell most.
DEVICE = (
    dataclasses.replace(
        _ROWS, name="decode_1000", contexts=(1000, 1, 937, 0, 64, 512) * 4, H=16, K=8, D=128, P=64
    ),
    dataclasses.replace(
        _ROWS, name="prefill_2k", contexts=(2048, 100), queries=(2048, 100), H=16, K=8, D=128, P=64
    ),
    dataclasses.replace(
        _ROWS, name="decode_5000_g4_k2", contexts=(5000, 4097, 0, 130), H=8, D=128, P=64
    ),
    dataclasses.replace(
        _ROWS,
        name="prefill_2k_cached_g4_k2",
        contexts=(4096, 2500, 70),
        queries=(2048, 300, 1),
        H=8,
        D=128,
        P=64,
    ),
    dataclasses.replace(
        _ROWS, name="decode_1000_d64_p16", contexts=(1000, 5, 300) * 12, H=14, D=64, P=16
    ),
    dataclasses.replace(
        _ROWS,
        name="prefill_1k_d256_window",
        contexts=(1100, 600),
        queries=(1100, 90),
        H=8,
        D=256,
        P=64,
        sliding_window=512,
    ),
    dataclasses.replace(
        _ROWS,
        name="decode_3000_d256_cap",
        contexts=(3000, 100) * 2,
        H=8,
        D=256,
        P=64,
        soft_cap=50.0,
    ),
)

# Keys and values in 8 bits, in blocks of a whole tile and of more, of each width of a head: small
# enough for interpreters too.
IN_TILES = (
    Case(
        name="decode_int8",
        contexts=(63, 64, 65, 0, 200),
        P=64,
        D=64,
        dtype=_BF16,
        kv_dtype="int8",
    ),
    Case(
        name="decode_fp8_sinks_window",
        contexts=(70, 0, 150),
        K=1,
        P=128,
        D=128,
        dtype=_BF16,
        sliding_window=70,
        sinks=True,
        kv_dtype="float8_e4m3fn",
    ),
    Case(
        name="decode_fp8_f16_cap",
        contexts=(127, 129),
        H=8,
        P=128,
        D=128,
        dtype="float16",
        soft_cap=3.0,
        kv_dtype="float8_e4m3fn",
    ),
    Case(
        name="decode_int8_d256",
        contexts=(70, 5),
        K=1,
        P=64,
        D=256,
        dtype=_BF16,
        kv_dtype="int8",
    ),
)
# The same where rings wrap and blocks take turns.
DEVICE_IN_8_BITS = tuple(
    dataclasses.replace(case, name=f"{case.name}_{kv_dtype}", kv_dtype=kv_dtype)
    for case, kv_dtype in zip(DEVICE[:3], ("int8", "int8", "float8_e4m3fn"), strict=True)
)

# What is timed on a GPU, what tells most first, decode and prefill in turn.
BENCH = (
    _timed(128, 2048),
    _timed(1, 8192, 8192),
    _timed(256, 1024),
    _timed(4, 2048, 2048),
    _timed(8, 8192),
    _timed(1, 32768, 2048),
    _timed(256, 512),
    _timed(16, 512, 512),
    _timed(1, 32768),
    _timed(1, 8192, 8192, G=4),
    _timed(128, 2048, G=4),
    _timed(1, 8192, 8192, D=64),
    _timed(128, 2048, P=16),
    _timed(4, 8192, 2048),
)
BENCH_DRY = (
    _timed(2, 40, K=1, D=64, P=16),
    _timed(1, 48, 48, K=1, D=64, P=16),
    _timed(1, 48, 32, K=1, D=64, P=16),
)
