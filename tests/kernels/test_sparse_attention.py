"""The choice of tokens by index keys and attention over it, against definitions in numpy; slots
that must not be read are NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import sparse_attention
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.pool_layout import scaled
from kernels_pallas.sparse_attention.tiles import last_real

P, L, LAYER, HEADS, KEY, H, LATENT, ROTATED = 4, 3, 1, 5, 8, 6, 12, 4
# Tokens of each row in the step, and of its whole context; the last row is padding.
PREFILL, DECODE = ([(7, 7), (5, 30), (1, 41), (0, 0)], [(1, 3), (1, 41), (1, 8), (0, 0)])
COUNTS = (1, 7, 8, 40, 44, 100)


@functools.cache
def case(is_decode: bool, width: int = 11) -> dict[str, Any]:
    """A step of packed tokens, pools with NaN in other slots, and what the rows' contexts hold."""
    rng, rows = np.random.default_rng(3), DECODE if is_decode else PREFILL
    blocks = 60
    table = rng.permutation(blocks)[: len(rows) * width].reshape(len(rows), width).astype(np.int32)
    keys = np.full((L * blocks, P, KEY), np.nan, np.float32)
    latents = np.full((L * blocks, P, 1, LATENT + ROTATED), np.nan, np.float32)
    contexts = []
    for row, (_, length) in enumerate(rows):
        own = [rng.standard_normal((length, n)).astype(np.float32) for n in (KEY, 16)]
        contexts.append(own)
        for i in range(length):
            at = (LAYER * blocks + table[row, i // P], i % P)
            keys[at], latents[at][0] = own[0][i], own[1][i]
    token_rows = [row for row, (count, _) in enumerate(rows) for _ in range(count)]
    positions = [length - count + i for count, length in rows for i in range(count)]
    short = 16 - len(positions) if not is_decode else 1
    token_rows, positions = token_rows + [len(rows)] * short, positions + [-1] * short
    T = len(positions)
    return {
        "q": rng.standard_normal((T, HEADS, KEY)).astype(np.float32),
        "weights": rng.standard_normal((T, HEADS)).astype(np.float32),
        "queries": rng.standard_normal((T, H, LATENT + ROTATED)).astype(np.float32),
        "keys": keys,
        "latents": latents,
        "contexts": contexts,
        "rows": (table, np.array(token_rows, np.int32), np.array(positions, np.int32)),
    }


def chosen_by(made: dict[str, Any], token: int, count: int) -> list[int]:
    """The definition, in f64."""
    _, rows, positions = made["rows"]
    keys = made["contexts"][rows[token]][0][: positions[token] + 1].astype(np.float64)
    scores = np.zeros(len(keys))
    for head in range(HEADS):
        products = keys @ made["q"][token, head] * KEY**-0.5
        scores += made["weights"][token, head] * HEADS**-0.5 * np.maximum(products, 0)
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


def choose(made: dict[str, Any], count: int) -> np.ndarray:
    chosen = sparse_attention.choose(
        *(jnp.asarray(made[name]) for name in ("q", "weights", "keys")),
        LAYER,
        *map(jnp.asarray, made["rows"]),
        count=count,
        num_layers=L,
    )
    return np.asarray(chosen)


@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("count", COUNTS)
def test_the_best_are_chosen(is_decode: bool, count: int) -> None:
    made = case(is_decode)
    chosen, (_, _, positions) = choose(made, count), made["rows"]
    assert chosen.shape == (len(positions), min(count, 44))
    for token, position in enumerate(positions):
        expected = [] if position < 0 else chosen_by(made, token, count)
        found = chosen[token].tolist()
        assert found == expected + [-1] * (len(found) - len(expected)), (token, position)


@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("count", [1, 8, 44])
def test_the_chosen_are_attended_to(is_decode: bool, kv_dtype: str | None, count: int) -> None:
    made = case(is_decode)
    chosen, (table, rows, positions) = choose(made, count), made["rows"]
    pool: Any = jnp.asarray(made["latents"])
    if kv_dtype is not None:
        pool = scaled(pool, kv_dtype, key_width=LATENT)
    attention = AttentionOptions(scale=0.3, value_dim=LATENT, latent=True)
    o = sparse_attention.attend(
        jnp.asarray(made["queries"]),
        pool,
        LAYER,
        *map(jnp.asarray, (table, rows, positions)),
        jnp.asarray(chosen),
        options=Options(attention=attention, num_layers=L),
    )
    for token, position in enumerate(positions):
        if position < 0:
            continue
        at = chosen[token][chosen[token] >= 0]
        kv = made["contexts"][rows[token]][1][at].astype(np.float64)
        scores = made["queries"][token] @ kv.T * 0.3
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ kv[:, :LATENT]
        tolerance = 1e-5 if kv_dtype is None else 0.05
        np.testing.assert_allclose(o[token], expected, atol=tolerance)


def test_a_tie_goes_to_the_lower_position() -> None:
    """All scores are zero where no product is above it."""
    made = dict(case(True))
    made["q"] = np.zeros_like(made["q"])
    chosen = choose(made, 7)
    assert chosen[1].tolist() == list(range(7))


def test_padding_is_not_computed() -> None:
    assert int(last_real(jnp.array([3, -1, 0, -1, -1]))) == 3
    assert int(last_real(jnp.array([-1, -1]))) == 0


def test_scores_of_a_half_are_exact() -> None:
    """Products of bf16 are added up in f32, as transformers does."""
    made = case(False)
    q, keys = (jnp.asarray(made[n], jnp.bfloat16) for n in ("q", "q"))
    weights = jnp.asarray(made["weights"])
    scores = jax.jit(sparse_attention.index_scores)(q, keys, weights)
    wide_q, wide_keys = (x.astype(jnp.float32) for x in (q, keys))
    wide = sparse_attention.index_scores(wide_q, wide_keys, weights)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, wide, rtol=1e-6, atol=1e-6)
