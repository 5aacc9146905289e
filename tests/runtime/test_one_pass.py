"""The kernel that sums over the vocabulary in one reading of the logits, interpreted: against its
definition, in the draw and in logprobs of given tokens, and lowered for CUDA.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.runtime.choices import choose_one_pass
from jpaged.runtime.logprobs import PROCESSED, RAW, SUM_TILE, TEMPERED, OnePass, token_logprobs
from jpaged.runtime.sampler import Sampled, sample
from kernels_pallas import vocab_tiles
from tests.kernels import aot_cuda
from tests.kernels.bounds import again, watch
from tests.runtime.test_sampler import controls, full_controls

NEG_INF = float("-inf")
KERNEL = OnePass(interpret=True)
ROWS = 8
run = jax.jit(sample, static_argnames=("max_logprobs", "filters", "one_pass"))


def some_logits(vocab: int) -> np.ndarray:
    logits = 3 * np.random.default_rng(vocab).normal(size=(ROWS, vocab)).astype(np.float32)
    logits[:, 3] = logits[2, : SUM_TILE + 5] = NEG_INF  # a tile of nothing else
    return logits


def check(module: Any, vocab: int) -> None:
    logits = some_logits(vocab)
    tau = np.linspace(0.3, 2, ROWS).astype(np.float32)
    floor = np.where(np.arange(ROWS) % 2, NEG_INF, np.median(logits, axis=1)).astype(np.float32)
    how = {"tile": SUM_TILE, "interpret": True}
    got = module.read_tiles(jnp.asarray(logits), jnp.asarray(tau), jnp.asarray(floor), **how)
    tiles = -(-vocab // SUM_TILE)
    wide = np.full((ROWS, tiles * SUM_TILE), NEG_INF)
    wide[:, :vocab] = logits
    z = wide.reshape(ROWS, tiles, SUM_TILE)
    most = z.max(axis=2)
    below = z - np.where(np.isneginf(most), 0, most)[:, :, None]
    kept = np.exp(below / tau[:, None, None]) * (z >= floor[:, None, None])
    np.testing.assert_array_equal(got[0], most)
    np.testing.assert_allclose(got[1], kept.sum(axis=2), rtol=1e-6)
    np.testing.assert_allclose(got[2], np.exp(below).sum(axis=2), rtol=1e-6)


@pytest.mark.parametrize("vocab", [300, 17 * SUM_TILE, 20 * SUM_TILE + 1])
def test_it_is_the_definition(vocab: int) -> None:
    """Of a short last tile, of one program of tiles and of two."""
    check(vocab_tiles, vocab)


MUTATIONS = {
    "the tile": ("at_N[:, None] * tile", "at_N[:, None] * 64"),
    "the floor": ("(floor, below_NC / tau)", '(float("-inf"), below_NC / tau)'),
    "the temperature": ("below_NC / tau)", "below_NC)"),
    "the row": ("tau_ref[row]", "tau_ref[0]"),
    "tiles of nothing": ('jnp.where(max_N == float("-inf"), jnp.float32(0), max_N)', "max_N"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        check(again(vocab_tiles, *MUTATIONS[name]), 300)


MASKS = {
    "none": ("", ""),
    "logits": ("real_NC = at_NC < z_ref.shape[1]", "real_NC = at_NC >= 0"),
    "tiles": ("real_N = at_N < max_ref.shape[1]", "real_N = at_N >= 0"),
}


@pytest.mark.parametrize("name", MASKS)
def test_it_touches_nothing_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a mask is left out."""
    module = again(vocab_tiles, *MASKS[name])
    seen = watch(monkeypatch, module)
    one_S = jnp.ones(ROWS)
    module.read_tiles(jnp.asarray(some_logits(300)), one_S, one_S, tile=SUM_TILE, interpret=True)
    jax.effects_barrier()
    assert seen and any(seen) == (name != "none")


def draws(vocab: int, one_pass: OnePass | None, **how: Any) -> Sampled:
    i = np.arange(ROWS)
    settings = {"temperature": np.where(i % 4 == 3, 0, 0.4 + 0.2 * i), "logprobs_mode": i % 3}
    settings |= how.pop("settings", {})
    given = controls(ROWS, 5, **settings)
    return run(jnp.asarray(some_logits(vocab)), given, one_pass=one_pass, **how)


