"""The Triton kernel without a GPU: interpreted under the shared suite, and lowered for CUDA."""

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import triton
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.pool_layout import ScaledPool
from scripts._attention_cases import DECODE, GPU, LATENT_IN_8_BITS, PREFILL, SCALED, Case
from scripts._common import CARDS, H200, cannot_compile, hopper
from tests.kernels import aot_cuda, aot_triton
from tests.kernels.bounds import again, watch
from tests.kernels.suite import PagedAttentionSuite, build, call, check

# 16-bit cases of the others too; a head of 24, 80 or f32 is not taken.
CASES = [
    case
    for case in (*GPU, *DECODE, *PREFILL)
    if triton.unsupported(case.shapes, case.options.attention, None) is None
]
# Of latents: query heads in several parts, with padding, and in 8 bits.
LATENTS = [case for case in CASES if case.latent]
LATENTS_IN_8_BITS = [
    *(case for case in LATENT_IN_8_BITS if case.dtype == "bfloat16"),
    dataclasses.replace(LATENTS[0], name="decode_latent_int8", kv_dtype="int8", H=40),
]
# Images whose tokens see each other, in 8 bits and of latents.
IMAGES = next(case for case in GPU if case.name == "prefill_images_d64_p16_g2")
MORE_IMAGES = [
    dataclasses.replace(IMAGES, name="images_int8", kv_dtype="int8"),
    dataclasses.replace(IMAGES, name="images_latent", H=6, K=1, D=80, V=64, latent=True),
]
needs_cuda = pytest.mark.skipif(
    cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda"))
)
FIRST_PREFILL = next(case for case in GPU if case.queries is not None)


class TestTriton(PagedAttentionSuite):
    implementation = triton
    cases = CASES
    plain_cases = (GPU[0], FIRST_PREFILL)
    plain_splits = 1  # how many there are otherwise follows from the table's width


class TestScaled(PagedAttentionSuite):
    implementation = triton
    cases = (*SCALED, *LATENTS_IN_8_BITS, *MORE_IMAGES)
    plain_cases = (SCALED[0], SCALED[3])
    plain_splits = 1


def test_cases_cover_what_there_is() -> None:
    assert {case.H // case.K for case in CASES} >= {1, 2, 4, 7, 8} and {
        case.D for case in CASES
    } >= {64, 128, 256}
    assert {case.dtype for case in CASES} == {"bfloat16", "float16"} and {
        case.P for case in CASES
    } >= {8, 16, 64, 256}


def test_splits_without_steps() -> None:
    check(triton, GPU[0], splits=7)


def test_latents_are_split_too() -> None:
    check(triton, LATENTS[0], splits=3)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"D": 560, "V": 512, "latent": True}, "latents of 512 and rotated keys of 48: only"),
        ({"D": 128, "V": 64}, "values of 64: only the keys' width, 128"),
    ],
)
def test_unsupported_widths(sizes: dict[str, Any], reason: str) -> None:
    case = Case(name="odd", contexts=(3,), K=1, dtype="bfloat16", **sizes)
    assert reason in str(triton.unsupported(case.shapes, case.options.attention, None))


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("bfloat16", 80)])
def test_unsupported(dtype: str, head_dim: int) -> None:
    case = Case(name="odd", contexts=(3,), D=head_dim, dtype=dtype)
    assert triton.unsupported(case.shapes, case.options.attention, None)
    with pytest.raises(NotImplementedError, match=r"triton: (dtype float32|head_dim 80): only"):
        call(triton, case, build(case))


@pytest.mark.parametrize(("blocks", "fits"), [(1 << 17, True), (3 << 16, False), (3 << 17, True)])
def test_a_pool_in_8_bits_whose_offsets_overflow(blocks: int, fits: bool) -> None:
    """Blocks of 2**14 bytes."""

    def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    values = shape(blocks, 16, 8, 128, dtype=jnp.int8)
    pool = ScaledPool(values, shape(blocks, 8, 16, dtype=jnp.float32), slots_last=True)
    run = functools.partial(triton.decode, options=Options(attention=AttentionOptions(scale=0.1)))
    args = (shape(2, 4, 128, dtype=jnp.bfloat16), pool, 0, shape(2, 4), shape(2))
    if fits:
        jax.eval_shape(run, *args)
    else:
        with pytest.raises(NotImplementedError, match=r"between.*: change num_blocks"):
            jax.eval_shape(run, *args)


