"""Named cases of paged attention, shared by the kernel tests and by what checks and times a GPU.

They stand here because both sides can import them: scripts import nothing of tests/, and tests may
import scripts/. What users install (jpaged, kernels_pallas, kernels_cpu) has no use for them.

Shapes: T packed tokens, S rows, M blocks a row, L layers, N pool blocks, P block size, H query
heads, K KV heads, G = H/K, D head dim, V width of a value.
"""

import dataclasses

from kernels_pallas.paged_attention.interface import AttentionOptions, Options, Shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `prefill`, or of `decode` if `queries` is None.

    Row r has `contexts[r]` tokens, and its last `queries[r]` tokens are the queries. A context of 0
    is a padding row. V: where it is not D. latent, causal: as of AttentionOptions. kv_dtype: int8
    or float8_e4m3fn for a pool with scales.
    images: (row, start, end) of positions in a prefill whose queries see each other.
    sharpness: what scores are multiplied by beside D**-0.5.
    extra_tokens, extra_blocks: padding of the packed tokens and of the block table.
    """

    name: str
    contexts: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    H: int = 4
    K: int = 2
    D: int = 32
    V: int | None = None
    P: int = 8
    dtype: str = "float32"
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    latent: bool = False
    causal: bool = True
    kv_dtype: str | None = None
    images: tuple[tuple[int, int, int], ...] = ()
    sharpness: float = 1.0
    num_layers: int = 2
    layer: int = 1
    extra_tokens: int = 0
    extra_blocks: int = 3

    def __str__(self) -> str:
        return self.name

    @property
    def query_lens(self) -> tuple[int, ...]:
        return tuple(min(n, 1) for n in self.contexts) if self.queries is None else self.queries

    @property
    def options(self) -> Options:
        """Return what the call is compiled for."""
        attention = AttentionOptions(
            scale=self.sharpness * self.D**-0.5,
            soft_cap=self.soft_cap,
            window=self.sliding_window,
            value_dim=self.V,
            sinks=self.sinks,
            latent=self.latent,
            causal=self.causal,
            ends=bool(self.images),
        )
        return Options(attention=attention, num_layers=self.num_layers)

    @property
    def vectors(self) -> tuple[int, int | None]:
        """Return the widths of the two vectors that a pool holds of a KV head."""
        if self.latent and self.V is not None:
            return self.V, self.D - self.V
        return self.D, self.V

    @property
    def shapes(self) -> Shapes:
        """Return the shapes that an implementation is asked to run."""
        return Shapes(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            head_dim=self.D,
            block_size=self.P,
            num_heads=self.H,
            num_kv_heads=self.K,
            num_rows=len(self.contexts),
            blocks_per_row=max(1, *(-(-n // self.P) for n in self.contexts)) + self.extra_blocks,
        )


# Lengths at which paging goes wrong for P = 8, a padding row among them.
_EDGES = (1, 7, 8, 9, 0, 28, 72)
_BF16 = "bfloat16"

DECODE = (
    Case(name="decode", contexts=_EDGES),
    Case(name="decode_bf16", contexts=_EDGES, dtype=_BF16),
    Case(name="decode_block1_g1", contexts=(1, 2, 70, 0, 130, 3), P=1, K=4),
    Case(
        name="decode_block4_g4_window",
        contexts=(3, 4, 5, 97, 0, 60),
        P=4,
        K=1,
        D=80,
        sliding_window=9,
    ),
    Case(
        name="decode_block64_g7_bf16",
        contexts=(1, 63, 64, 65, 200),
        P=64,
        H=7,
        K=1,
        D=64,
        dtype=_BF16,
    ),
    Case(
        name="decode_block256_g8_cap",
        contexts=(255, 256, 257, 0, 700),
        P=256,
        H=8,
        K=1,
        soft_cap=3.0,
    ),
    Case(
        name="decode_block20_window_bf16",
        contexts=(19, 20, 21, 99),
        P=20,
        D=128,
        sliding_window=25,
        dtype=_BF16,
    ),
    Case(name="decode_sinks", contexts=_EDGES, sinks=True),
    Case(name="decode_d512_bf16", contexts=(1, 17, 0, 66), P=16, K=1, D=512, dtype=_BF16),
    Case(
        name="decode_d96_v64_sinks_bf16",
        contexts=(1, 17, 0, 66, 130),
        P=16,
        H=6,
        K=3,
        D=96,
        V=64,
        sinks=True,
        dtype=_BF16,
    ),
    Case(name="decode_d24_v40", contexts=_EDGES, D=24, V=40, sliding_window=9),
    Case(name="decode_latent_d40_v32", contexts=_EDGES, H=6, K=1, D=40, V=32, latent=True),
    Case(
        name="decode_latent_d576_v512_bf16",
        contexts=(1, 17, 0, 66, 200),
        P=16,
        H=16,
        K=1,
        D=576,
        V=512,
        latent=True,
        dtype=_BF16,
    ),
    Case(
        name="decode_many_rows",
        contexts=tuple(37 * i % 90 for i in range(40)),
        P=16,
        H=2,
        D=24,
        extra_blocks=0,
    ),
)

PREFILL = (
    Case(name="prefill", contexts=_EDGES, queries=_EDGES, extra_tokens=3),
    Case(name="prefill_bf16", contexts=_EDGES, queries=_EDGES, extra_tokens=3, dtype=_BF16),
    Case(
        name="prefill_cached",
        contexts=(9, 16, 0, 28, 72, 135),
        queries=(1, 8, 0, 5, 71, 130),
        extra_blocks=0,
    ),
    Case(name="prefill_block1_g1", contexts=(1, 70, 2), queries=(1, 64, 2), P=1, K=4),
    Case(
        name="prefill_block4_g4_window",
        contexts=(3, 0, 4, 97, 60),
        queries=(3, 0, 4, 97, 1),
        P=4,
        K=1,
        D=80,
        sliding_window=9,
    ),
    Case(
        name="prefill_d512_bf16", contexts=(5, 66), queries=(5, 18), P=16, K=1, D=512, dtype=_BF16
    ),
    Case(
        name="prefill_d192_window_bf16",
        contexts=(5, 66),
        queries=(5, 18),
        P=16,
        D=192,
        sliding_window=20,
        dtype=_BF16,
    ),
    Case(
        name="prefill_d192_v128_window_bf16",
        contexts=(5, 66),
        queries=(5, 18),
        P=16,
        D=192,
        V=128,
        sliding_window=20,
        dtype=_BF16,
    ),
    Case(name="prefill_d40_v24", contexts=_EDGES, queries=_EDGES, D=40, V=24),
    Case(
        name="prefill_latent_d40_v32",
        contexts=(9, 16, 0, 28, 72, 135),
        queries=(1, 8, 0, 5, 71, 130),
        H=6,
        K=1,
        D=40,
        V=32,
        latent=True,
    ),
    Case(
        name="prefill_latent_d128_v64_bf16",
        contexts=(5, 66),
        queries=(5, 18),
        P=16,
        H=56,
        K=1,
        D=128,
        V=64,
        latent=True,
        dtype=_BF16,
    ),
    Case(
        name="prefill_sinks_window",
        contexts=(9, 0, 72, 135),
        queries=(9, 0, 30, 130),
        sliding_window=40,
        sinks=True,
    ),
    Case(
        name="prefill_block64_g7_bf16",
        contexts=(65, 1, 200),
        queries=(65, 1, 70),
        P=64,
        H=7,
        K=1,
        D=64,
        dtype=_BF16,
    ),
    Case(
        name="prefill_block256_g8_cap",
        contexts=(257, 300),
        queries=(257, 40),
        P=256,
        H=8,
        K=1,
        soft_cap=3.0,
    ),
    Case(
        name="prefill_block20_window_bf16",
        contexts=(99, 200),
        queries=(30, 150),
        P=20,
        D=128,
        sliding_window=70,
        dtype=_BF16,
    ),
    Case(
        name="prefill_images_window",
        contexts=(9, 0, 72, 135),
        queries=(9, 0, 30, 130),
        sliding_window=12,
        images=((0, 0, 9), (2, 50, 62), (3, 8, 20), (3, 21, 98), (3, 130, 135)),
        extra_tokens=3,
    ),
    Case(
        name="prefill_images_bf16",
        contexts=(9, 0, 72, 200),
        queries=(9, 0, 30, 130),
        H=6,
        K=1,
        images=((0, 1, 8), (2, 42, 72), (3, 80, 190)),
        dtype=_BF16,
    ),
    Case(
        name="prefill_images_window_d64_bf16",
        contexts=(90, 300),
        queries=(90, 200),
        P=16,
        D=64,
        sliding_window=48,
        images=((0, 5, 70), (1, 102, 230), (1, 240, 300)),
        dtype=_BF16,
    ),
)

# What all GPU kernels support: 16-bit, head dims of 64, 128 and 256, blocks of whole powers of two.
GPU = (
    Case(name="decode_d64_p16_g2", contexts=(1, 15, 0, 16, 17, 64, 150), P=16, D=64, dtype=_BF16),
    Case(
        name="decode_d128_p64_g4_window_f16",
        contexts=(63, 64, 65, 200),
        K=1,
        P=64,
        D=128,
        dtype="float16",
        sliding_window=70,
    ),
    Case(
        name="decode_d256_p128_g8_cap",
        contexts=(127, 129),
        H=8,
        K=1,
        P=128,
        D=256,
        dtype=_BF16,
        soft_cap=3.0,
    ),
    Case(
        name="decode_d128_p8_g1",
        contexts=(7, 0, 9, 70),
        H=2,
        P=8,
        D=128,
        dtype=_BF16,
        extra_blocks=0,
    ),
    Case(
        name="decode_d64_p256_g7_f16", contexts=(255, 257), H=7, K=1, P=256, D=64, dtype="float16"
    ),
    Case(name="decode_g3_k2", contexts=(20, 0, 9), H=6, P=8, D=64, dtype=_BF16, extra_blocks=0),
    Case(
        name="decode_d64_p16_g8_sinks_window",
        contexts=(20, 0, 150),
        H=16,
        P=16,
        D=64,
        dtype=_BF16,
        sliding_window=128,
        sinks=True,
    ),
    Case(
        name="prefill_d64_p16_g2",
        contexts=(1, 15, 0, 17, 64, 150),
        queries=(1, 15, 0, 17, 64, 150),
        P=16,
        D=64,
        dtype=_BF16,
        extra_tokens=70,
    ),
    Case(
        name="prefill_d128_p64_g4_cached_f16",
        contexts=(9, 64, 100, 200, 135),
        queries=(1, 64, 0, 5, 70),
        K=1,
        P=64,
        D=128,
        dtype="float16",
        extra_blocks=0,
    ),
    Case(
        name="prefill_d256_p128_g8_cap",
        contexts=(129, 40),
        queries=(70, 3),
        H=8,
        K=1,
        P=128,
        D=256,
        dtype=_BF16,
        soft_cap=3.0,
    ),
    Case(
        name="prefill_d128_p8_g1_window",
        contexts=(190, 3, 60),
        queries=(150, 3, 1),
        H=2,
        P=8,
        D=128,
        dtype=_BF16,
        sliding_window=9,
        extra_blocks=0,
    ),
    Case(
        name="prefill_d64_p256_g7_window_f16",
        contexts=(300,),
        queries=(140,),
        H=7,
        K=1,
        P=256,
        D=64,
        dtype="float16",
        sliding_window=100,
    ),
    Case(
        name="prefill_g4_k2",
        contexts=(20, 5),
        queries=(3, 5),
        H=8,
        P=8,
        D=64,
        dtype=_BF16,
        extra_blocks=0,
    ),
    Case(
        name="prefill_d64_p16_g8_sinks",
        contexts=(20, 0, 150),
        queries=(20, 0, 70),
        H=16,
        P=16,
        D=64,
        dtype=_BF16,
        sinks=True,
    ),
    Case(
        name="prefill_d64_p16_g7_sinks_window",
        contexts=(150,),
        queries=(70,),
        H=7,
        K=1,
        P=16,
        D=64,
        dtype=_BF16,
        sliding_window=64,
        sinks=True,
    ),
    # Images that are longer than a tile of queries, than a window, and that end with their row.
    Case(
        name="prefill_images_d64_p16_g2",
        contexts=(20, 0, 200),
        queries=(20, 0, 150),
        P=16,
        D=64,
        dtype=_BF16,
        images=((0, 1, 8), (2, 50, 57), (2, 60, 190)),
        extra_tokens=5,
    ),
    Case(
        name="prefill_images_d128_p8_g1_window_f16",
        contexts=(240, 3, 60),
        queries=(150, 3, 40),
        H=2,
        P=8,
        D=128,
        dtype="float16",
        sliding_window=9,
        images=((0, 90, 240), (2, 30, 45), (2, 46, 60)),
        extra_blocks=0,
    ),
    Case(
        name="prefill_images_d256_p64_g2",
        contexts=(140,),
        queries=(140,),
        H=2,
        K=1,
        P=64,
        D=256,
        dtype=_BF16,
        images=((0, 40, 135),),
    ),
    Case(
        name="prefill_few_tokens",
        contexts=(70, 2),
        queries=(3, 2),
        P=16,
        D=64,
        dtype=_BF16,
        extra_tokens=1,
    ),
)

# Those that scripts/gpu_programs.py runs under compute-sanitizer, by name.
SANITIZED = ("decode_d64_p16_g2", "prefill_d64_p16_g2")

# Keys and values in 8 bits with scales: with windows, caps, sinks and padding.
_IN_8_BITS = (
    *("decode_d64_p16_g2", "decode_d64_p16_g8_sinks_window", "decode_d256_p128_g8_cap"),
    *("prefill_d64_p16_g2", "prefill_d64_p16_g7_sinks_window", "prefill_d256_p128_g8_cap"),
)
SCALED = tuple(
    dataclasses.replace(case, name=f"{case.name}_{kv_dtype}", kv_dtype=kv_dtype)
    for kv_dtype in ("int8", "float8_e4m3fn")
    for case in GPU
    if case.name in _IN_8_BITS
)

# The same with values of another width than keys.
NARROW_IN_8_BITS = (
    dataclasses.replace(
        next(case for case in DECODE if case.name == "decode_d96_v64_sinks_bf16"),
        name="decode_d96_v64_sinks_int8",
        kv_dtype="int8",
    ),
    dataclasses.replace(
        next(case for case in PREFILL if case.name == "prefill_d192_v128_window_bf16"),
        name="prefill_d192_v128_window_fp8",
        kv_dtype="float8_e4m3fn",
    ),
)

# Latents in 8 bits: a latent and its rotated key have a scale each.
LATENT_IN_8_BITS = tuple(
    dataclasses.replace(case, name=f"{case.name}_{kv_dtype}", kv_dtype=kv_dtype)
    for case, kv_dtype in (
        *((x, "int8") for x in DECODE if x.name == "decode_latent_d40_v32"),
        *((x, "float8_e4m3fn") for x in PREFILL if x.name == "prefill_latent_d128_v64_bf16"),
    )
)

# ---- Cases that only a device is quick enough for, and the cases that are timed there ----

_ROWS = Case(name="", contexts=(), dtype=_BF16, num_layers=1, layer=0)


def _timed(
    rows: int,
    context: int,
    queries: int | None = None,
    G: int = 2,
    K: int = 8,
    D: int = 128,
    P: int = 64,
    kv_dtype: str | None = None,
    sinks: bool = False,
) -> Case:
    """Return a case of equal rows in bfloat16, by default with the heads of Qwen3-0.6B. kv_dtype:
    that of a pool in 8 bits.
    """
    kind = "decode" if queries is None else "fresh" if queries == context else "cached"
    name, query_lens = (
        f"{kind} {rows}x{context} G{G} D{D} P{P}",
        None if queries is None else (queries,) * rows,
    )
    name += "" if kv_dtype is None else f" {kv_dtype}"
    name += " sinks" if sinks else ""
    sizes = {"H": G * K, "K": K, "D": D, "P": P, "kv_dtype": kv_dtype, "sinks": sinks}
    return dataclasses.replace(
        _ROWS, name=name, contexts=(context,) * rows, queries=query_lens, **sizes
    )


# Rings wrap many times and thread blocks take many turns, at the heads of Qwen3-0.6B and of others.
# The most telling cases come first.
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
    dataclasses.replace(
        _ROWS, name="decode_1000_sharp", contexts=(1000, 300), H=16, K=8, D=128, P=64, sharpness=8.0
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
    Case(
        name="prefill_int8",
        contexts=(65, 0, 200),
        queries=(65, 0, 70),
        P=64,
        D=64,
        dtype=_BF16,
        kv_dtype="int8",
        extra_tokens=3,
    ),
    Case(
        name="prefill_fp8_sinks_window",
        contexts=(150,),
        queries=(70,),
        H=3,
        K=1,
        P=128,
        D=128,
        dtype=_BF16,
        sliding_window=64,
        sinks=True,
        kv_dtype="float8_e4m3fn",
    ),
    Case(
        name="prefill_fp8_f16_cap",
        contexts=(129, 40),
        queries=(70, 3),
        P=64,
        D=128,
        dtype="float16",
        soft_cap=3.0,
        kv_dtype="float8_e4m3fn",
    ),
    Case(
        name="prefill_int8_d256",
        contexts=(70, 5),
        queries=(9, 5),
        H=2,
        K=1,
        P=64,
        D=256,
        dtype=_BF16,
        kv_dtype="int8",
    ),
    Case(
        name="prefill_int8_images_window",
        contexts=(190, 20),
        queries=(130, 20),
        P=64,
        D=64,
        dtype=_BF16,
        sliding_window=30,
        images=((0, 70, 185), (1, 0, 20)),
        kv_dtype="int8",
    ),
)
# The same where rings wrap and blocks take turns.
DEVICE_IN_8_BITS = tuple(
    dataclasses.replace(case, name=f"{case.name}_{kv_dtype}", kv_dtype=kv_dtype)
    for case, kv_dtype in zip(DEVICE[:3], ("int8", "int8", "float8_e4m3fn"), strict=True)
)

# Latents as DeepSeek's, whose query heads are in several parts.
_LATENTS = dataclasses.replace(_ROWS, H=16, K=1, D=576, V=512, P=64, latent=True)
DEVICE_LATENTS = (
    dataclasses.replace(_LATENTS, name="decode_1000_latents", contexts=(1000, 1, 937, 0, 512) * 4),
    dataclasses.replace(
        _LATENTS, name="prefill_1k_latents", contexts=(1100, 600), queries=(1100, 90)
    ),
    dataclasses.replace(_LATENTS, name="decode_4000_latents_h128", contexts=(4000, 65), H=128),
    dataclasses.replace(
        _LATENTS, name="decode_1000_latents_int8", contexts=(1000, 130) * 4, kv_dtype="int8"
    ),
    dataclasses.replace(
        _LATENTS,
        name="prefill_900_latents_int8",
        contexts=(900, 40),
        queries=(400, 40),
        kv_dtype="int8",
    ),
)

# Cases that are timed on a GPU: the most telling ones first, decode and prefill in turn.
BENCH = (
    _timed(128, 2048),
    _timed(1, 8192, 8192),
    _timed(256, 1024),
    _timed(4, 2048, 2048),
    _timed(8, 8192),
    _timed(1, 32768, 2048),
    _timed(128, 2048, kv_dtype="int8"),
    _timed(128, 2048, kv_dtype="float8_e4m3fn"),
    _timed(1, 8192, 8192, kv_dtype="int8"),
    _timed(128, 2048, G=8, D=64, sinks=True),
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
