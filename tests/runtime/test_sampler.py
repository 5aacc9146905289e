"""Sampling against a plain numpy definition in float64, a Gumbel-max reference, and itself in other
batches.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jpaged.engine.layout import CONTROLS
from jpaged.runtime import sampler, sampler_reference
from jpaged.runtime.logprobs import PROCESSED, RAW, SUM_TILE, TEMPERED, tile_sums, weights
from jpaged.runtime.sampler import Controls, FullControls, Sampled, sample
from jpaged.runtime.thresholds import thresholds
from jpaged.runtime.vocabulary import WHOLE

NEG_INF = float("-inf")
INTS = {"top_k", "sample_index", "position", "logprobs_mode"}
type Settings = dict[str, Any]

OFF: Settings = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "sample_index": 0,
    "logprobs_mode": RAW,
}

run = jax.jit(sample, static_argnames="max_logprobs")


def controls(rows: int, key: int = 0, **settings: Any) -> Controls:
    """Each setting a number or one a row; every row has its own position, all the same key."""
    values = OFF | {"position": np.arange(rows)} | settings
    arrays = {
        f"{n}_S": jnp.asarray(np.full(rows, v, np.int32 if n in INTS else np.float32))
        for n, v in values.items()
    }
    key_2 = jax.random.key_data(jax.random.key(key, impl="threefry2x32"))
    return Controls(**arrays, key_S2=jnp.broadcast_to(key_2, (rows, 2)))


def full_controls(rows: int, vocab: int, only: Any = slice(None), **settings: Any) -> FullControls:
    """What is given for the rows `only`, off elsewhere; `bias` is {id: value}, `ban` a list,
    `counts` [V].
    """
    scalars = {
        n: np.full(rows, off, np.float32)
        for n, off in (("presence", 0), ("frequency", 0), ("repetition", 1))
    }
    counts_SV = np.zeros((rows, vocab), np.int32)
    ids_SB, values_SB = np.full((rows, 4), vocab, np.int32), np.zeros((rows, 4), np.float32)
    bans_SX, masks_S = np.full((rows, 3), vocab + 7, np.int32), np.zeros(rows, np.int32)
    for name, value in settings.items():
        if name == "bias":
            ids_SB[only, : len(value)], values_SB[only, : len(value)] = (
                list(value),
                list(value.values()),
            )
        elif name == "ban":
            bans_SX[only, : len(value)] = value
        elif name == "counts":
            counts_SV[only] = value
        elif name == "sampling_mask":
            masks_S[only] = value
        else:
            scalars[name][only] = value
    return FullControls(
        **{f"{n}_S": jnp.asarray(v) for n, v in scalars.items()},
        bias_ids_SB=jnp.asarray(ids_SB),
        bias_SB=jnp.asarray(values_SB),
        ban_ids_SX=jnp.asarray(bans_SX),
        counts_SV=jnp.asarray(counts_SV),
        sampling_mask_S=jnp.asarray(masks_S),
    )


def reference(logits: np.ndarray, **settings: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row, token by token, in float64: the controlled logits, the kept mask, the probabilities
    drawn from.
    """
    s: Settings = (
        OFF
        | {
            "presence": 0.0,
            "frequency": 0.0,
            "repetition": 1.0,
            "bias": {},
            "ban": [],
            "counts": [],
        }
        | settings
    )
    z = logits.astype(np.float64)
    for token, value in s["bias"].items():
        z[token] += np.float32(value)
    z[s["ban"]] = NEG_INF
    for token, count in enumerate(s["counts"]):
        if count > 0:
            z[token] = z[token] / s["repetition"] if z[token] > 0 else z[token] * s["repetition"]
        z[token] -= s["frequency"] * (count // 2) + (s["presence"] if count >= 2 else 0)
    t = z / (s["temperature"] or 1)
    p = np.exp(t - t.max())
    kept = p >= s["min_p"] * (1 - 1e-6)
    if s["top_k"] > 0:
        kept &= z >= np.sort(z)[-min(s["top_k"], len(z))]
    if s["top_p"] < 1:
        order = np.argsort(-z, kind="stable")
        mass = np.cumsum(np.where(kept, p, 0)[order])
        last = order[np.argmax(mass >= s["top_p"] * mass[-1])]
        kept &= z >= z[last]
    p = np.where(kept, p, 0)
    return z, kept, p / p.sum()


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    """How probable so uneven a count is. Impossible tokens must not occur; rare ones are put
    together.
    """
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token outside the kept set was drawn"
    wanted = expected * len(tokens)
    common = wanted >= 8
    observed, wanted = (np.append(a[common], a[~common].sum()) for a in (counts, wanted))
    used = wanted >= 8
    return float(
        stats.chi2.sf(np.sum((observed - wanted)[used] ** 2 / wanted[used]), used.sum() - 1)
    )


ROWS, VOCAB = 4096, 300  # two whole tiles and a short one
WIDTH = 6  # max_logprobs
COUNTS = np.random.default_rng(5).integers(0, 6, VOCAB)


def a_distribution(seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 2
    logits[[3, 130, 299]] = NEG_INF
    return logits


def many(logits: np.ndarray, calls: int = 8, **settings: Any) -> np.ndarray:
    """Tokens of many draws from one row's logits."""
    extra = {
        n: settings.pop(n)
        for n in ("presence", "frequency", "repetition", "bias", "ban", "counts")
        if n in settings
    }
    full = full_controls(ROWS, VOCAB, **extra) if extra else None
    logits_SV = jnp.broadcast_to(jnp.asarray(logits), (ROWS, VOCAB))
    out = [run(logits_SV, controls(ROWS, call, **settings), full).token_S for call in range(calls)]
    return np.concatenate(out)


DISTRIBUTIONS: dict[str, Settings] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7, "sample_index": 3},
    "top_k": {"top_k": 7},
    "top_k over the candidates": {"top_k": 90, "temperature": 3.0},
    "top_p": {"top_p": 0.8},
    "top_p over the candidates": {"top_p": 0.97, "temperature": 4.0, "sample_index": 2},
    "min_p": {"min_p": 0.05},
    "all thresholds": {"min_p": 0.01, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "penalties": {
        "presence": 0.7,
        "frequency": 0.4,
        "repetition": 1.3,
        "counts": COUNTS,
        "temperature": 0.9,
    },
    "bias": {
        "bias": {5: 3.0, 200: 2.0, 7: -4.0, 3: 5.0},
        "ban": [int(np.argmax(a_distribution()))],
    },
    "bias under penalties": {
        "bias": {5: 3.0, 201: -2.0},
        "repetition": 2.0,
        "presence": -1.0,
        "counts": COUNTS,
        "top_k": 9,
    },
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_distribution(name: str) -> None:
    settings = DISTRIBUTIONS[name]
    tokens = many(a_distribution(), **settings)
    assert chi_square(tokens, reference(a_distribution(), **settings)[2]) > 1e-3


def test_draws_agree_with_gumbel_max() -> None:
    """The reference of the design: argmax of logits + Gumbel noise, over the kept set."""
    settings = {"temperature": 1.2, "top_k": 40}
    z, kept, p = reference(a_distribution(), **settings)
    masked = jnp.asarray(np.where(kept, z / 1.2, NEG_INF), jnp.float32)
    noise = jax.random.gumbel(jax.random.key(9), (8 * ROWS, VOCAB), jnp.float32)
    gumbel = np.asarray(jnp.argmax(masked[None, :] + noise, axis=1))
    ours = many(a_distribution(), **settings)
    assert chi_square(gumbel, p) > 1e-3
    a, b = (np.bincount(tokens, minlength=VOCAB)[p * len(ours) >= 8] for tokens in (ours, gumbel))
    assert stats.chi2.sf(np.sum((a - b) ** 2 / (a + b)), len(a) - 1) > 1e-3


def test_the_distribution_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = many(a_distribution())
    p = reference(a_distribution())[2]
    assert (
        chi_square(tokens, reference(a_distribution(), temperature=1.05)[2]) < 1e-6
    )  # a slightly wrong temperature
    off_by_one = np.where(
        tokens == np.argsort(p)[-5], np.argsort(p)[-6], tokens
    )  # one token never drawn
    assert chi_square(off_by_one, p) < 1e-6
    with pytest.raises(AssertionError, match="outside the kept set"):
        chi_square(many(a_distribution(), top_k=8), reference(a_distribution(), top_k=7)[2])

    # The tiles' noise used again within the tile: every token is possible, none is drawn fairly.
    noise = sampler.gumbels

    def again(c: Controls, count: int) -> jax.Array:
        gumbel = noise(c, count)
        tiles = count - SUM_TILE
        return gumbel.at[:, :tiles].set(gumbel[:, SUM_TILE:])

    monkeypatch.setattr(sampler, "gumbels", again)
    mutant = jax.jit(lambda z, c: sample(z, c).token_S)
    logits_SV = jnp.broadcast_to(jnp.asarray(a_distribution()), (ROWS, VOCAB))
    drawn = np.concatenate([mutant(logits_SV, controls(ROWS, i)) for i in range(8)])
    assert chi_square(drawn, p) < 1e-6


def test_noise_comes_from_key_index_position_and_place_alone() -> None:
    rows = controls(4, sample_index=[0, 1, 2, 2], position=[5, 5, 5, 6])
    noise = jax.jit(sampler.gumbels, static_argnums=1)
    few, many_places = (np.asarray(noise(rows, count)) for count in (7, 300))
    np.testing.assert_array_equal(few, many_places[:, :7])
    key = jax.random.key(0, impl="threefry2x32")
    for row, (index, position) in zip(few, [(0, 5), (1, 5), (2, 5), (2, 6)], strict=True):
        own = jax.random.fold_in(jax.random.fold_in(key, index), position)
        words = np.array([jax.random.key_data(jax.random.fold_in(own, i)) for i in range(4)])
        u = ((words.reshape(-1)[:7] >> 9) + 0.5) * 2.0**-23
        np.testing.assert_allclose(row, -np.log(-np.log(u)), rtol=1e-5, atol=1e-6)
    assert len({tuple(row) for row in few}) == 4


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocab", [1, 128, VOCAB, 1500])
def test_draws_are_those_of_the_reference(vocab: int, masked: bool) -> None:
    """Token for token, but where two candidates are closer than f32's rounding."""
    rng = np.random.default_rng(vocab)
    rows = 256
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 2
    settings = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7], rows),
        "min_p": rng.choice([0.0, 0.02], rows),
        "top_k": rng.choice([0, 0, 1, 5, 90], rows),
        "top_p": rng.choice([1.0, 0.9, 0.4], rows),
    }
    given = controls(rows, key=3, logprobs_mode=PROCESSED, **settings)
    allowed = rng.random((rows, vocab)) < 0.8
    allowed[:, 0] = True
    bits = np.pad(allowed, ((0, 0), (0, -vocab % 32)))
    words = jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    out = run(jnp.asarray(logits), given, None, words if masked else None)
    tokens = np.asarray(out.token_S)
    tiles = -(-vocab // SUM_TILE)
    noise = np.asarray(sampler.gumbels(given, SUM_TILE + tiles))
    kept = [
        sampler_reference.distribution(
            logits[row],
            allowed[row] if masked else None,
            **{name: value[row].item() for name, value in settings.items()},
        )
        for row in range(rows)
    ]
    wanted = [sampler_reference.draw(*one) for one in zip(kept, noise, strict=True)]
    assert np.mean(tokens != wanted) <= 1 / rows
    logprobs = [sampler_reference.report(*one) for one in zip(kept, tokens, strict=True)]
    np.testing.assert_allclose(out.logprob_S, logprobs, atol=2e-5, rtol=1e-5)
    assert sampler_reference.TILE == SUM_TILE


def inverse_cdf(logits_SV: np.ndarray, uniform_S: np.ndarray) -> np.ndarray:
    """Exact too, but coupled to every token before its own."""
    p = np.exp(logits_SV - logits_SV.max(axis=1, keepdims=True))
    cumulative = np.cumsum(p, axis=1)
    return (cumulative < uniform_S[:, None] * cumulative[:, -1:]).sum(axis=1)


@pytest.mark.parametrize(
    ("vocab", "scale", "noise"), [(4096, 2.0, 0.03), (4096, 4.0, 0.03), (32768, 2.0, 0.03)]
)
def test_rounding_noise_turns_few_draws(vocab: int, scale: float, noise: float) -> None:
    """Noise of bf16's size in logits: at most 3% of draws turn, where inverse CDF turns many."""
    rng = np.random.default_rng(0)
    rows = 1024
    clean = rng.standard_normal((rows, vocab), np.float32) * np.float32(scale)
    noisy = clean + rng.standard_normal((rows, vocab), np.float32) * np.float32(noise)
    given = controls(rows, key=1)
    turned = np.mean(
        np.asarray(run(jnp.asarray(clean), given).token_S)
        != np.asarray(run(jnp.asarray(noisy), given).token_S)
    )
    uniform = rng.random(rows)
    before = np.mean(inverse_cdf(clean, uniform) != inverse_cdf(noisy, uniform))
    print(f"V {vocab}, logits * {scale}: {turned:.3f} of draws turn, by inverse CDF {before:.3f}")
    assert turned <= 0.03 and before > 0.1


# Thresholds: (logits [S, V], settings a row); ties everywhere, as logits are rounded to quarters in
# the odd rows.


def threshold_rows(vocab: int, seed: int) -> tuple[np.ndarray, list[Settings]]:
    rng = np.random.default_rng(seed)
    ks = [1, 2, 7, 63, 64, 65, 100, vocab - 1, vocab, vocab + 5]
    wanted: list[Settings] = [{"top_k": k} for k in ks]
    wanted += [{"nucleus": n} for n in (1, 2, 10, 60, 64, 65, 90, 300, vocab // 2, vocab - 1)]
    wanted += [
        {"top_k": k, "nucleus": n} for k, n in ((30, 5), (64, 64), (200, 80), (200, 10), (5, 400))
    ]
    wanted += [{"min_p": m} for m in (0.5, 0.01, 1.0)]
    wanted += [{"min_p": 0.02, "top_k": k, "nucleus": n} for k, n in ((0, 8), (50, 20), (150, 100))]
    wanted += [{"temperature": 0.0, "top_k": 3, "top_p": 0.5}]
    wanted = wanted * 2  # smooth and full of ties
    logits = rng.normal(size=(len(wanted), vocab)).astype(np.float32) * 1.5
    logits[1::2] = np.round(logits[1::2] * 4) / 4
    logits[rng.random(logits.shape) < 0.02] = NEG_INF
    settings: list[Settings] = []
    for row, want in zip(logits, wanted, strict=True):
        s = {"temperature": float(rng.uniform(0.5, 2.0))} | want
        n = s.pop("nucleus", None)
        if n is not None:  # a top_p halfway between two nuclei, so that rounding cannot decide
            z, _, p = reference(row, **s)
            values, masses = np.unique(z[p > 0]), []
            masses = [p[z >= v].sum() for v in values[::-1]]
            sizes = [(p[z >= v] > 0).sum() for v in values[::-1]]
            i = min(int(np.searchsorted(sizes, n)), len(masses) - 1)
            s["top_p"] = float((masses[i] + (masses[i - 1] if i else 0.0)) / 2)
        settings.append(s)
    return logits, settings


def stacked(settings: list[Settings]) -> Settings:
    names = OFF | {"position": 0}
    return {n: np.array([s.get(n, names[n]) for s in settings]) for n in names if n != "position"}


@jax.jit
def kept_set(z_SV: jax.Array, c: Controls) -> jax.Array:
    greedy_S = c.temperature_S <= 0
    temp_S = jnp.where(greedy_S, jnp.float32(1), c.temperature_S)
    floor_S = thresholds(
        z_SV, jnp.max(z_SV, axis=1), temp_S, greedy_S, c.min_p_S, c.top_p_S, c.top_k_S
    )
    return z_SV >= floor_S[:, None]


@pytest.mark.parametrize("vocab", [40, 1003])
def test_thresholds_keep_what_the_definition_keeps(vocab: int) -> None:
    logits, settings = threshold_rows(vocab, seed=vocab)
    kept = np.asarray(kept_set(jnp.asarray(logits), controls(len(logits), **stacked(settings))))
    sizes = set()
    for row, got, s in zip(logits, kept, settings, strict=True):
        want = reference(row, **s)[1] if s["temperature"] else np.ones_like(got)
        # What is kept at probability 0 is never drawn: top_k may reach it, and -inf ties with -inf.
        np.testing.assert_array_equal(
            got & np.isfinite(row), want & np.isfinite(row), err_msg=str(s)
        )
        sizes.add(int(want.sum()))
    assert vocab < 64 or len([n for n in sizes if 64 < n < vocab]) > 8  # the search was needed


def test_a_threshold_does_not_depend_on_the_path_that_neighbours_force() -> None:
    """The rows alone and all together, bit for bit: easy ones next to ones that need a search, and
    in another order.
    """
    logits, settings = threshold_rows(1003, seed=1)
    mode = {"logprobs_mode": PROCESSED}
    together = run(
        jnp.asarray(logits), controls(len(logits), position=3, **stacked(settings) | mode)
    )
    order = np.random.default_rng(0).permutation(len(logits))
    again = run(
        jnp.asarray(logits[order]),
        controls(len(logits), position=3, **stacked([settings[i] for i in order]) | mode),
    )
    np.testing.assert_array_equal(np.asarray(together.token_S)[order], again.token_S)
    np.testing.assert_array_equal(np.asarray(together.logprob_S)[order], again.logprob_S)
    for i in range(len(logits)):  # among seven rows of padding
        padded = np.zeros((8, 1003), np.float32)
        padded[i % 8] = logits[i]
        rows: list[Settings] = [{"temperature": 0.0}] * 8
        rows[i % 8] = settings[i]
        alone = run(jnp.asarray(padded), controls(8, position=3, **stacked(rows) | mode))
        assert alone.token_S[i % 8] == together.token_S[i], settings[i]
        assert alone.logprob_S[i % 8] == together.logprob_S[i], settings[i]


def test_plain_rows_are_the_same_bits_in_any_batch_and_in_the_full_step() -> None:
    rows, vocab = 24, 1003
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    i = np.arange(rows)
    settings = {
        "temperature": np.where(i % 5 == 0, 0, 0.6 + i * 0.03),
        "top_k": np.where(i % 4 == 1, 50, np.where(i % 8 == 2, 300, 0)),
        "top_p": np.where(i % 3 == 0, 0.9, 1),
        "min_p": np.where(i % 7 == 3, 0.02, 0),
        "logprobs_mode": i % 3,
        "position": i,
    }

    def equal(got: Sampled, want: Sampled, at: np.ndarray) -> None:
        np.testing.assert_array_equal(got.token_S, np.asarray(want.token_S)[at])
        np.testing.assert_array_equal(got.logprob_S, np.asarray(want.logprob_S)[at])

    whole = run(jnp.asarray(logits), controls(rows, **settings))
    for some in (np.array([9]), rng.permutation(rows)[:8]):
        got = run(
            jnp.asarray(logits[some]),
            controls(len(some), **{n: v[some] for n, v in settings.items()}),
        )
        equal(got, whole, some)

    # In the full batch every third row is penalised, banned from and biased; the others are plain.
    extra = {"presence": 1.5, "repetition": 1.2, "counts": 3, "bias": {17: 5.0}, "ban": [18]}
    full = full_controls(rows, vocab, slice(None, None, 3), **extra)
    plain = np.flatnonzero(i % 3)
    in_full = run(jnp.asarray(logits), controls(rows, **settings), full, max_logprobs=WIDTH)
    equal(jax.tree.map(lambda a: a[plain], in_full), whole, plain)
    assert not np.array_equal(in_full.logprob_S, whole.logprob_S)


# The draw at its edges: the least and the largest noise there is, at either level.


@pytest.mark.parametrize("vocab", [1, 40, 700])
def test_edges_of_the_noise_stay_in_the_kept_set(vocab: int) -> None:
    z = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 4
    if vocab > 1:  # nothing at both ends: at 700, whole tiles of nothing
        z[: vocab // 4] = z[-(vocab // 4) :] = NEG_INF
    settings = [
        (NEG_INF, 1.0),
        (float(np.sort(z)[-max(1, vocab // 8)]), 1.0),
        (float(z.max()), 1.0),
        (NEG_INF, 1e-3),
    ]
    u = np.array([0.5, 2**23 - 0.5], np.float64) * 2.0**-23
    ends = (-np.log(-np.log(u))).astype(np.float32)
    places = SUM_TILE + -(-vocab // SUM_TILE)
    patterns = [
        np.where(np.arange(places) % step == first, *order)
        for order in (ends, ends[::-1])
        for step, first in ((1, 0), (2, 0), (2, 1), (places, 0), (places, places - 1))
    ]
    cases = [(floor, t, pattern) for floor, t in settings for pattern in patterns]
    floor_S, temp_S = (jnp.asarray([case[i] for case in cases], jnp.float32) for i in (0, 1))
    gumbel_SX = jnp.asarray(np.stack([case[2] for case in cases]), jnp.float32)

    @jax.jit
    def draw(z_SV: jax.Array) -> jax.Array:
        plain = controls(len(cases), temperature=[case[1] for case in cases])
        kept = sampler.distribution(z_SV, plain, None, None, WHOLE, True, None)
        sums_SN = tile_sums(weights(z_SV, kept.max_S, temp_S, floor_S))
        kept = dataclasses.replace(kept, floor_S=floor_S, sums_SN=sums_SN)
        return sampler.draw(kept, gumbel_SX)[0]

    tokens = np.asarray(draw(jnp.broadcast_to(jnp.asarray(z), (len(cases), vocab))))
    assert tokens.min() >= 0 and tokens.max() < vocab
    assert np.all((z[tokens] >= floor_S) & np.isfinite(z[tokens]))


def test_hopeless_rows_give_a_valid_id_and_leave_the_others_alone() -> None:
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    settings = controls(8, temperature=[1, 0, 1, 0, 1, 0, 1, 0])
    clean = run(jnp.asarray(logits), settings)
    logits[:2], logits[2:4], logits[4:6, 5] = NEG_INF, np.nan, np.nan
    out = run(jnp.asarray(logits), settings)
    assert np.all((np.asarray(out.token_S) >= 0) & (np.asarray(out.token_S) < VOCAB))
    assert np.all(np.isnan(np.asarray(out.logprob_S)[:4]))
    np.testing.assert_array_equal(out.token_S[6:], clean.token_S[6:])
    np.testing.assert_array_equal(out.logprob_S[6:], clean.logprob_S[6:])


def test_greedy_takes_the_lowest_of_equal_ids_whatever_the_thresholds() -> None:
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    ties = [[299], [2, 5], [150, 20, 299], [127, 128], [0, 1], [255, 256], [298, 299], [31, 32]]
    for row, ids in zip(logits, ties, strict=True):
        row[ids] = 9.0
    out = run(jnp.asarray(logits), controls(8, temperature=0, top_k=3, top_p=0.1, min_p=0.9))
    np.testing.assert_array_equal(out.token_S, [min(ids) for ids in ties])


@pytest.mark.parametrize("features", ["filtered", "full", "masked"])
def test_top_k_1_keeps_the_lowest_of_equal_ids_alone(features: str) -> None:
    """As temperature 0 does; its distribution after all controls is that one token."""
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    ties = [[299], [2, 5], [150, 20, 299], [127, 128], [0, 1], [255, 256], [298, 299], [31, 32]]
    for row, ids in zip(logits, ties, strict=True):
        row[ids] = 9.0
    full = full_controls(8, VOCAB) if features == "full" else None
    mask = jnp.full((8, -(-VOCAB // 32)), -1, jnp.int32) if features == "masked" else None
    for call in range(8):
        asked = controls(8, call, top_k=1, temperature=1.3, logprobs_mode=PROCESSED)
        out = run(jnp.asarray(logits), asked, full, mask, max_logprobs=WIDTH if full else 0)
        np.testing.assert_array_equal(out.token_S, [min(ids) for ids in ties])
        np.testing.assert_array_equal(out.logprob_S, np.zeros(8))
        if full is not None:
            assert out.rank_S is not None and out.top_logprobs_SK is not None
            np.testing.assert_array_equal(out.rank_S, np.ones(8))
            np.testing.assert_array_equal(out.top_logprobs_SK, [[0] + [NEG_INF] * (WIDTH - 1)] * 8)
    noise = np.zeros(SUM_TILE + -(-VOCAB // SUM_TILE), np.float32)
    kept = [sampler_reference.distribution(row, top_k=1) for row in logits]
    assert [sampler_reference.draw(each, noise) for each in kept] == list(map(min, ties))
    assert [
        sampler_reference.report(each, min(ids)) for each, ids in zip(kept, ties, strict=True)
    ] == [0] * 8


@pytest.mark.parametrize("repetition", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("bias", [-1e30, 0.0, 1e30])
def test_the_ends_of_biases_and_penalties_stay_finite(bias: float, repetition: float) -> None:
    """Greedy tokens and logprobs are float64's at every corner that `validate` lets through."""
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32) * 4
    counts = COUNTS.copy()
    counts[[5, 7]] = (1, 0)  # of the biased tokens one was seen
    extra = {"bias": {5: bias, 7: bias / 2, 9: -bias / 3}, "repetition": repetition}
    extra |= {"presence": -2.0, "frequency": 2.0, "counts": counts}
    full = full_controls(8, VOCAB, **extra)
    for temperature in (0.0, 1e-30, 1.0, 1e30):
        asked = controls(8, temperature=temperature, logprobs_mode=PROCESSED)
        out = run(jnp.asarray(logits), asked, full, max_logprobs=WIDTH)
        wanted = [reference(row, temperature=temperature, **extra) for row in logits]
        if temperature < 1:
            np.testing.assert_array_equal(out.token_S, [np.argmax(z) for z, _, _ in wanted])
        tokens = np.asarray(out.token_S)
        assert np.isfinite(out.logprob_S).all()
        assert out.top_logprobs_SK is not None and not np.isnan(out.top_logprobs_SK).any()
        if bias == 0 or temperature in (1e-30, 1e30):
            p = [p[token] for (_, _, p), token in zip(wanted, tokens, strict=True)]
            np.testing.assert_allclose(out.logprob_S, np.log(p), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1e-37, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32) * 10
    out = run(jnp.asarray(logits), controls(8, temperature=temperature, logprobs_mode=TEMPERED))
    if temperature < 1:
        np.testing.assert_array_equal(out.token_S, np.argmax(logits, axis=1))
        np.testing.assert_array_equal(out.logprob_S, np.zeros(8))
    else:
        np.testing.assert_allclose(out.logprob_S, -np.log(VOCAB), atol=1e-5)


@pytest.mark.parametrize("plain", [True, False])
def test_logprob_modes(plain: bool) -> None:
    """Against float64; in the full step with penalties, bias, a ban, top lists and ranks."""
    rows, vocab = 24, 1003
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    logits[::2] = np.round(logits[::2] * 2) / 2  # ties in the lists
    i = np.arange(rows)
    settings = {
        "temperature": np.where(i % 4 == 3, 0.0, 0.5 + 0.1 * i),
        "top_k": np.where(i % 5 == 1, 4, 0),
        "top_p": np.where(i % 5 == 2, 0.7, 1),
        "logprobs_mode": i % 3,
    }
    extra: Settings = {}
    if not plain:
        extra = {
            "presence": 0.5,
            "frequency": 0.3,
            "repetition": 1.2,
            "bias": {4: 6.0},
            "ban": [8, 9],
        }
        extra["counts"] = rng.integers(0, 5, vocab)
    full = None if plain else full_controls(rows, vocab, **extra)
    out = run(
        jnp.asarray(logits), controls(rows, **settings), full, max_logprobs=0 if plain else WIDTH
    )
    assert (out.rank_S is None) == plain
    for row in range(rows):
        s = {n: v[row].item() for n, v in settings.items()} | extra
        if s["temperature"] == 0:
            s |= {"top_k": 0, "top_p": 1.0}
        z, _, p = reference(logits[row], **s)
        with np.errstate(divide="ignore"):
            tau = 1.0 if s["logprobs_mode"] == RAW else s["temperature"] or 1.0
            raw = logits[row].astype(np.float64) / tau
            lp = np.log(p) if s["logprobs_mode"] == PROCESSED else raw - np.logaddexp.reduce(raw)
        source = (
            np.where(p > 0, z.astype(np.float32), NEG_INF)
            if s["logprobs_mode"] == PROCESSED
            else logits[row]
        )
        token = int(out.token_S[row])
        assert s["temperature"] > 0 or token == np.argmax(z.astype(np.float32))
        np.testing.assert_allclose(out.logprob_S[row], lp[token], atol=2e-5, rtol=1e-5)
        if (
            out.rank_S is not None
            and out.top_ids_SK is not None
            and out.top_logprobs_SK is not None
        ):
            order = np.argsort(-source, kind="stable")
            assert out.rank_S[row] == 1 + np.flatnonzero(order == token)[0]
            np.testing.assert_array_equal(out.top_ids_SK[row], order[:WIDTH])
            np.testing.assert_allclose(
                out.top_logprobs_SK[row], lp[order[:WIDTH]], atol=2e-5, rtol=1e-5
            )


def test_bans_biases_and_penalties_decide_greedy_rows() -> None:
    rows, vocab = 24, 1003
    logits = np.zeros((rows, vocab), np.float32)
    logits[:, 7], logits[:, 9] = 5.0, 4.0
    seen = np.zeros(vocab, np.int32)
    seen[7] = 1  # in the prompt alone: repetition applies, presence and frequency do not

    def greedy(**settings: Any) -> set[int]:
        full = full_controls(rows, vocab, **settings)
        out = run(jnp.asarray(logits), controls(rows, temperature=0), full, max_logprobs=WIDTH)
        return set(np.asarray(out.token_S).tolist())

    assert greedy() == {7}
    assert greedy(ban=[7]) == {9}
    assert greedy(bias={vocab - 1: 6.0}) == {vocab - 1}
    assert greedy(bias={7: 2.0}, ban=[7]) == {9}
    assert greedy(counts=seen, presence=3.0, frequency=3.0) == {7}
    assert greedy(counts=seen, repetition=1.5) == {9}
    assert greedy(counts=seen * 2, presence=1.5) == {9}
    assert greedy(counts=seen * 6, frequency=0.4) == {9}


def test_the_lists_are_as_wide_as_asked() -> None:
    for width in (0, 3):
        out = jax.eval_shape(
            lambda z, c, f, k=width: sample(z, c, f, max_logprobs=k), *shapes(8, 300)
        )
        assert out.rank_S.shape == (8,) and out.top_ids_SK.shape == out.top_logprobs_SK.shape == (
            8,
            width,
        )
        assert (out.token_S.dtype, out.logprob_S.dtype, out.rank_S.dtype) == (
            jnp.int32,
            jnp.float32,
            jnp.int32,
        )


def shapes(rows: int, vocab: int) -> tuple[jax.Array, Controls, FullControls]:
    return jnp.zeros((rows, vocab), jnp.float32), controls(rows), full_controls(rows, vocab)


@pytest.mark.parametrize("mode", [RAW, TEMPERED])
def test_raw_logprobs_of_what_a_mask_allows(mode: int) -> None:
    """However far the raw logits are above all that it allows; and a row's bits are its own."""
    vocab, rng = 1003, np.random.default_rng(3)
    above = np.array([0.0, 30.0, 85.0, 100.0, 400.0, 400.0])
    z = rng.standard_normal((len(above), vocab)).astype(np.float32)
    z[:, 7] += above.astype(np.float32)  # which is forbidden
    allowed = np.zeros((len(above), 1024), bool)
    allowed[:, 40:90] = True
    allowed[-1, 7] = True  # but here
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    settings = {"temperature": 0.7, "logprobs_mode": mode}

    def drawn(rows: Any) -> Sampled:
        each = controls(len(above), **settings)
        each = jax.tree.map(lambda a: a[rows], each)
        return jax.jit(sample)(jnp.asarray(z[rows]), each, None, jnp.asarray(words[rows]))

    found = drawn(slice(None))
    tau = 1.0 if mode == RAW else 0.7
    scaled = z.astype(np.float64) / tau
    exact = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    tokens = np.asarray(found.token_S)
    assert allowed[np.arange(len(above)), tokens].all() and tokens[-1] == 7
    expected = exact[np.arange(len(above)), tokens]
    np.testing.assert_allclose(found.logprob_S, expected, rtol=2e-6, atol=2e-5)
    mass = np.logaddexp.reduce(np.where(allowed[:, :vocab], exact, NEG_INF), axis=1)
    mass = mass if mode == TEMPERED else np.zeros(len(above))
    reached = mass > -80  # as far as float32's exponentials of these go
    assert found.allowed_logprob_S is not None and reached.sum() >= 3
    np.testing.assert_allclose(
        np.asarray(found.allowed_logprob_S)[reached], mass[reached], rtol=2e-6, atol=2e-5
    )
    for row in range(len(above)):
        alone = drawn(slice(row, row + 1))
        assert np.array_equal(alone.token_S, found.token_S[row : row + 1])
        assert np.array_equal(alone.logprob_S, found.logprob_S[row : row + 1])


@pytest.mark.parametrize("temperature", [1.0, [1.0, 0.7]], ids=["one", "several"])
@pytest.mark.parametrize("mode", [RAW, PROCESSED, [RAW, TEMPERED, PROCESSED]])
def test_a_mask_alone_takes_fewer_passes_to_the_same_bits(temperature: Any, mode: Any) -> None:
    """As the step whose rows may have filters too, which stores what the mask allows, and as the
    one with penalties for other rows.
    """
    rows, vocab, rng = 12, 1003, np.random.default_rng(4)
    z = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    z[1, ::2], z[2, 5], z[3, 7] = -np.inf, np.nan, 400.0
    allowed = rng.random((rows, 1024)) < 0.2
    allowed[3, 7], allowed[4], allowed[5], allowed[6] = False, True, False, False
    allowed[6, vocab - 1] = True
    words = jnp.asarray(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    of_rows: dict[str, Any] = {"temperature": np.resize(temperature, rows)}
    of_rows["logprobs_mode"] = np.resize(mode, rows)
    of_rows["temperature"][7] = 0.0
    each = controls(rows, **of_rows)
    fewer, more = (
        jax.jit(functools.partial(sample, filters=filters))(jnp.asarray(z), each, None, words)
        for filters in (False, True)
    )
    some = np.arange(rows) != 5
    others = some & (np.arange(rows) > 0)
    penalties = full_controls(rows, vocab, slice(0, 1), presence=1.0, counts=2)
    full = run(jnp.asarray(z), each, penalties, words, max_logprobs=WIDTH)
    for name in ("token_S", "logprob_S", "allowed_logprob_S"):
        np.testing.assert_array_equal(getattr(fewer, name), getattr(more, name))
        np.testing.assert_array_equal(getattr(full, name)[others], getattr(more, name)[others])
    drawn = np.asarray(fewer.token_S)
    assert allowed[np.arange(rows), drawn][some].all()


def test_every_control_of_the_table_reaches_the_draw() -> None:
    """By its name: a line of the table without a field here, or a field without a line, fails."""
    columns = {c.name for c in CONTROLS} - {"key_hi", "key_lo"}
    fields = [f.name for kind in (Controls, FullControls) for f in dataclasses.fields(kind)]
    of_rows = {name.removesuffix("_S") for name in fields if name.endswith("_S")}
    assert columns == of_rows - {"position"}
    zero = {c.name: jnp.zeros(2, c.dtype) + i for i, c in enumerate(CONTROLS)}
    made = vars(sampler.named(Controls, zero, key_S2=jnp.zeros((2, 2)), position_S=jnp.zeros(2)))
    lists = [name for name in fields if name.endswith(("_SB", "_SX", "_SV"))]
    made |= vars(sampler.named(FullControls, zero, **{name: jnp.zeros(2) for name in lists}))
    assert all(made[f"{name}_S"] is zero[name] for name in columns)
