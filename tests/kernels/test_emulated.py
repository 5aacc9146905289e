"""The Mosaic kernels as compiled for Hopper, executed by the emulator of tests/kernels/hopper.

Each case runs three times: with what is asynchronous done at random times, at the last legal
moment, and with copies done at once by warps that are as far ahead as they can be; shared memory
starts as garbage. It is held to the float64 reference as every implementation is. What is broken on
purpose has to fail. Needs the CUDA plugin and ptxas, no card.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.experts import mosaic_gpu as experts
from kernels_pallas.experts import widened_product
from kernels_pallas.paged_attention import mosaic_gpu
from kernels_pallas.paged_attention.head_write import HeadNorm
from kernels_pallas.paged_attention.head_write import mosaic_gpu as head_write
from kernels_pallas.paged_attention.mosaic_gpu import decode_kernel, prefill_kernel
from kernels_pallas.vocab_tiles import mosaic_gpu as vocab_tiles
from scripts._attention_cases import GPU, IN_TILES, Case
from scripts._common import cannot_compile
from tests.kernels import test_head_write as heads
from tests.kernels.hopper.block import AHEAD, LATE, RANDOM, TIMINGS, ThreadBlock
from tests.kernels.hopper.emulated import Emulated
from tests.kernels.hopper.memory import Fault
from tests.kernels.suite import bounded, check
from tests.kernels.test_experts import GLU, exact, in_form, make, quantised
from tests.runtime.test_one_pass import check as check_tiles

SECONDS = 900  # that a test may take, on a busy machine

needs_cuda = pytest.mark.skipif(
    cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda"))
)
pytestmark = needs_cuda

CASES = {case.name: case for case in (*GPU, *IN_TILES)}
# In other orders; their names are the seeds.
LATE_AGAIN = dataclasses.replace(LATE, name="late again")
RANDOM_AGAIN = dataclasses.replace(RANDOM, name="random 2")
# One of each kind; slow.txt has the others.
FIRST = (
    "decode_d64_p16_g2",
    "decode_d128_p8_g1",
    "decode_d128_p64_g4_window_f16",
    "decode_d64_p16_g8_sinks_window",
    "decode_d256_p128_g8_cap",
    "decode_int8",
    "decode_fp8_sinks_window",
    "prefill_g4_k2",
    "prefill_d128_p8_g1_window",
    "prefill_d64_p16_g7_sinks_window",
)

# Rings wrap, thread blocks take turns, and rows have tiles that are not full.
_LONG = Case(
    name="",
    contexts=(600, 40, 0, 470, 64),
    H=2,
    K=1,
    D=128,
    P=64,
    dtype="bfloat16",
    num_layers=1,
    layer=0,
)
_LONG_PREFILL = dataclasses.replace(_LONG, contexts=(700, 70), queries=(100, 70))
_IN_FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}  # which has a NaN for what is not seen
_DECODE = {"splits": 1, "thread_blocks": 2}, decode_kernel
_PREFILL = {"thread_blocks": 1}, prefill_kernel
LONG: dict[str, tuple[Case, dict[str, Any], Any]] = {  # with arguments, and the kernel's module
    "decode": (_LONG, *_DECODE),
    "prefill": (_LONG_PREFILL, *_PREFILL),
    "decode_sharp": (dataclasses.replace(_LONG, sharpness=8.0), *_DECODE),
    "decode_fp8": (dataclasses.replace(_LONG, **_IN_FP8), *_DECODE),
    "prefill_fp8": (dataclasses.replace(_LONG_PREFILL, **_IN_FP8), *_PREFILL),
}


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process if a test takes too long."""
    with bounded(request, SECONDS):
        yield


def implementation(emulated: Emulated) -> Any:
    """Return mosaic_gpu's functions, with their kernels emulated."""

    def emulate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, options: Any, **own: Any) -> Any:
            with emulated.running():
                options = dataclasses.replace(options, interpret=False)
                return function(*args, options=options, **own)

        return run

    return SimpleNamespace(
        prepare=mosaic_gpu.prepare,
        prefill=emulate(mosaic_gpu.prefill),
        decode=emulate(mosaic_gpu.decode),
        pool_layout=mosaic_gpu.pool_layout,
    )


