"""Prompts through layers with a state by a kernel each: interpreted beside the definition, in
float64, with what must fail; and what is multiplied, as tensor cores multiply it.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import state_kernels, token_chunks
from kernels_pallas.gated_delta import triton as delta_step
from kernels_pallas.gated_delta import triton_prefill as delta
from kernels_pallas.gated_delta import xla as delta_xla
from kernels_pallas.mamba2 import triton as mamba2_step
from kernels_pallas.mamba2 import triton_prefill as mamba2
from kernels_pallas.mamba2 import xla as mamba2_xla
from tests.kernels import aot_cuda, test_gated_delta, test_mamba2
from tests.kernels.bounds import again, over, watch

RULES = ("by head", "by channel", "Mamba-2")
EACH = pytest.mark.parametrize("rule", RULES)
KERNEL = {"by head": delta, "by channel": delta, "Mamba-2": mamba2}
# Rows of several chunks, cut and whole, one that begins within a chunk, an empty one, padding.
LENGTHS, STARTS, PADDING = [37, 0, 1, 30], [0, 5, 191, 70], 19
SOME_KEPT = np.asarray([0, 1, 7, test_gated_delta.SLOTS], np.int32)  # slots that are written


@functools.cache
def case_of(rule: str, padding: int = PADDING) -> Any:
    """A case in which row 1 is empty and the third row writes the slot that it reads."""
    if rule == "Mamba-2":
        return test_mamba2.make(LENGTHS, STARTS, padding=padding)
    channels = test_gated_delta.DK if rule == "by channel" else 1
    return test_gated_delta.make(LENGTHS, STARTS, padding=padding, channels=channels)


def check(rule: str, module: Any, padding: int = PADDING, write_S: Any = None) -> None:
    """Prompts are the definition's. write_S: slots that are written in place of the case's."""
    case = case_of(rule, padding)
    if write_S is not None:
        case = case._replace(rows=case.rows._replace(write_S=write_S))
    test = test_mamba2 if rule == "Mamba-2" else test_gated_delta
    run = jax.jit(lambda *args: module.prefill(*args))  # traced anew
    test.check(case, *run(*map(jnp.asarray, case.tokens), case.pool, case.rows))


@EACH
def test_prompts_are_the_definition(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces of a key; and with a row whose state is not kept."""
    monkeypatch.setattr(KERNEL[rule], "WIDTH", 8)
    check(rule, KERNEL[rule], write_S=SOME_KEPT)


def test_steps_and_prompts_are_of_one_module() -> None:
    assert delta_step.prefill is delta.prefill and mamba2_step.prefill is mamba2.prefill


# What both kernels share says, and a mistake in its place.
CHUNK_MISTAKES = {
    "padding keeps what lies there": ("lax.fori_loop(0, turns,", "lax.fori_loop(0, 0,"),
    "padding of one row alone": ("n * rows * chunk", "n * chunk + row"),
}
# What both say.
SHARED = {
    "chunks have what is not the row's": ("mask=real_C, other", "mask=real_C | True, other"),
    "the last chunk is left out": ("span.chunks(CHUNK)", "span.chunks(CHUNK) - 1"),
    "all chunks are the first": ("span.tokens(n, CHUNK)", "span.tokens(0 * n, CHUNK)"),
}
DELTA = {
    "all columns are those of the first program": ("part * columns + jnp", "jnp"),
    "value heads take key heads by turns": ("lax.div(head, Hv // Hk)", "lax.rem(head, Hk)"),
    "tokens do not see each other's changes": ("_inverse(beta_C1", "_inverse(0 * beta_C1"),
    "blocks of one size alone are put together": ("lax.rem(of_i, 2) == 1) &", "of_i == 1) &"),
    "pairs of tokens do not see each other": ("- corner(1)", "- 0 * corner(1)"),
}
BY_HEAD = {
    "the state does not decay": ("total = by_head.total", "total = 0 * by_head.total"),
    "changes do not decay up to the chunk's end": ("(by_head.until)", "(0 * by_head.until)"),
    "what comes of the state does not decay": ("(by_head.since)", "(0 * by_head.since)"),
    "tokens do not forget each other": ("left, grown = between(by_head)", "left, grown = 1.0"),
}
BY_CHANNEL = {
    "the state does not decay": ("jnp.sum(g, axis=0)\n", "0 * jnp.sum(g, axis=0)\n"),
    "blocks end with their first half": ("j <= i, j > i)\n", "j <= i, j >= i)\n"),
    "a token does not see itself": (
        "by_query + jnp.where(i == j",
        "by_query + 0 * jnp.where(i == j",
    ),
}
MAMBA2 = {
    "all rows of a state are those of the first program": ("part * block + jnp", "jnp"),
    "heads take groups by turns": ("lax.div(head, H // G)", "lax.rem(head, G)"),
    "the state does not decay": ("jnp.exp(decays.total)", "jnp.exp(0 * decays.total)"),
    "what comes of the state does not decay": ("jnp.exp(decays.since) *", ""),
}
MISTAKES = [
    *(("Mamba-2", *x) for x in test_gated_delta.SLOT_MISTAKES.items()),
    *(("Mamba-2", *x) for x in CHUNK_MISTAKES.items()),
    *(("by head", *x) for x in (DELTA | BY_HEAD).items()),
    *(("by channel", *x) for x in BY_CHANNEL.items()),
    *(("Mamba-2", *x) for x in (SHARED | MAMBA2).items()),
]


