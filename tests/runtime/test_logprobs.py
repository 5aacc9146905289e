"""Log-probabilities of given tokens against a dense float64 log_softmax, and the shared
reductions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runtime.logprobs import (
    PROCESSED,
    RAW,
    SUM_TILE,
    TEMPERED,
    TokenLogprobs,
    rank,
    tile_sums,
    token_logprobs,
    top_values,
    total,
)

TOKENS, EMBED, VOCAB, TILE, WIDTH = 13, 24, 300, 4, 5


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x_TE = rng.normal(size=(TOKENS, EMBED)).astype(np.float32)
    head_VE = rng.normal(size=(VOCAB, EMBED)).astype(np.float32)
    head_VE[200:204] = head_VE[100:104]  # exact ties
    targets_T = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    targets_T[:2] = 101, 201
    temperature_T = np.where(np.arange(TOKENS) % 4 == 0, 0, 0.5 + 0.1 * np.arange(TOKENS)).astype(
        np.float32
    )
    return x_TE, head_VE, targets_T, temperature_T, (np.arange(TOKENS) % 3).astype(np.int32)


@jax.jit
def scored(
    x_TE: jax.Array,
    head_VE: jax.Array,
    targets_T: jax.Array,
    temperature_T: jax.Array,
    mode_T: jax.Array,
):
    return token_logprobs(
        lambda x: x @ head_VE.T,
        x_TE,
        targets_T,
        temperature_T,
        mode_T,
        candidates_TX=(targets_T[:, None] + jnp.arange(2)[None]) % VOCAB,
        with_entropy=True,
        max_logprobs=WIDTH,
        tile=TILE,
    )


def test_token_logprobs_are_those_of_the_dense_head() -> None:
    x_TE, head_VE, targets_T, temperature_T, mode_T = inputs()
    out = scored(*map(jnp.asarray, inputs()))
    assert {RAW, TEMPERED, PROCESSED} == set(mode_T.tolist())
    logits_TV = np.asarray(jnp.asarray(x_TE) @ jnp.asarray(head_VE).T)
    tau_T = np.where((mode_T == RAW) | (temperature_T == 0), 1, temperature_T).astype(np.float64)
    lp_TV = logits_TV.astype(np.float64) / tau_T[:, None]
    lp_TV -= np.logaddexp.reduce(lp_TV, axis=1, keepdims=True)
    order_TV = np.argsort(-logits_TV, axis=1, kind="stable")
    for t, target in enumerate(targets_T):
        np.testing.assert_allclose(out.logprob_T[t], lp_TV[t, target], atol=2e-5, rtol=1e-5)
        assert out.rank_T[t] == 1 + np.flatnonzero(order_TV[t] == target)[0]
        np.testing.assert_array_equal(out.top_ids_TK[t], order_TV[t, :WIDTH])
        np.testing.assert_allclose(
            out.top_logprobs_TK[t], lp_TV[t, order_TV[t, :WIDTH]], atol=2e-5, rtol=1e-5
        )
    assert out.rank_T.shape == (TOKENS,) and out.top_ids_TK.shape == (TOKENS, WIDTH)
    np.testing.assert_allclose(out.entropy_T, -(np.exp(lp_TV) * lp_TV).sum(axis=1), atol=1e-5)
    others_TX = (targets_T[:, None] + np.arange(2)) % VOCAB
    wanted_TX = np.take_along_axis(lp_TV, others_TX, axis=1)
    np.testing.assert_allclose(out.candidate_logprobs_TX, wanted_TX, atol=2e-5, rtol=1e-5)


def test_what_is_not_counted_is_not_computed() -> None:
    """The first `count` tokens have the bits that they have among all; tiles beyond are zeros. A
    list that is longer than the vocabulary ends in -inf.
    """
    x_TE, head_VE, *rest = map(jnp.asarray, inputs())

    @jax.jit
    def first(count: jax.Array | None) -> TokenLogprobs:
        def logits(x: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(VOCAB)[None] == 7, -jnp.inf, x @ head_VE.T)

        options = {"max_logprobs": VOCAB + 2, "with_entropy": True, "tile": TILE}
        return token_logprobs(logits, x_TE, *rest, count=count, **options)

    whole, some = first(None), first(jnp.int32(TILE + 1))
    for name, values in vars(some).items():
        np.testing.assert_array_equal(values[: 2 * TILE], getattr(whole, name)[: 2 * TILE])
        assert not np.any(values[2 * TILE :]), name
    assert np.isfinite(whole.entropy_T).all()
    assert (whole.top_ids_TK[:, VOCAB - 1] == 7).all()
    assert np.isneginf(whole.top_logprobs_TK[:, VOCAB - 1 :]).all()


def test_the_logits_are_never_whole() -> None:
    text = scored.lower(*map(jnp.asarray, inputs())).compile().as_text()
    assert text is not None and f"[{TILE},{VOCAB}]" in text
    for tokens in (TOKENS, TILE * -(-TOKENS // TILE)):
        assert f"[{tokens},{VOCAB}]" not in text and f"[{VOCAB},{tokens}]" not in text


def test_targets_outside_the_vocabulary_are_clipped_and_no_lists_are_empty() -> None:
    x_TE, head_VE, _, temperature_T, mode_T = map(jnp.asarray, inputs())
    targets_T = np.array([-1, VOCAB] + [3] * (TOKENS - 2), np.int32)
    clipped_T = np.clip(targets_T, 0, VOCAB - 1)
    got, want = (
        token_logprobs(
            lambda x: x @ head_VE.T, x_TE, jnp.asarray(t), temperature_T, mode_T, tile=TOKENS
        )
        for t in (targets_T, clipped_T)
    )
    np.testing.assert_array_equal(got.logprob_T, want.logprob_T)
    assert got.top_ids_TK.shape == (TOKENS, 0)


@pytest.mark.parametrize(("vocab", "k"), [(40, 5), (40, 40), (1003, 20), (1003, 64), (5000, 64)])
def test_top_values_breaks_ties_by_id(vocab: int, k: int) -> None:
    rng = np.random.default_rng(vocab + k)
    z = (np.round(rng.normal(size=(6, vocab)) * 2) + 0.0).astype(
        np.float32
    )  # few values, so ties; no -0.0
    z[0] = 1.0
    z[1, 7:] = float("-inf")

    @jax.jit
    def find(z_SV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        values_SK, ids_SK = top_values(z_SV, k)
        ranks = [rank(z_SV, values_SK[:, i], ids_SK[:, i]) for i in (0, k - 1)]
        return values_SK, ids_SK, jnp.stack(ranks)

    values, ids, ranks = find(jnp.asarray(z))
    order = np.argsort(-z, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(z, order, axis=1))
    np.testing.assert_array_equal(ranks, [[1] * 6, [k] * 6])


@pytest.mark.parametrize("vocab", [40, 300, 32_000, 50_257])
def test_sums_do_not_depend_on_the_number_of_rows(vocab: int) -> None:
    a = np.random.default_rng(0).random((32, vocab)).astype(np.float32)
    add = jax.jit(lambda a_SV: (tile_sums(a_SV), total(tile_sums(a_SV))))
    tiles, totals = map(np.asarray, add(jnp.asarray(a)))
    padded = np.pad(a, ((0, 0), (0, -vocab % SUM_TILE))).reshape(32, -1, SUM_TILE)
    np.testing.assert_allclose(tiles, padded.sum(axis=2, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(totals, a.sum(axis=1, dtype=np.float64), rtol=1e-6)
    for rows in (1, 8):
        some_tiles, some_totals = add(jnp.asarray(a[5 : 5 + rows]))
        np.testing.assert_array_equal(some_tiles, tiles[5 : 5 + rows])
        np.testing.assert_array_equal(some_totals, totals[5 : 5 + rows])