def check_emulated(case: Case, **own: Any) -> None:
    """Hold the emulated kernel of a case to the reference, under every timing."""
    emulated = Emulated(RANDOM)
    for emulated.timing in TIMINGS:
        check(implementation(emulated), case, **own)


@pytest.mark.parametrize("name", FIRST)
def test_equals_the_reference(name: str) -> None:
    check_emulated(CASES[name])


@pytest.mark.parametrize("name", sorted(CASES.keys() - {*FIRST}))
def test_others_equal_the_reference(name: str) -> None:
    check_emulated(CASES[name])


@pytest.mark.parametrize(("splits", "thread_blocks"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_thread_blocks_take_turns(splits: int, thread_blocks: int, kv_dtype: str | None) -> None:
    case = dataclasses.replace(_LONG, kv_dtype=kv_dtype)
    check_emulated(case, splits=splits, thread_blocks=thread_blocks)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("group", [16, 40])
def test_queries_of_a_kv_head_are_columns_or_rows(group: int, kv_dtype: str | None) -> None:
    """Up to 32 are columns of decode's products, whole 8s of them; 40 are rows. In 8 bits a second
    tile of 16 bits has no room beside 16 queries of 128.
    """
    assert decode_kernel.by_slot(128, 16) and not decode_kernel.by_slot(128, 40)
    case = dataclasses.replace(_LONG, contexts=(200, 0, 70), H=group, kv_dtype=kv_dtype)
    check_emulated(case, splits=1, thread_blocks=2)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 24), (128, 3)])
def test_a_maximum_rises_in_later_tiles(head_dim: int, group: int, kv_dtype: str | None) -> None:
    """By so much that weights are computed again, of some queries and not of others."""
    sharp: dict[str, Any] = {"D": head_dim, "H": group, "kv_dtype": kv_dtype, "sharpness": 8.0}
    case = dataclasses.replace(_LONG, contexts=(400, 0, 70), **sharp)
    check_emulated(case, splits=1, thread_blocks=2)


@pytest.mark.parametrize("thread_blocks", [1, 3])
@pytest.mark.parametrize("window", [None, 90])
def test_thread_blocks_of_prefill_take_turns(thread_blocks: int, window: int | None) -> None:
    case = dataclasses.replace(_LONG_PREFILL, extra_tokens=70, sliding_window=window)
    check_emulated(case, thread_blocks=thread_blocks)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_wide_heads_with_a_cap_take_turns(phase: str, kv_dtype: str | None) -> None:
    """At a head_dim of 256 a ring has few stages, and a decode's item is a thread block."""
    case, own = (_LONG, {"splits": 2}) if phase == "decode" else (_LONG_PREFILL, _PREFILL[0])
    wide: dict[str, Any] = {"D": 256, "soft_cap": 3.0, "kv_dtype": kv_dtype}
    check_emulated(dataclasses.replace(case, **wide), **own)


def test_no_thread_block_is_for_a_padding_tile() -> None:
    """A step of 256 rows of which two are real: as many thread blocks as the card holds, three of
    which have a tile: one of each row, one of padding tokens.
    """
    case = dataclasses.replace(
        CASES["prefill_g4_k2"],
        contexts=(20, 5, *[0] * 254),
        queries=(3, 5, *[0] * 254),
        H=2,
        K=1,
        extra_tokens=56,
    )
    emulated, run, started = Emulated(RANDOM), ThreadBlock.run, []

    def note(block: ThreadBlock, index: tuple[int, int, int]) -> None:
        run(block, index)
        started.append(block.started)

    with mock.patch.object(ThreadBlock, "run", note):
        check(implementation(emulated), case)
    (compiled,) = emulated.compiled.values()
    assert compiled.launch.grid == (132, 1, 1) and len(started) == 132
    assert sorted(filter(None, started), key=len) == [{"store"}, *[{"load", "store", "wgmma"}] * 2]


@pytest.mark.parametrize(("T", "X", "A"), [(70, 5, 2), (300, 2, 1)], ids=str)
def test_experts_are_the_loop_over_them(T: int, X: int, A: int) -> None:
    """jax's grouped product, twice: tiles of few rows and of many, of which experts share some."""
    x, chosen, weight, weights = make(T, X, A, jnp.bfloat16)
    emulated, wanted = Emulated(RANDOM), exact(x, chosen, weight, weights)
    for emulated.timing in TIMINGS:
        with emulated.running():
            found = np.asarray(experts.experts(x, chosen, weight, weights, glu=GLU))
        assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()
    assert len(emulated.compiled) == 2


