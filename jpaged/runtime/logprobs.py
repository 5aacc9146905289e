"""Log-probabilities of tokens, and the reductions over the vocabulary that sampling shares.

A row's bits depend on that row alone: sums add in a written order, whatever the number of rows. N
is the tiles of the vocabulary, C the tokens gathered from some of them, X any axis.
"""

import dataclasses
import importlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.models.served import VOCAB_TILE
from jpaged.runtime.vocabulary import WHOLE, Vocabulary
from kernels_pallas.implementation import Implementation

RAW, TEMPERED, PROCESSED = 0, 1, 2  # logprobs_mode_S
SUM_TILE = VOCAB_TILE  # tokens a tile of the two-level draw
TOP_TILE = 32  # tokens a tile of the top-k search
NEG_INF = float("-inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnePass:
    """Sums over a device's share of the vocabulary by one kernel, `read_tiles` of a module of
    kernels_pallas/vocab_tiles, and thresholds of whole rows by another, `row_thresholds`.
    interpret: run them on a CPU.
    """

    reader: Implementation
    interpret: bool = False

    def read(
        self, z_SV: Array, tau_S: Array, floor_S: Array, all_tau_S: Array | None = None
    ) -> "TileSums":
        """Return the maxima and sums of all tiles. z_SV: logits. tau_S: temperatures, f32 > 0.
        floor_S: logits below it are left out of the sums at this temperature. all_tau_S: the
        temperature of the sums over all logits, None is 1.
        """
        all_tau_S = jnp.ones_like(tau_S) if all_tau_S is None else all_tau_S
        max_SN, sum_SN, all_SN = self.reader.module().read_tiles(
            z_SV, tau_S, floor_S, all_tau_S, tile=VOCAB_TILE, interpret=self.interpret
        )
        return TileSums(max_SN, sum_SN, all_SN, tau_S, all_tau_S)

    def search(
        self,
        z_SV: Array,
        max_S: Array,
        tau_S: Array,
        floor_S: Array,
        top_k_S: Array,
        top_p_S: Array,
        settled_S: Array,
    ) -> tuple[Array, Array]:
        """Return the smallest logit that each row keeps, and the sums of its tiles over what it
        keeps, against its maximum; of settled rows anything.
        """
        kernel: Any = importlib.import_module("kernels_pallas.row_thresholds")
        args = z_SV, max_S, tau_S, floor_S, top_k_S, top_p_S, settled_S
        return kernel.row_thresholds(*args, tile=VOCAB_TILE, interpret=self.interpret)


@dataclasses.dataclass(frozen=True)
class TileSums:
    """Maxima of tiles, and sums of exponentials against them: sum_SN at the temperature, over what
    is at least the floor; all_SN at another, over all.
    """

    max_SN: Array
    sum_SN: Array
    all_SN: Array
    tau_S: Array
    all_tau_S: Array

    def against(self, max_S: Array) -> Array:
        """Return the sums at the temperature, against each row's maximum."""
        return self._scaled(self.sum_SN, max_S, self.tau_S)

    def all_against(self, max_S: Array) -> Array:
        """Return the sums over all logits, against each row's maximum."""
        return self._scaled(self.all_SN, max_S, self.all_tau_S)

    def _scaled(self, sum_SN: Array, max_S: Array, tau_S: Array) -> Array:
        return sum_SN * jnp.exp((self.max_SN - max_S[:, None]) / tau_S[:, None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of tokens, as `token_logprobs` returns them."""

    logprob_T: Array  # f32
    rank_T: Array  # i32
    top_ids_TK: Array  # i32
    top_logprobs_TK: Array  # f32
    candidate_logprobs_TX: Array  # f32
    entropy_T: Array  # f32; zeros where it was not asked for


def scratch_bytes(tile: int, vocab: int) -> int:
    """Return the bytes that `token_logprobs` allocates at most: f32 logits [tile, V], twice."""
    return 8 * vocab * tile


def token_logprobs(
    logits_fn: Callable[[Any], Array],
    x_TE: Any,
    targets_T: Array,
    temperature_T: Array,
    mode_T: Array,
    mask_TW: Array | None = None,
    *,
    candidates_TX: Array | None = None,
    count: Array | None = None,
    max_logprobs: int = 0,
    with_entropy: bool = False,
    tile: int = 64,
    vocabulary: Vocabulary = WHOLE,
    one_pass: OnePass | None = None,
) -> TokenLogprobs:
    """Return log-probabilities of tokens; the LM head runs on `tile` tokens at a time, so that the
    logits of all are never in memory together.

    logits_fn: [tile, E] -> f32 [tile, V], or of more than that: a pytree of arrays that begin with
    T, as x_TE then is. mode_T RAW ignores the temperature, any other divides by
    it (0 counts as 1). mask_TW: what may come, see Vocabulary.allowed; None is all. targets_T
    outside the vocabulary are clipped into it. candidates_TX: other tokens whose logprobs are
    wanted. count: so many of the first tokens are computed, the rest are zeros; None computes all.
    max_logprobs: K, how many of the likeliest tokens are returned, the lowest id first of equal
    ones; beyond the vocabulary -inf. vocabulary: how V lies. one_pass: see `sample`.
    """
    tau_T = jnp.where((mode_T == RAW) | (temperature_T <= 0), jnp.float32(1), temperature_T)

    def one_tile(args: tuple[Any, ...]) -> TokenLogprobs:
        x, targets_t, tau_t, candidates_tX, *masks = args
        logits_tV = logits_fn(x)
        for mask_tW in masks:
            logits_tV = jnp.where(vocabulary.allowed(mask_tW, logits_tV), logits_tV, NEG_INF)
        targets_t = jnp.clip(targets_t, 0, vocabulary.tokens(logits_tV) - 1)
        none_t = jnp.full_like(tau_t, NEG_INF)
        if one_pass is None:
            max_t = finite_max(tile_max(logits_tV, SUM_TILE, vocabulary))
            sum_t = total(kept_sums(logits_tV, max_t, tau_t, none_t, None, vocabulary))
        else:
            sums = one_pass.read(logits_tV, tau_t, none_t)
            max_t = finite_max(vocabulary.gather(sums.max_SN))
            sum_t = total(vocabulary.gather(sums.against(max_t)))
        value_t = vocabulary.pick(logits_tV, targets_t)
        most = min(max_logprobs, vocabulary.tokens(logits_tV))
        top_tK, top_ids_tK = top_values(logits_tV, most, vocabulary)
        beyond = [(0, 0), (0, max_logprobs - most)]
        top_tK = jnp.pad(top_tK, beyond, constant_values=NEG_INF)
        columns = max_t[:, None], tau_t[:, None], sum_t[:, None]
        entropy_t = jnp.zeros_like(tau_t)
        if with_entropy:
            entropy_t = entropy(logits_tV, max_t, tau_t, sum_t, vocabulary)
        others_tX = vocabulary.take(logits_tV, candidates_tX)
        return TokenLogprobs(
            logprob_T=logprob(value_t, max_t, tau_t, sum_t),
            rank_T=rank(logits_tV, value_t, targets_t, vocabulary),
            top_ids_TK=jnp.pad(top_ids_tK, beyond),
            top_logprobs_TK=logprob(top_tK, *columns),
            candidate_logprobs_TX=logprob(others_tX, *columns),
            entropy_T=entropy_t,
        )

    tokens = targets_T.shape[0]
    if candidates_TX is None:
        candidates_TX = jnp.zeros((tokens, 0), jnp.int32)
    tiles = -(-tokens // tile)

    def tiled(a: Array) -> Array:
        padded = jnp.pad(a, [(0, tiles * tile - tokens)] + [(0, 0)] * (a.ndim - 1))
        return padded.reshape(tiles, tile, *a.shape[1:])

    tau_T = jnp.maximum(tiled(tau_T), jnp.float32(1e-30))  # as `sample` does; the padding too
    masks = () if mask_TW is None else (tiled(mask_TW),)
    x = jax.tree.map(tiled, x_TE)
    args = (x, tiled(targets_T), tau_T, tiled(candidates_TX), *masks)
    out = lax.map(one_tile, args) if count is None else _first(one_tile, args, -(-count // tile))
    return jax.tree.map(lambda a: a.reshape(tiles * tile, *a.shape[2:])[:tokens], out)


def _first(function: Callable[[Any], Any], args: Any, count: Array) -> Any:
    """Return lax.map(function, args) of the first `count` entries, zeros for the others."""
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: lax.map(function, args))
    )

    def body(i: Array, outs: Any) -> Any:
        out = function(jax.tree.map(lambda a: a[i], args))
        return jax.tree.map(lambda all_, one: all_.at[i].set(one), outs, out)

    return lax.fori_loop(0, count, body, zeros)


def _tile(reduce: Callable[[Array], Array], a_SV: Array, tile: int, fill: float) -> Array:
    """Reduce each tile of the vocabulary: [S, V] -> [S, N]. A short last tile is filled up."""
    rows, vocab = a_SV.shape
    whole = vocab - vocab % tile
    parts = [reduce(a_SV[:, :whole].reshape(rows, whole // tile, tile))] if whole else []
    if whole < vocab:
        tail_SC = jnp.pad(
            a_SV[:, whole:], ((0, 0), (0, tile - (vocab - whole))), constant_values=fill
        )
        parts.append(reduce(tail_SC[:, None]))
    return jnp.concatenate(parts, axis=1)


def tile_max(z_SV: Array, tile: int, vocabulary: Vocabulary = WHOLE) -> Array:
    """Return the maximum of each tile of the whole vocabulary."""
    return vocabulary.gather(_tile(lambda z: jnp.max(z, axis=2), z_SV, tile, NEG_INF))


def masked_tile_max(logits_SV: Array, mask_SW: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """tile_max of SUM_TILE tokens each, -inf for what a mask forbids: by halving, with which
    XLA:CPU fuses the mask.
    """
    z_SV = jnp.where(vocabulary.allowed(mask_SW, logits_SV), logits_SV, NEG_INF)
    return vocabulary.gather(_tile(lambda z: _halved(jnp.maximum, z), z_SV, SUM_TILE, NEG_INF))


def tile_sums(a_SV: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """Return the sum of each SUM_TILE entries of the whole vocabulary, added by halving: an order
    that is written down.

    For jnp.sum, XLA:CPU picks one by the number of rows. This also fuses with what makes the
    entries, so that they are never stored, and runs over 16 lanes.
    """
    return vocabulary.gather(_tile(lambda a: _halved(operator.add, a), a_SV, SUM_TILE, 0.0))


def _halved(join: Callable[[Array, Array], Array], a_SNC: Array) -> Array:
    """Reduce each tile to one entry by joining its halves again and again; [S, N]."""
    a = a_SNC.reshape(*a_SNC.shape[:2], SUM_TILE // 16, 16)
    for axis in (2, 3):
        while a.shape[axis] > 1:
            low, high = jnp.split(a, 2, axis=axis)
            a = join(low, high)
    return a[:, :, 0, 0]


def weights(z_SX: Array, max_S: Array, temp_S: Array, floor_S: Array) -> Array:
    """Unnormalised probabilities of the kept logits, exp((z - max) / temperature), 0 elsewhere; the
    largest is 1.
    """
    exp_SX = jnp.exp((z_SX - max_S[:, None]) / temp_S[:, None])
    return jnp.where(z_SX >= floor_S[:, None], exp_SX, jnp.float32(0))


def kept_sums(
    z_SV: Array,
    max_S: Array,
    tau_S: Array,
    floor_S: Array,
    one_pass: OnePass | None,
    vocabulary: Vocabulary = WHOLE,
) -> Array:
    """Return the sums of `weights`, a tile each: of this device's tiles, or gathered where its
    vocabulary is given.
    """
    if one_pass is None:
        return tile_sums(weights(z_SV, max_S, tau_S, floor_S), vocabulary)
    return vocabulary.gather(one_pass.read(z_SV, tau_S, floor_S).against(max_S))


def total(sums_SN: Array) -> Array:
    """Return the sum of all tiles, in the order of the draw; jnp.sum has another (`tile_sums`)."""
    return jnp.cumsum(sums_SN, axis=1)[:, -1]


def finite_max(tile_max_SN: Array) -> Array:
    """Return each row's maximum; 0 where it is not finite, so that it can be subtracted."""
    # Else XLA:CPU takes it from the logits again.
    max_S = jnp.max(lax.optimization_barrier(tile_max_SN), axis=1)
    return jnp.where(jnp.isfinite(max_S), max_S, jnp.float32(0))


def logprob(value: Array, max_: Array, tau: Array, total: Array) -> Array:
    return (value - max_) / tau - jnp.log(total)


def entropy(
    z_SV: Array, max_S: Array, tau_S: Array, total_S: Array, vocabulary: Vocabulary
) -> Array:
    """Return the entropy of each row's distribution at its temperature, in nats. total_S: of the
    weights; see `weights`.
    """
    away_SV = (z_SV - max_S[:, None]) / tau_S[:, None]
    weighed_SV = jnp.where(z_SV == NEG_INF, jnp.float32(0), jnp.exp(away_SV) * away_SV)
    return jnp.log(total_S) - total(tile_sums(weighed_SV, vocabulary)) / total_S


def rank(z_SV: Array, value_S: Array, token_S: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """Return 1 + the number of tokens before this one: larger ones, equal ones of a lower id."""
    ids_V = vocabulary.ids(z_SV)
    before_SV = (z_SV > value_S[:, None]) | (
        (z_SV == value_S[:, None]) & (ids_V < token_S[:, None])
    )
    before_S = total(tile_sums(before_SV.astype(jnp.float32))).astype(jnp.int32)  # exact to 2**24
    return 1 + vocabulary.sum(before_S)


def top_values(
    z_SV: Array, k: int, vocabulary: Vocabulary = WHOLE, tile_max_SN: Array | None = None
) -> tuple[Array, Array]:
    """Return the k largest values of each row and their ids, equal values in order of id.
    tile_max_SN: the maxima of TOP_TILE tokens each, of a whole vocabulary, where they are there.

    A token outside the k tiles that hold the largest maxima (of equal ones, the first) comes after
    k others, so only those tiles are looked at: a quarter of the time of `lax.top_k` over 152k
    tokens. Of a vocabulary in shares: the first k of those of each, which come in order of id.
    """
    if vocabulary.axis is not None:
        top_SK, ids_SK = top_values(z_SV, min(k, z_SV.shape[1]))
        ids_SC = vocabulary.gather(ids_SK + vocabulary.first(z_SV))
        top_SK, at_SK = lax.top_k(vocabulary.gather(top_SK), k)
        return top_SK, jnp.take_along_axis(ids_SC, at_SK, axis=1)
    tile_max_SN = tile_max(z_SV, TOP_TILE) if tile_max_SN is None else tile_max_SN
    if k == 0 or tile_max_SN.shape[1] <= k:
        return lax.top_k(z_SV, k)
    _, tiles_SK = lax.top_k(tile_max_SN, k)
    z_SC, ids_SC = gather_tiles(z_SV, jnp.sort(tiles_SK, axis=1), TOP_TILE)
    top_SK, at_SK = lax.top_k(z_SC, k)
    return top_SK, jnp.take_along_axis(ids_SC, at_SK, axis=1)


def gather_tiles(
    z_SV: Array, tiles_SN: Array, tile: int, vocabulary: Vocabulary = WHOLE
) -> tuple[Array, Array]:
    """The logits of the named tiles, one after the other, and their ids; past the vocabulary's end
    -inf.
    """
    rows, vocab = z_SV.shape[0], vocabulary.tokens(z_SV)
    ids_SC = (
        tiles_SN[:, :, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None, None, :]
    ).reshape(rows, -1)
    z_SC = vocabulary.take(z_SV, jnp.minimum(ids_SC, vocab - 1))
    return jnp.where(ids_SC < vocab, z_SC, NEG_INF), ids_SC


def pick(a_SX: Array, at_S: Array) -> Array:
    return jnp.take_along_axis(a_SX, at_S[:, None], axis=1)[:, 0]


def first_true(true_SX: Array) -> Array:
    """Return the index of the first true entry of each row, X where there is none.

    In f32, which counts exactly to 2**24, because XLA:CPU reduces floats fast, and argmax and
    integers slowly.
    """
    at_SX = lax.broadcasted_iota(jnp.float32, true_SX.shape, 1)
    return jnp.min(jnp.where(true_SX, at_SX, jnp.float32(true_SX.shape[1])), axis=1).astype(
        jnp.int32
    )
