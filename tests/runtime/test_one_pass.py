"""The kernel that sums over the vocabulary in one reading of the logits, interpreted: against its
definition, in the draw and in logprobs of given tokens, and lowered for CUDA.
"""

import functools
import re
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.runtime.choices import choose_one_pass
from jpaged.runtime.logprobs import PROCESSED, RAW, SUM_TILE, TEMPERED, OnePass, token_logprobs
from jpaged.runtime.sampler import Sampled, sample
from kernels_pallas import row_thresholds
from kernels_pallas.vocab_tiles import IMPLEMENTATIONS, mosaic_gpu, triton
from tests.kernels import aot_cuda
from tests.kernels.bounds import again, watch
from tests.runtime.test_sampler import controls, full_controls

NEG_INF = float("-inf")
TRITON, HOPPER = IMPLEMENTATIONS["triton"], IMPLEMENTATIONS["mosaic_gpu"]
KERNEL, CUDA_KERNEL = OnePass(reader=TRITON, interpret=True), OnePass(reader=TRITON)
ROWS = 8
run = jax.jit(sample, static_argnames=("max_logprobs", "filters", "one_pass"))


def some_logits(vocab: int) -> np.ndarray:
    logits = 3 * np.random.default_rng(vocab).normal(size=(ROWS, vocab)).astype(np.float32)
    logits[:, 3] = logits[2, : SUM_TILE + 5] = NEG_INF  # a tile of nothing else
    return logits