WIDENED = [  # form, inputs that share a scale, tokens, experts, choices, widths
    ("int4", 96, 9, 3, 2, 192, 192),
    ("int8", None, 9, 3, 2, 128, 192),
    ("fp8", None, 9, 3, 2, 128, 128),
    ("fp8", 32, 9, 3, 2, 128, 192),
    ("mxfp4", None, 9, 3, 2, 192, 192),
    ("int8", 64, 70, 1, 1, 256, 128),
    ("mxfp4", None, 70, 1, 1, 128, 128),
    ("int8", None, 300, 2, 1, 128, 256),
]


@pytest.mark.parametrize("made", WIDENED, ids=str)
def test_widened_experts_are_the_loop_over_them(made: tuple[Any, ...]) -> None:
    """Tiles of few rows and of many, one strip of outputs and two, outputs that are computed twice,
    tiles of 64 and of 32 places.
    """
    form, group, T, X, A, width, embed = made
    held, plain = quantised(T, X, A, form, width, embed, group)
    emulated, wanted = Emulated(RANDOM), exact(*plain)
    for emulated.timing in TIMINGS:
        with emulated.running(), mock.patch.object(widened_product, "multiprocessors", lambda: 3):
            found = np.asarray(experts.experts(*held, glu=GLU))
        assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()
    assert len(emulated.compiled) == 2


@functools.cache
def widener(form: str) -> Emulated:
    """Return what compiles a product with widened weights once for all that is broken of it."""
    emulated = Emulated(RANDOM)
    with mock.patch.object(widened_product, "drain", lambda *args: None):
        check_widened(emulated, form)
    return emulated


def check_widened(emulated: Emulated, form: str) -> None:
    """Hold a product of five tiles of 8 rows, of which one is not there, to its definition: two
    thread blocks, the ring wraps, all bytes occur.
    """
    tiles, rows, X, N, K = 5, 8, 3, 128, 768
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tiles * rows, K)).astype(jnp.bfloat16)
    weight = in_form(jnp.asarray(rng.standard_normal((X, N, K)), jnp.bfloat16), form, 2, None)
    expert_I, count = np.array([2, 0, 1, 0, 0], np.int32), 4
    with emulated.running():
        found = widened_product.grouped_product(
            jnp.asarray(x),
            widened_product.Weight(form, weight.values, weight.scales, weight.zeros),
            expert_I=jnp.asarray(expert_I),
            count_1=jnp.asarray([count], jnp.int32),
            rows=rows,
            thread_blocks=2,
        )
    whole = np.asarray(weight.whole(), np.float64)
    wanted = [
        x[i * rows : (i + 1) * rows].astype(np.float64) @ whole[expert_I[i]].T for i in range(count)
    ]
    found, wanted = np.asarray(found), np.concatenate(wanted)
    assert np.isnan(found[count * rows :]).all()  # no row of what is not there is written
    assert np.abs(found[: count * rows] - wanted).max() < 0.01 * np.abs(wanted).max()


def widened_outcome(form: str, change: Callable[[str], str]) -> str:
    """Return how the product fails after a change of its PTX, or "" if it does not."""
    emulated = widener(form)
    (compiled,) = emulated.compiled.values()
    assert change(compiled.ptx) != compiled.ptx
    with mock.patch.object(emulated, "change", change):
        for emulated.timing in (LATE, AHEAD, RANDOM):
            try:
                check_widened(emulated, form)
            except Fault as fault:
                return f"{type(fault).__name__}: {fault}"
            except AssertionError:
                return "wrong"
    return ""


@functools.cache
def reader() -> Emulated:
    """Return what compiles sums of tiles once for all tests of them."""
    return Emulated(RANDOM)


def check_sums() -> None:
    """Hold sums of tiles to their definition: 71 tiles, of which two thread blocks share 57."""
    with reader().running():
        check_tiles(vocab_tiles, 71 * vocab_tiles.TILE, interpret=False)


def test_sums_of_tiles_are_their_definition() -> None:
    for timing in TIMINGS:
        with mock.patch.object(reader(), "timing", timing):
            check_sums()
    (compiled,) = reader().compiled.values()
    assert compiled.launch.grid == (2, 8, 1)