@pytest.mark.parametrize(("rule", "mistake", "lines"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_fails(rule: str, mistake: str, lines: tuple[str, str]) -> None:
    """In a state that is not kept either."""
    if mistake in test_gated_delta.SLOT_MISTAKES:
        module = over(KERNEL[rule], again(state_kernels, *lines))
    elif mistake in CHUNK_MISTAKES:
        module = over(KERNEL[rule], again(token_chunks, *lines))
    else:
        module = again(KERNEL[rule], *lines)
    with pytest.raises(AssertionError):
        check(rule, module, write_S=SOME_KEPT)


def in_11_bits(x: Any) -> Any:
    """x rounded as a tensor core takes it: to the nearest with 10 bits after the first."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(1 << 12)) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def emulated(a: Any, b: Any, *, interpret: bool, products: int = 3) -> Any:
    """The product of PRECISION of token_chunks, or of its first part alone."""
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    a0, b0 = in_11_bits(a), in_11_bits(b)
    if products == 1:
        return exact(a0, b0)
    a1, b1 = in_11_bits(a - a0), in_11_bits(b - b0)
    return exact(a1, b0) + exact(a0, b1) + exact(a0, b0)


@EACH
@pytest.mark.parametrize("products", [3, 1])
def test_three_products_of_11_bits_are_f32(
    rule: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the tolerance of XLA's form, and one product is not."""
    multiply = functools.partial(emulated, products=products)
    monkeypatch.setattr(KERNEL[rule], "product", multiply)
    with contextlib.nullcontext() if products == 3 else pytest.raises(AssertionError):
        check(rule, KERNEL[rule])


@EACH
def test_prompts_touch_nothing_outside(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = again(KERNEL[rule])
    seen = watch(monkeypatch, module, token_chunks, state_kernels)
    check(rule, module, padding=3)
    jax.effects_barrier()
    assert seen and not any(seen)


MASKS = {
    "tokens of a row": ("(real_C[:, None], (token_C", "(True, (token_C"),
    "padding": ("token_C < num_tokens", "token_C >= 0"),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_left_out_touches_what_is_outside(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = again(token_chunks, *MASKS[name])
    module = over(mamba2, part)
    seen = watch(monkeypatch, module, part)
    with contextlib.suppress(AssertionError):  # the outputs may be wrong as well
        check("Mamba-2", module, padding=3)
    jax.effects_barrier()
    assert any(seen)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@EACH
def test_prompts_are_one_kernel_on_cuda(rule: str) -> None:
    """XLA's form has loops, and states of rows as an array of their own."""
    case = case_of(rule)
    args = (*case.tokens, case.pool, case.rows)
    xla = mamba2_xla if rule == "Mamba-2" else delta_xla
    states = f"tensor<{len(LENGTHS)}x{'x'.join(map(str, case.pool.shape[1:]))}xf32>"
    theirs, ours = (aot_cuda.lower(x.prefill, *args) for x in (xla, KERNEL[rule]))
    assert states in theirs and "stablehlo.while" in theirs
    assert ours.count("@__gpu$xla.gpu.triton(") == 1
    assert states not in ours and "stablehlo.while" not in ours