def check(module: Any, vocab: int, **more: Any) -> None:
    logits = some_logits(vocab)
    tau = np.linspace(0.3, 2, ROWS).astype(np.float32)
    floor = np.where(np.arange(ROWS) % 2, NEG_INF, np.median(logits, axis=1)).astype(np.float32)
    all_tau = tau[::-1].copy()
    arrays = map(jnp.asarray, (logits, tau, floor, all_tau))
    got = module.read_tiles(*arrays, tile=SUM_TILE, **({"interpret": True} | more))
    tiles = -(-vocab // SUM_TILE)
    wide = np.full((ROWS, tiles * SUM_TILE), NEG_INF)
    wide[:, :vocab] = logits
    z = wide.reshape(ROWS, tiles, SUM_TILE)
    most = z.max(axis=2)
    below = z - np.where(np.isneginf(most), 0, most)[:, :, None]
    kept = np.exp(below / tau[:, None, None]) * (z >= floor[:, None, None])
    np.testing.assert_array_equal(got[0], most)
    np.testing.assert_allclose(got[1], kept.sum(axis=2), rtol=1e-6)
    of_all = np.exp(below / all_tau[:, None, None]).sum(axis=2)
    np.testing.assert_allclose(got[2], of_all, rtol=1e-6)


@pytest.mark.parametrize("vocab", [300, 17 * SUM_TILE, 20 * SUM_TILE + 1])
def test_it_is_the_definition(vocab: int) -> None:
    """Of a short last tile, of one program of tiles and of two."""
    check(triton, vocab)


def test_it_is_the_definition_on_hopper() -> None:
    """Two thread blocks of a row share tiles; a row of results is not a whole number of copies."""
    check(mosaic_gpu, 71 * SUM_TILE)


MUTATIONS = {
    "the tile": ("at_N[:, None] * tile", "at_N[:, None] * 64"),
    "the floor": ("(floor, below_NC / tau)", '(float("-inf"), below_NC / tau)'),
    "the temperature": ("below_NC / tau)", "below_NC)"),
    "that of all": ("below_NC / all_tau)", "below_NC / tau)"),
    "the row": ("tau_ref[row]", "tau_ref[0]"),
    "tiles of nothing": ('jnp.where(max_N == float("-inf"), jnp.float32(0), max_N)', "max_N"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        check(again(triton, *MUTATIONS[name]), 300)


BROKEN_ON_HOPPER = {
    "the last tiles": ("N - TILES)", "N - TILES - 1)"),
    "the floor": ("summed(tau_ref[row], floor_ref[row])", "summed(tau_ref[row], -jnp.inf)"),
    "the temperature": ("(LOG2E / tau)", "LOG2E"),
    "that of all": ("summed(all_tau_ref[row],", "summed(tau_ref[row],"),
    "the row": ("tau_ref[row], floor", "tau_ref[0], floor"),
    "the base": ("(LOG2E / tau)", "(1 / tau)"),
    "tiles of nothing": ('jnp.where(top == float("-inf"), jnp.float32(0), top)', "top"),
}


@pytest.mark.parametrize("name", BROKEN_ON_HOPPER)
def test_a_broken_kernel_of_hopper_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        check(again(mosaic_gpu, *BROKEN_ON_HOPPER[name]), 71 * SUM_TILE)


MASKS = {
    "none": ("", ""),
    "logits": ("real_NC = at_NC < z_ref.shape[1]", "real_NC = at_NC >= 0"),
    "tiles": ("real_N = at_N < max_ref.shape[1]", "real_N = at_N >= 0"),
}


@pytest.mark.parametrize("name", MASKS)
def test_it_touches_nothing_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a mask is left out."""
    module = again(triton, *MASKS[name])
    seen = watch(monkeypatch, module)
    one_S = jnp.ones(ROWS)
    arrays = jnp.asarray(some_logits(300)), one_S, one_S, one_S
    module.read_tiles(*arrays, tile=SUM_TILE, interpret=True)
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
    assert choice("mosaic_gpu") == KERNEL
    assert choice("mosaic_gpu", 128_256) == OnePass(reader=HOPPER, interpret=True)
    with pytest.raises(AssertionError):
        triton.read_tiles(
            *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 2**28), *[(8,)] * 3)), tile=128
        )


def test_cards_take_their_own() -> None:
    """Hopper that of Mosaic, for a vocabulary of whole tiles."""
    config = EngineConfig(seq_buckets=(256,))
    for capability, vocab, reader in (
        ("9.0", 151_936, HOPPER),
        ("9.0", 50_257, TRITON),
        ("9.0", 63 * 128, TRITON),
        ("8.0", 151_936, TRITON),
        ("12.0", 151_936, TRITON),
    ):
        card = SimpleNamespace(platform="gpu", compute_capability=capability)
        assert choose_one_pass(config, vocab, card) == OnePass(reader=reader)
    old = SimpleNamespace(platform="gpu", compute_capability="7.5")
    assert choose_one_pass(config, 151_936, old) is None


def lowered(*, filters: bool, one_pass: OnePass | None = CUDA_KERNEL) -> str:
    """A draw for CUDA."""
    logits_SV = jax.ShapeDtypeStruct((256, 151_936), jnp.float32)
    draw = functools.partial(sample, filters=filters, one_pass=one_pass)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        return aot_cuda.lower(draw, logits_SV, controls(256))


def test_it_lowers_for_cuda() -> None:
    """A plain draw is the kernel and little else; a filtered one looks for thresholds besides, by
    kernels without a loop or a branch of XLA, at which a GPU would wait for the host.
    """
    plain, filtered = lowered(filters=False), lowered(filters=True)
    assert "read_tiles" in plain and "row_thresholds" in filtered
    assert plain.count("tensor<256x151936xf32>") < filtered.count("tensor<256x151936xf32>")
    turns = re.compile(r"stablehlo\.(?:while|case|if)\b")
    assert not turns.search(plain) and not turns.search(filtered)
    assert turns.search(lowered(filters=True, one_pass=None))


# Thresholds by kernels: what rows keep that their candidates do not settle.


def rows_of(vocab: int) -> np.ndarray:
    """Logits of which few and many are near the largest, and many are equal."""
    logits = some_logits(vocab)
    logits[4] /= 30  # hardly any differs from the others
    logits[5] = np.round(logits[5])
    logits[6] = 1.5
    return logits


def check_thresholds(module: Any, vocab: int) -> None:
    """Against the definition in float64; only sums decide, so they are kept away from ties."""
    logits = rows_of(vocab)
    tau = np.linspace(0.7, 2, ROWS).astype(np.float32)
    top = np.where(np.isfinite(logits), logits, NEG_INF).max(axis=1)
    floor = np.where(np.arange(ROWS) == 3, np.median(logits, axis=1), NEG_INF).astype(np.float32)
    top_k = np.array([0, 100, 70, 0, 200, 90, 0, 5], np.int32)
    top_p = np.array([0.9, 1, 0.95, 0.8, 0.7, 0.95, 0.5, 1], np.float32)
    settled = np.arange(ROWS) == 7
    args = map(jnp.asarray, (logits, top, tau, floor, top_k, top_p, settled))
    kept, sums = map(np.asarray, module.row_thresholds(*args, tile=SUM_TILE, interpret=True))
    for row in range(ROWS - 1):
        z = np.sort(logits[row].astype(np.float64))[::-1]
        least = max(float(floor[row]), z[top_k[row] - 1] if top_k[row] else NEG_INF)
        weight = np.exp((z - top[row]) / tau[row]) * (z >= least)
        if top_p[row] < 1:
            at = np.searchsorted(np.cumsum(weight), top_p[row] * weight.sum())
            least = max(least, z[at])
        assert kept[row] == np.float32(least), row
        wide = np.full(sums.shape[1] * SUM_TILE, NEG_INF)
        wide[:vocab] = logits[row]
        weight = np.exp((wide - top[row]) / tau[row]) * (wide >= least)
        np.testing.assert_allclose(sums[row], weight.reshape(-1, SUM_TILE).sum(axis=1), rtol=1e-5)


BROKEN = {
    "": ("", ""),
    "top_k": ("top_k > 0)", "top_k > 1000)"),
    "top_p": ("top_p < 1)", "top_p < 0)"),
    "equals": ("z_NC >= found", "z_NC > found"),
    "halvings": ("HALVINGS = 32", "HALVINGS = 31"),
    "the mass": ("summed(floor, False)", "summed(floor_ref[row], False)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_are_searched(name: str) -> None:
    """Over a short last tile; and a broken search is noticed."""
    if not name:
        check_thresholds(row_thresholds, 1003)
        return
    with pytest.raises(AssertionError):
        check_thresholds(again(row_thresholds, *BROKEN[name]), 1003)


WIDE = {
    "temperature": np.linspace(0.7, 2, ROWS),
    "top_k": np.array([20, 100, 0, 64, 65, 90, 0, 7]),
    "top_p": np.array([0.95, 1, 0.95, 0.8, 0.7, 0.95, 0.5, 1]),
    "logprobs_mode": np.arange(ROWS) % 3,
}


def test_rows_beyond_their_candidates() -> None:
    """Tokens are those of XLA's loops, logprobs but for rounding, and a row's bits its own: in
    other company, where others are searched and where none is.
    """
    logits = rows_of(1003)
    arrays = jnp.asarray(logits), controls(ROWS, 5, **WIDE)
    by_kernels, by_loops = (run(*arrays, one_pass=kernel) for kernel in (KERNEL, None))
    np.testing.assert_array_equal(by_kernels.token_S, by_loops.token_S)
    np.testing.assert_allclose(by_kernels.logprob_S, by_loops.logprob_S, atol=1e-5)
    logits[1::2], logits[6] = np.nan, NEG_INF
    alone = run(jnp.asarray(logits), arrays[1], one_pass=KERNEL)
    same = np.array([0, 2, 4])
    np.testing.assert_array_equal(alone.token_S[same], by_kernels.token_S[same])
    np.testing.assert_array_equal(alone.logprob_S[same], by_kernels.logprob_S[same])
    assert np.all((np.asarray(alone.token_S) >= 0) & (np.asarray(alone.token_S) < 1003))
    assert np.all(np.isnan(alone.logprob_S[1::2]))