@pytest.mark.parametrize(
    ("left_out", "shows"),
    [
        (r"fence\.proxy\.async\.shared::cta;", "not equal"),
        (r"cp\.async\.bulk\.wait_group\s+0;", "ends while"),
    ],
    ids=["the fence", "the wait"],
)
def test_sums_of_tiles_need_what_they_wait_for(left_out: str, shows: str) -> None:
    check_sums()
    is_broken = {"timing": LATE, "change": replaced(left_out, "")}
    raised = pytest.raises((AssertionError, Fault), match=shows)
    with mock.patch.multiple(reader(), **is_broken), raised:
        check_sums()


# ---- What is broken on purpose ----


@functools.cache
def undrained(name: str) -> Emulated:
    """Return a kernel of LONG without the waits at its end, which the interpreter alone demands."""
    case, own, module = LONG[name]
    emulated = Emulated(RANDOM)
    with mock.patch.object(module, "drain", lambda *args: None):
        check(implementation(emulated), case, **own)
    return emulated


def outcome(name: str, change: Callable[[str], str]) -> str:
    """Return how a kernel of LONG fails after a change of its PTX, or "" if it does not."""
    case, own, _ = LONG[name]
    emulated = undrained(name)
    (compiled,) = emulated.compiled.values()
    assert change(compiled.ptx) != compiled.ptx
    with mock.patch.object(emulated, "change", change):
        for emulated.timing in (LATE, AHEAD, RANDOM, LATE_AGAIN, RANDOM_AGAIN):
            try:
                check(implementation(emulated), case, **own)
            except Fault as fault:
                return f"{type(fault).__name__}: {fault}"
            except AssertionError:
                return "wrong"
    return ""


def replaced(pattern: str, new: str, nth: int | None = None) -> Callable[[str], str]:
    """Return what replaces one match of a pattern in PTX, or all."""

    def change(text: str) -> str:
        matches = [*re.finditer(pattern, text)]
        if nth is not None:
            matches = matches[nth : nth + 1]
        for match in reversed(matches):
            text = text[: match.start()] + match.expand(new) + text[match.end() :]
        return text

    return change


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %r\d+, %r\d+;"
FENCE = r"fence\.proxy\.async\.shared::cta;"
PRODUCTS = r"wgmma\.wait_group\.sync\.aligned 0;"
STORE = r"@%p\d+ cp\.async\.bulk\.tensor\.4d\.global[^;]*;"
ARRIVE = r"mbarrier\.arrive\.release\.cta\.shared::cta\.b64 _, \[%r\d+\], 1;"
SKIPPED = "setp.eq.b32 P1, 0, 0;"
QUESTION = r"bar\.red\.or\.pred (%p\d+), (%r\d+), 128, (%p\d+);"
NOBODY = r"bar.sync \2, 128; setp.ne.b32 \1, 0, 0;"
ITSELF = r"bar.sync \2, 128; and.pred \1, \3, \3;"


def another_constant(pattern: str, nth: int, value: int) -> Callable[[str], str]:
    """Return what gives the register that a match of a pattern names another constant."""

    def change(text: str) -> str:
        register = [*re.finditer(pattern, text)][nth][1]
        return re.sub(rf"(mov\.b32\s+{register}), \d+;", rf"\1, {value};", text)

    return change


def first_rows_again(text: str) -> str:
    """Return PTX whose second half of products with values begins with the rows of the first."""
    products = [*re.finditer(r"m64n8k16[^;]*\}, (%rd\d+), %rd\d+, p", text)]
    first, second = products[0], products[4]
    return text[: second.start(1)] + first[1] + text[second.end(1) :]