FILTERS = {"top_k": np.arange(ROWS) % 3 * 7, "top_p": np.where(np.arange(ROWS) % 2, 0.8, 1)}


@pytest.mark.parametrize(
    "how",
    [{"filters": False}, {"settings": FILTERS}, {"settings": FILTERS | {"min_p": 0.02}}],
    ids=["plain", "filtered", "min_p"],
)
def test_draws_are_those_without_it(how: dict[str, Any]) -> None:
    """Tokens, and logprobs in each mode but for rounding."""
    got, want = (draws(1003, kernel, **how) for kernel in (KERNEL, None))
    np.testing.assert_array_equal(got.token_S, want.token_S)
    np.testing.assert_allclose(got.logprob_S, want.logprob_S, atol=3e-6)


def test_a_row_has_the_same_bits_in_every_step() -> None:
    """Plain rows beside such as are filtered or penalised, whatever their logprobs are of."""
    plain = draws(1003, KERNEL, filters=False)
    half = np.arange(ROWS) % 2 == 1
    filtered = draws(1003, KERNEL, settings={"top_k": np.where(half, 0, 5)})
    full = full_controls(ROWS, 1003, np.flatnonzero(~half), bias={5: 30.0})
    penalised = draws(1003, KERNEL, full=full, max_logprobs=4)
    for other in (filtered, penalised):
        np.testing.assert_array_equal(other.token_S[half], plain.token_S[half])
        np.testing.assert_array_equal(other.logprob_S[half], plain.logprob_S[half])
        assert not np.array_equal(other.logprob_S, plain.logprob_S)


@pytest.mark.parametrize("mode", [RAW, TEMPERED, PROCESSED])
def test_given_tokens_have_the_bits_of_drawn_ones(mode: int) -> None:
    """So that a score is what a rollout says."""
    mode_T, tau_T = jnp.full(ROWS, mode, jnp.int32), jnp.full(ROWS, 0.7, jnp.float32)
    settings = {"temperature": 0.7, "logprobs_mode": mode}
    drawn = draws(700, KERNEL, filters=False, settings=settings)
    score = jax.jit(functools.partial(token_logprobs, lambda x: x, one_pass=KERNEL, tile=ROWS))
    scored = score(jnp.asarray(some_logits(700)), drawn.token_S, tau_T, mode_T)
    np.testing.assert_array_equal(scored.logprob_T, drawn.logprob_S)


def test_hopeless_rows_leave_the_others_alone() -> None:
    logits = some_logits(300)
    alone = run(jnp.asarray(logits), controls(ROWS, 1), filters=False, one_pass=KERNEL)
    logits[0], logits[1] = NEG_INF, np.nan
    out = run(jnp.asarray(logits), controls(ROWS, 1), filters=False, one_pass=KERNEL)
    assert np.all((np.asarray(out.token_S) >= 0) & (np.asarray(out.token_S) < 300))
    assert np.all(np.isnan(out.logprob_S[:2]))
    np.testing.assert_array_equal(out.token_S[2:], alone.token_S[2:])
    np.testing.assert_array_equal(out.logprob_S[2:], alone.logprob_S[2:])


def test_where_it_is_taken() -> None:
    cpu = jax.devices()[0]

    def choice(attention: Any, vocab: int = 1000) -> OnePass | None:
        config = EngineConfig(attention=attention, seq_buckets=(8,))
        return choose_one_pass(config, vocab, cpu)

    assert choice("triton") == KERNEL and choice("auto") is None and choice("xla") is None
    assert choice("triton", 2**28) is None
    with pytest.raises(AssertionError):
        vocab_tiles.read_tiles(
            *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 2**28), (8,), (8,))), tile=128
        )


def lowered(*, filters: bool) -> str:
    """A draw for CUDA."""
    logits_SV = jax.ShapeDtypeStruct((256, 151_936), jnp.float32)
    draw = functools.partial(sample, filters=filters, one_pass=OnePass())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        return aot_cuda.lower(draw, logits_SV, controls(256))


def test_it_lowers_for_cuda() -> None:
    """A plain draw is the kernel and little else; a filtered one looks for thresholds besides."""
    plain, filtered = lowered(filters=False), lowered(filters=True)
    assert "read_tiles" in plain
    assert plain.count("tensor<256x151936xf32>") < filtered.count("tensor<256x151936xf32>")