A100 = ("NVIDIA A100", 108)


@pytest.mark.parametrize("chip", ["sm_80", "sm_89"])
def test_splits_fill_the_card_at_hand(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs a multiprocessor, of 8 KV heads of one row."""
    made = []

    def note(*args: Any, splits: int, **options: Any) -> Any:
        made.append(splits)
        return args[0]

    monkeypatch.setattr(triton, "_attend", note)
    card, shape = CARDS[chip], jax.ShapeDtypeStruct
    q, pool = shape((1, 16, 64), jnp.bfloat16), shape((400, 64, 16, 64), jnp.bfloat16)
    rows = shape((1, 100), jnp.int32), shape((1,), jnp.int32)
    options = Options(attention=AttentionOptions(scale=0.1))
    with hopper((card.name, card.cores)):
        jax.eval_shape(functools.partial(triton.decode, options=options), q, pool, 0, *rows)
    assert made == [min(triton.MAX_SPLITS, -(-2 * card.cores // 8))]


@needs_cuda
@pytest.mark.parametrize("chip", CARDS)
def test_compiles_for_each_card(chip: str) -> None:
    """In the shared memory that the card has: a control does not."""
    made = {name: aot_triton.compiled(chip, name) for name in aot_triton.kernels_of(chip)}
    refused = {name: each.refused for name, each in made.items() if each.refused is not None}
    assert refused.keys() == {aot_triton.CONTROL}, refused


def lower(function: Callable[..., Any], *args: Any, device: tuple[str, int] = A100) -> str:
    """StableHLO for a card."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        return aot_cuda.lower(function, *args, device=device)


@pytest.mark.parametrize(("G", "D", "P"), [(1, 64, 128), (2, 128, 64), (7, 64, 16), (8, 256, 64)])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_lowers_for_cuda(G: int, D: int, P: int, soft_cap: float | None) -> None:
    def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    attention = AttentionOptions(scale=D**-0.5, window=30, soft_cap=soft_cap)
    options = Options(attention=attention, num_layers=2, interpret=False)
    pool, rest = shape(200, P, 8, D, dtype=jnp.bfloat16), (shape(), shape(8, 20), shape(8))

    def q(tokens: int) -> Any:
        return shape(tokens, G * 4, D, dtype=jnp.bfloat16)

    for text in (
        lower(lambda *a: triton.decode(*a, options=options), q(8), pool, *rest),
        lower(lambda *a: triton.prefill(*a, options=options), q(256), pool, *rest, shape(9)),
    ):
        assert "triton" in text and f"{256 if 'tensor<256x' in text else 8}" in text


def loads_of(text: str) -> set[str]:
    """Types of what the Triton module that a kernel is lowered to loads by whole tiles."""
    return set(re.findall(r'tt\.load .*: tensor<\d+x\d+x!tt\.ptr<(\w+)>> "masked_load', text))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("kv_dtype", "loaded"),
    [(jnp.int8, "i8"), (jnp.float8_e4m3fn, "f8E4M3FN"), (None, "bf16")],
    ids=["int8", "fp8", "control"],
)
def test_lowers_in_8_bits(
    kv_dtype: Any,
    loaded: str,
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bytes are what the kernel loads, and nothing outside of it widens the pool. The controls: a
    pool in bf16; and one that is widened first.
    """
    pallas_call = functools.partial(triton.pl.pallas_call, debug=True)  # prints the module
    monkeypatch.setattr(triton.pl, "pallas_call", pallas_call)

    def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    pool = shape(200, 64, 8, 128, dtype=kv_dtype or jnp.bfloat16)
    if kv_dtype is not None:
        pool = ScaledPool(pool, shape(200, 8, 64, dtype=jnp.float32), slots_last=True)
    options = Options(attention=AttentionOptions(scale=0.1), num_layers=2, interpret=False)
    q = shape(8 if phase == "decode" else 256, 8, 128, dtype=jnp.bfloat16)
    rows = (shape(), shape(8, 20), shape(8), *([] if phase == "decode" else [shape(9)]))

    def attend(q: Any, pool: Any, *rows: Any, widened: bool = False) -> Any:
        if widened:
            values = pool.values.astype(jnp.bfloat16)
            pool = values * pool.scales.swapaxes(1, 2)[..., None].astype(jnp.bfloat16)
        return getattr(triton, phase)(q, pool, *rows, options=options)

    triton._attend.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    device = H200 if kv_dtype == jnp.float8_e4m3fn else A100  # which has no such floats
    outside = lower(attend, q, pool, *rows, device=device)
    assert loads_of(capsys.readouterr().out) == {loaded} | {"bf16"}  # queries
    widening = re.compile(r"stablehlo\.convert .*: \(tensor<200x64x8x128x")
    assert not widening.search(outside)
    if kv_dtype is not None:
        first = functools.partial(attend, widened=True)
        assert widening.search(lower(first, q, pool, *rows, device=device))
        assert loads_of(capsys.readouterr().out) == {"bf16"}


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "last slot unseen": lambda patch: patch.setattr(triton.lax, "rem", _off_by_one(triton.lax.rem)),
    "table not read": lambda patch: patch.setattr(
        triton.plgpu, "load", _zero_ints(triton.plgpu.load)
    ),
    "zeros returned": lambda patch: patch.setattr(triton.plgpu, "dot", lambda a, b: 0 * _dot(a, b)),
    "mask dropped": lambda patch: patch.setattr(triton, "NEG", 0.0),
}
_dot = triton.plgpu.dot


def _off_by_one(rem: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: rem(a + 1, b)


def _zero_ints(load: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(ref: Any, **options: Any) -> Any:
        value = load(ref, **options)
        return value * 0 if value.dtype == jnp.int32 else value

    return mutated


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("case", [GPU[0], FIRST_PREFILL], ids=str)
def test_a_broken_kernel_is_noticed(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    triton._attend.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    with monkeypatch.context() as patch:
        MUTATIONS[name](patch)
        with pytest.raises(AssertionError):
            check(triton, case)
            check(triton, case, "coded")
    triton._attend.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


# Odd groups, tables that end with their contexts: decode, split and not, and prefill.
EDGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("decode_g3_k2", {"splits": 1}),
    ("decode_g3_k2", {"splits": 2}),
    ("prefill_g4_k2", {}),
    ("prefill_g3_k2", {}),
)
MASKS = {
    "heads": ("(token_R < count) & (head_R < G)", "(token_R < count)", "decode_g3_k2"),
    "tokens": ("(token_R < count) & (head_R < G)", "(head_R < G)", "prefill_g4_k2"),
    "the table's end": ("mask=slot < end", "mask=slot >= 0", "decode_g3_k2"),
    "the table's end in prefill": ("mask=slot < end", "mask=slot >= 0", "prefill_g4_k2"),
}
EDGE_CASES = {case.name: case for case in GPU}
EDGE_CASES["prefill_g3_k2"] = dataclasses.replace(
    EDGE_CASES["prefill_g4_k2"], name="prefill_g3_k2", H=6, extra_tokens=0
)


@pytest.mark.parametrize(("name", "own"), EDGES)
def test_touches_nothing_outside(
    name: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = again(triton)
    seen = watch(monkeypatch, module)
    check(module, EDGE_CASES[name], **own)
    jax.effects_barrier()
    assert seen and not any(seen)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_left_out_touches_what_is_outside(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, case = MASKS[name]
    module = again(triton, old, new)
    seen = watch(monkeypatch, module)
    with contextlib.suppress(AssertionError):  # some are wrong as well
        check(module, EDGE_CASES[case])
    jax.effects_barrier()
    assert any(seen)