# What is broken, and how it has to show; "" is in any way. A number is that of the match.
FAULTS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "results overwritten while they are sent": (
        "decode",
        replaced(r"cp\.async\.bulk\.wait_group\.read\s+0;", ""),
        "wrong",
    ),
    "results not waited for at the end": (
        "decode",
        replaced(r"cp\.async\.bulk\.wait_group\s+0;", ""),
        "ends while",
    ),
    "scores not waited for": ("decode", replaced(PRODUCTS, "", 1), "wgmma still uses"),
    "values not waited for": ("decode", replaced(PRODUCTS, "", 0), "wgmma still uses"),
    "rows of values twice": ("decode", first_rows_again, "wrong"),
    "no fence after weights are stored": ("decode", replaced(FENCE, "", 2), "wrong"),
    "no fence after weights of a new maximum": ("decode_sharp", replaced(FENCE, "", 3), "wrong"),
    "no fence before results are sent": ("decode", replaced(FENCE, "", 0), "wrong"),
    "barriers of half the warps": (
        "decode",
        another_constant(r"mbarrier\.init\S* \[%r\d+\], (%r\d+)", 0, 64),
        "",
    ),
    "bytes that never come": (
        "decode",
        another_constant(r"expect_tx\S* _, \[%r\d+\], (%r\d+)", 1, 264),
        "Deadlock",
    ),
    "more registers than there are": ("prefill", replaced("u32 240;", "u32 248;"), "Deadlock"),
    "a size of results left out": ("prefill", replaced(STORE, "", 2), "wrong"),
    "an arrival left out": ("prefill", replaced(ARRIVE, "", 0), "Deadlock"),
    "values of prefill not waited for": ("prefill", replaced(PRODUCTS, "", 0), "wrong"),
    "scores of prefill not waited for": (
        "prefill",
        replaced(PRODUCTS, "", 1),
        "wgmma still uses",
    ),
    "results of prefill overwritten while they are sent": (
        "prefill",
        replaced(r"cp\.async\.bulk\.wait_group\.read\s+0;", ""),
        "wrong",
    ),
    "no fence after queries are stored": ("prefill", replaced(FENCE, "", 0), "wrong"),
    "8 bits: results overwritten while they are sent": (
        "decode_fp8",
        replaced(r"cp\.async\.bulk\.wait_group\.read\s+0;", ""),
        "wrong",
    ),
    "8 bits: no fence before results are sent": ("decode_fp8", replaced(FENCE, "", 0), "wrong"),
    "8 bits: no fence after weights are stored": ("decode_fp8", replaced(FENCE, "", 1), "wrong"),
    "8 bits: no fence after unseen values are zeroed": (
        "decode_fp8",
        replaced(FENCE, "", 4),
        "wrong",
    ),
    "8 bits: no fence after a tile is widened": ("decode_fp8", replaced(FENCE, "", 3), "wrong"),
    "8 bits: values not waited for": ("decode_fp8", replaced(PRODUCTS, "", 0), "wgmma still uses"),
    "8 bits: a widened tile not told of": ("decode_fp8", replaced(ARRIVE, "", 1), "Deadlock"),
    "8 bits: prefill's values not waited for before its masked tiles": (
        "prefill_fp8",
        replaced(PRODUCTS, "", 0),
        "wrong",
    ),
    "8 bits: no fence after prefill's tile is widened": (
        "prefill_fp8",
        replaced(FENCE, "", 2),
        "wrong",
    ),
    "8 bits: no fence after prefill's unseen values are zeroed": (
        "prefill_fp8",
        replaced(FENCE, "", 3),
        "wrong",
    ),
    "8 bits: more registers than there are": (
        "prefill_fp8",
        replaced(f"u32 {prefill_kernel.COMPUTING_IN_8_BITS};", "u32 240;"),
        "Deadlock",
    ),
    "nobody asks whether the maximum rises": ("decode_sharp", replaced(QUESTION, NOBODY), "wrong"),
    "each warp asks itself alone": ("decode_sharp", replaced(QUESTION, ITSELF), ""),
}


# Waits for mbarriers of each kernel, and those of them that others imply. Waits for values that the
# other warpgroup zeroes: the turns, which are waits too, already put it first. Of the last turn:
# what comes after it the other never reads. In 8 bits nobody waits for zeroed values.
WAITS: dict[str, tuple[int, tuple[int, ...]]] = {
    "decode": (3, ()),
    "prefill": (11, (5, 9)),
    "decode_fp8": (4, ()),
    "prefill_fp8": (11, (8,)),
}


@pytest.mark.parametrize("name", LONG)
def test_waits_at_the_end_are_for_the_interpreter(name: str) -> None:
    """Without them a kernel is as right: the control of what follows."""
    assert outcome(name, lambda text: f"{text}// as it is") == ""


@pytest.mark.parametrize("name", WAITS)
def test_all_waits_are_counted(name: str) -> None:
    (compiled,) = undrained(name).compiled.values()
    assert len(re.findall(WAIT, compiled.ptx)) == WAITS[name][0]


@pytest.mark.parametrize(
    ("name", "nth"), [(name, nth) for name, (count, _) in WAITS.items() for nth in range(count)]
)
def test_every_wait_is_needed(name: str, nth: int) -> None:
    """Skipped one by one, all fail but those that others imply."""
    fails = outcome(name, replaced(WAIT, SKIPPED, nth))
    assert bool(fails) == (nth not in WAITS[name][1])


def without_waits_for_stages(text: str) -> str:
    """Return PTX that waits for copies, first, and never until a stage is free."""
    first, *others = re.finditer(WAIT, text)
    return text[: first.end()] + re.sub(WAIT, SKIPPED, text[first.end() :]) if others else text


# What is broken of a product with widened weights, in which form, and how it has to show.
WIDENED_FAULTS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "products not waited for": ("int8", replaced(PRODUCTS, ""), "wgmma still uses"),
    "a tile that is not waited for": ("int8", replaced(WAIT, SKIPPED, 0), ""),
    "a stage that is not waited for": ("int8", without_waits_for_stages, ""),
    "a stage that is not given back": ("int8", replaced(ARRIVE, "", 0), "Deadlock"),
    "bytes that never come": (
        "int8",
        another_constant(r"expect_tx\S* _, \[%r\d+\], (%r\d+)", 0, 264),
        "Deadlock",
    ),
    "more registers than there are": ("int8", replaced("u32 240;", "u32 248;"), "Deadlock"),
    "low halves of bytes in place of high ones": (
        "int4",
        replaced(r"shr\.u32 bytes\S*, bytes\S*, 4;", ""),
        "wrong",
    ),
    "high halves without their sign": (
        "mxfp4",
        replaced(r"and\.b32 (sign\w*), (bytes\w*), 0x80008000;", r"mov.b32 \1, 0;"),
        "wrong",
    ),
}


@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4"])
def test_a_widened_product_as_it_is(form: str) -> None:
    """The control of what follows: without the waits at its end. LLVM unrolls the six steps of the
    copying warpgroup.
    """
    assert widened_outcome(form, lambda text: f"{text}// as it is") == ""
    (compiled,) = widener(form).compiled.values()
    assert len(re.findall(WAIT, compiled.ptx)) == 1 + 6


@pytest.mark.parametrize("fault", WIDENED_FAULTS)
def test_a_fault_of_a_widened_product_is_seen(fault: str) -> None:
    form, change, shows = WIDENED_FAULTS[fault]
    said = widened_outcome(form, change)
    assert said and shows in said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    name, change, shows = FAULTS[fault]
    said = outcome(name, change)
    assert said and shows in said


# ---- Heads written before attention ----

HEADS = heads.ON_HOPPER[:5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_heads_are_written_as_layers_define(case: heads.Case, dtype: str) -> None:
    emulated = Emulated(RANDOM)
    for emulated.timing in TIMINGS:
        check_heads(emulated, case, dtype)


def check_heads(emulated: Emulated, case: heads.Case, dtype: str = "bfloat16") -> None:
    def write(*args: Any, **options: Any) -> Any:
        with emulated.running():
            return head_write.write_heads(*args, **options | {"interpret": False})

    heads.check(SimpleNamespace(write_heads=write, HeadNorm=HeadNorm), case, dtype)


@functools.cache
def writer() -> Emulated:
    """Return what compiles one writing of heads for all that is broken of it."""
    emulated = Emulated(RANDOM)
    check_heads(emulated, BROKEN_HEADS)
    return emulated


BROKEN_HEADS = dataclasses.replace(HEADS[0], name="broken", G=1, T=9)


@pytest.mark.parametrize(
    ("change", "shows"),
    [
        (replaced(FENCE, ""), "Not equal"),
        (replaced(r"cp\.async\.bulk\.wait_group\s+0;", ""), "ends while"),
        (replaced(WAIT, SKIPPED), "ends while"),
    ],
    ids=["the fence", "the wait at the end", "the wait for what is read"],
)
def test_writing_heads_needs_what_it_waits_for(change: Callable[[str], str], shows: str) -> None:
    raised = pytest.raises((AssertionError, Fault), match=shows)
    with mock.patch.multiple(writer(), timing=LATE, change=change), raised:
        check_heads(writer(), BROKEN_HEADS)
