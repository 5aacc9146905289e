"""From logits to tokens and log-probabilities, on the device: a new control is this file and
sampling_params.py.

Every row stands alone: its token and logprob depend on its own logits, controls and key, never on
its neighbours, its place in the batch, or which `lax.cond` branch a neighbour forces. The order of
the controls is vLLM's: logit bias, bans, penalties, temperature, min_p, top_k, top_p; the last
three are one number a row (thresholds.py). N is the tiles of the vocabulary, C the tokens of a
tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.runtime.logprobs import (  # isort: skip
    NEG_INF,
    PROCESSED,
    RAW,
    TEMPERED,
    SUM_TILE,
    OnePass,
    finite_max,
    first_true,
    gather_tiles,
    kept_sums,
    logprob,
    masked_tile_max,
    pick,
    rank,
    tile_max,
    tile_sums,
    token_logprobs,
    top_values,
    total,
    weights,
)
from jpaged.runtime.thresholds import thresholds
from jpaged.runtime.vocabulary import WHOLE, Vocabulary

__all__ = ["Controls", "FullControls", "Sampled", "sample", "token_logprobs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Controls:
    """What every row has. Off is: top_p 1, min_p 0, top_k 0; temperature 0 is greedy and ignores
    the thresholds.
    """

    temperature_S: Array  # f32
    top_p_S: Array  # f32
    min_p_S: Array  # f32
    top_k_S: Array  # i32
    key_S2: Array  # u32, threefry key data of the request
    sample_index_S: Array  # i32
    position_S: Array  # i32, index of the new token in its sequence
    logprobs_mode_S: Array  # i32: RAW, TEMPERED or PROCESSED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FullControls:
    """What only some requests ask for. Ids of V or more are padding and dropped; the bias ids of a
    row are distinct.
    """

    presence_S: Array  # f32, off 0
    frequency_S: Array  # f32, off 0
    repetition_S: Array  # f32, off 1
    bias_ids_SB: Array  # i32
    bias_SB: Array  # f32
    ban_ids_SX: Array  # i32, forbidden for this token (EOS before min_tokens)
    # i32, 2 * occurrences in the output so far + (1 if the token is in the prompt).
    counts_SV: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """One token a row; rank and top lists only of the full step. Top lists fall in value, equal
    values rise in id.
    """

    token_S: Array  # i32
    logprob_S: Array  # f32, in the row's logprobs mode
    rank_S: Array | None = None  # i32, 1 is the most probable
    top_ids_SK: Array | None = None  # i32
    top_logprobs_SK: Array | None = None  # f32
    # f32, of rows that ask for tempered logprobs: of all that the mask allows.
    allowed_logprob_S: Array | None = None


def sample(
    logits_SV: Array,
    controls: Controls,
    full: FullControls | None = None,
    mask_SW: Array | None = None,
    *,
    max_logprobs: int = 0,
    vocabulary: Vocabulary = WHOLE,
    filters: bool = True,
    one_pass: OnePass | None = None,
) -> Sampled:
    """Draw one token a row, and its log-probability.

    logits_SV f32, -inf allowed (a row of nothing else, or of NaN, gives some valid id and logprob
    NaN). `full` None is the plain step: no penalties, biases, bans or top lists; a row that uses
    none of them gets the same bits from both. mask_SW int32: a bit a token of the whole
    vocabulary, 0 forbids it; comes after all else. max_logprobs (K) is at most V. vocabulary: how V
    lies; of a share the results are those of the whole, on every device. filters: whether any row
    may have a top_k, a top_p or a min_p. one_pass: who sums, other than XLA.
    """
    greedy_S = controls.temperature_S <= 0
    # Below 1e-30 a quotient of two logits' difference is 0 or -inf already; denormals would divide
    # 0 by 0.
    temp_S = jnp.where(
        greedy_S, jnp.float32(1), jnp.maximum(controls.temperature_S, jnp.float32(1e-30))
    )
    z_SV = logits_SV if full is None else _apply_full(logits_SV, full, vocabulary)
    # The log-probabilities' own distribution: (source, its max, temperature tau, sum of
    # exponentials), row by row.
    mode_S = controls.logprobs_mode_S
    processed_S = mode_S == PROCESSED
    tau_S = jnp.where(mode_S == RAW, jnp.float32(1), temp_S)
    # A draw that is plain but for its mask makes what is allowed anew in each of its passes.
    takes_few = full is None and not filters and one_pass is None
    mask_only_SW = mask_SW if takes_few else None
    if mask_SW is not None and mask_only_SW is None:
        # Stored: else each search for a threshold makes it anew.
        z_SV = jnp.where(vocabulary.allowed(mask_SW, z_SV), z_SV, NEG_INF)
        z_SV = lax.optimization_barrier(z_SV)
    raw_S = None
    if mask_only_SW is not None:
        tile_max_SN = masked_tile_max(logits_SV, mask_only_SW, vocabulary)
        max_S, floor_S = finite_max(tile_max_SN), jnp.full_like(temp_S, NEG_INF)
        scales = (max_S, temp_S, floor_S, tau_S, processed_S)
        own_SN, raw_S = _sums_with_and_without(logits_SV, mask_only_SW, *scales, vocabulary)
    elif filters or one_pass is None:
        tile_max_SN = tile_max(z_SV, SUM_TILE, vocabulary)
        max_S = finite_max(tile_max_SN)
        given = (controls.min_p_S, controls.top_p_S, controls.top_k_S)
        floor_S = thresholds(z_SV, max_S, temp_S, greedy_S, *given, vocabulary, filters)
        own_SN = kept_sums(z_SV, max_S, temp_S, floor_S, one_pass)
    else:
        floor_S = jnp.full_like(temp_S, NEG_INF)
        sums = one_pass.read(z_SV, temp_S, floor_S)
        tile_max_SN = vocabulary.gather(sums.max_SN)
        max_S = finite_max(tile_max_SN)
        own_SN = sums.against(max_S)
        if full is None and mask_SW is None:
            raw_S = total(vocabulary.gather(sums.plain_against(max_S)))
    rows = (max_S, temp_S, floor_S, greedy_S)
    gumbel_SX = _noise(controls, own_SN.shape[1], vocabulary)
    drawn_from = (z_SV, tile_max_SN, own_SN, *rows, gumbel_SX, vocabulary, mask_only_SW)
    token_S, sums_SN = _draw(*drawn_from)
    total_S = total(sums_SN)

    source_max_S, same_S = max_S, processed_S
    if full is not None:
        raw_max_S = finite_max(tile_max(logits_SV, SUM_TILE, vocabulary))
        source_max_S = jnp.where(processed_S, max_S, raw_max_S)
    elif mask_SW is None:
        same_S = processed_S | ((tau_S == temp_S) & (floor_S == NEG_INF))
    none_S = jnp.full_like(max_S, NEG_INF)

    def summed(source_max_S: Array) -> Array:
        sums_SN = kept_sums(logits_SV, source_max_S, tau_S, none_S, one_pass, vocabulary)
        return jnp.where(same_S, total_S, total(sums_SN))

    if raw_S is None:
        sum_S = lax.cond(jnp.all(same_S), lambda: total_S, lambda: summed(source_max_S))
    else:
        sum_S = jnp.where(same_S, total_S, raw_S)
    if full is None and mask_SW is not None:
        # The largest of what is allowed does for the raw logits too, and saves looking for theirs,
        # unless some are so far above it that their exponentials overflow.
        is_over_S = jnp.isposinf(sum_S) & ~same_S

        def again() -> tuple[Array, Array]:
            raw_max_S = finite_max(tile_max(logits_SV, SUM_TILE, vocabulary))
            max_again_S = jnp.where(is_over_S, raw_max_S, source_max_S)
            return max_again_S, jnp.where(is_over_S, summed(max_again_S), sum_S)

        source_max_S, sum_S = lax.cond(jnp.any(is_over_S), again, lambda: (source_max_S, sum_S))
    mass_S = None
    if mask_SW is not None:
        is_tempered_S = mode_S == TEMPERED

        def mass() -> Array:
            p_SV = weights(logits_SV, source_max_S, temp_S, none_S)
            p_SV = jnp.where(vocabulary.allowed(mask_SW, p_SV), p_SV, jnp.float32(0))
            ratio_S = total(tile_sums(p_SV, vocabulary)) / sum_S
            return jnp.where(is_tempered_S, jnp.log(ratio_S), jnp.float32(0))

        mass_S = lax.cond(jnp.any(is_tempered_S), mass, lambda: jnp.zeros_like(max_S))
    if full is None:
        value_S = vocabulary.pick(logits_SV, token_S)
        logprob_S = logprob(value_S, source_max_S, tau_S, sum_S)
        return Sampled(token_S=token_S, logprob_S=logprob_S, allowed_logprob_S=mass_S)

    def lists(source_SV: Array) -> tuple[Array, Array, Array, Array]:
        value_S = vocabulary.pick(source_SV, token_S)
        rank_S = rank(source_SV, value_S, token_S, vocabulary)
        return value_S, rank_S, *top_values(source_SV, max_logprobs, vocabulary)

    def processed() -> tuple[Array, Array, Array, Array]:
        kept_SV = jnp.where(z_SV >= floor_S[:, None], z_SV, NEG_INF)
        return lists(jnp.where(processed_S[:, None], kept_SV, logits_SV))

    value_S, rank_S, top_SK, top_ids_SK = lax.cond(
        jnp.any(processed_S), processed, lambda: lists(logits_SV)
    )
    logprob_S = logprob(value_S, source_max_S, tau_S, sum_S)
    tops_SK = logprob(top_SK, source_max_S[:, None], tau_S[:, None], sum_S[:, None])
    return Sampled(
        token_S=token_S,
        logprob_S=logprob_S,
        rank_S=rank_S,
        top_ids_SK=top_ids_SK,
        top_logprobs_SK=tops_SK,
        allowed_logprob_S=mass_S,
    )


def _apply_full(logits_SV: Array, full: FullControls, vocabulary: Vocabulary) -> Array:
    """Bias, bans and penalties. Whatever is off leaves its logits' bits alone."""
    bias_SB, ban_SX = (
        vocabulary.columns(ids, logits_SV) for ids in (full.bias_ids_SB, full.ban_ids_SX)
    )

    def penalise(z: Array, counts: Array) -> Array:
        repetition, frequency, presence = (
            a[:, None] for a in (full.repetition_S, full.frequency_S, full.presence_S)
        )
        output = (counts >> 1).astype(jnp.float32)
        repeated = jnp.where(z > 0, z / repetition, z * repetition)
        z = jnp.where(counts > 0, repeated, z)
        return z - (frequency * output + jnp.where(output > 0, presence, jnp.float32(0)))

    # The penalties in one fused pass, then the few biased entries set in place: a scatter-add that
    # came first would cost a copy of the logits, which the raw logprobs still need.
    at_SB = jnp.minimum(bias_SB, logits_SV.shape[1] - 1)
    take = functools.partial(jnp.take_along_axis, indices=at_SB, axis=1)
    biased_SB = penalise(take(logits_SV) + full.bias_SB, take(full.counts_SV))
    rows_S1 = jnp.arange(logits_SV.shape[0], dtype=jnp.int32)[:, None]
    z_SV = penalise(logits_SV, full.counts_SV)
    z_SV = z_SV.at[rows_S1, bias_SB].set(biased_SB, mode="drop")
    return z_SV.at[rows_S1, ban_SX].set(NEG_INF, mode="drop")


def _sums_with_and_without(
    logits_SV: Array,
    mask_SW: Array,
    max_S: Array,
    temp_S: Array,
    floor_S: Array,
    tau_S: Array,
    same_S: Array,
    vocabulary: Vocabulary,
) -> tuple[Array, Array]:
    """The sums of the tiles of this device that the draw is from, and of each row that of all
    logits at temperature tau, which is anything where `same_S`.
    """
    none_S = jnp.full_like(max_S, NEG_INF)
    allowed_SV = vocabulary.allowed(mask_SW, logits_SV)

    def at_once() -> tuple[Array, Array]:
        """One exponential of each logit, and one pass: XLA:CPU makes no two results in a loop, but
        a complex one.
        """
        p_SV = weights(logits_SV, max_S, temp_S, none_S)
        kept_SV = allowed_SV & (logits_SV >= floor_S[:, None])
        both_SN = tile_sums(lax.complex(jnp.where(kept_SV, p_SV, jnp.float32(0)), p_SV))
        return jnp.real(both_SN), total(vocabulary.gather(jnp.imag(both_SN)))

    def apart() -> tuple[Array, Array]:
        z_SV = jnp.where(allowed_SV, logits_SV, NEG_INF)
        own_SN = tile_sums(weights(z_SV, max_S, temp_S, floor_S))

        def summed() -> Array:
            return total(tile_sums(weights(logits_SV, max_S, tau_S, none_S), vocabulary))

        return own_SN, lax.cond(jnp.all(same_S), lambda: jnp.zeros_like(max_S), summed)

    is_one = jnp.all(same_S | (tau_S == temp_S)) & ~jnp.all(same_S)
    return lax.cond(is_one, at_once, apart)


def _noise(controls: Controls, own_tiles: int, vocabulary: Vocabulary) -> Array:
    """Noise of the SUM_TILE places in a tile, then of each tile that this device has."""
    if vocabulary.axis is None:
        return gumbels(controls, SUM_TILE + own_tiles)
    first = SUM_TILE + lax.axis_index(vocabulary.axis) * own_tiles
    noise = gumbels(controls, SUM_TILE), gumbels(controls, own_tiles, first)
    return jnp.concatenate(noise, axis=1)


def gumbels(controls: Controls, count: int, first: Array | None = None) -> Array:
    """Gumbel noise [S, count] of each row's next token: of the request's key, the sample index, the
    position and the place in the row, and of nothing else. first: the first place, None is 0.

    Source: threefry of the place under fold_in(fold_in(key, sample index), position), two places a
    call; 23 bits each, so that neither end of the uniform's range is reached.
    """
    keys_S = jax.random.wrap_key_data(controls.key_S2, impl="threefry2x32")
    fold_in = jax.vmap(jax.random.fold_in)
    keys_S = fold_in(fold_in(keys_S, controls.sample_index_S), controls.position_S)
    pairs = jnp.arange(-(-count // 2) if first is None else count // 2 + 1, dtype=jnp.uint32)
    if first is not None:
        pairs += (first // 2).astype(jnp.uint32)
    words_SP = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys_S, pairs)
    bits_SX = jax.random.key_data(words_SP).reshape(keys_S.shape[0], -1)
    if first is None:
        bits_SX = bits_SX[:, :count]
    else:  # the first place may be the second of its pair
        bits_SX = lax.dynamic_slice_in_dim(bits_SX, first % 2, count, axis=1)
    u_SX = ((bits_SX >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(u_SX))


def _draw(
    z_SV: Array,
    tile_max_SN: Array,
    own_SN: Array,
    max_S: Array,
    temp_S: Array,
    floor_S: Array,
    greedy_S: Array,
    gumbel_SX: Array,
    vocabulary: Vocabulary = WHOLE,
    mask_SW: Array | None = None,
) -> tuple[Array, Array]:
    """Gumbel-max in two levels: a tile of the vocabulary by its log-sum-exp, then a token of it.
    Returns the token, and the sums of all tiles.

    Exact, as the largest of noisy logits falls into a tile with the tile's probability; and stable:
    rounding noise in the logits turns hardly more draws than it must. own_SN: sums of the tiles
    that this device has. gumbel_SX: see _noise. mask_SW: of what z_SV knows nothing of. Greedy rows
    take the first tile, and in it the first token, with the row's maximum.
    """
    vocab, tiles = vocabulary.tokens(z_SV), tile_max_SN.shape[1]
    in_tile_SC, of_tile_SN = gumbel_SX[:, :SUM_TILE], gumbel_SX[:, SUM_TILE:]
    best_S = first_true(tile_max_SN == max_S[:, None])
    drawn_S, sums_SN = _draw_tile(own_SN, of_tile_SN, vocabulary)
    tile_S = jnp.where(greedy_S, best_S, drawn_S)
    tile_S = jnp.minimum(tile_S, tiles - 1)

    z_SC, ids_SC = gather_tiles(z_SV, tile_S[:, None], SUM_TILE, vocabulary)
    if mask_SW is not None:
        z_SC = jnp.where(vocabulary.bits(mask_SW, ids_SC), z_SC, NEG_INF)
    p_SC = weights(z_SC, max_S, temp_S, floor_S)
    # The tile's largest logit is kept whenever any of the tile is.
    at_S = jnp.where(greedy_S, _argmax(z_SC), _argmax(jnp.log(p_SC) + in_tile_SC))
    return jnp.minimum(pick(ids_SC, jnp.minimum(at_S, SUM_TILE - 1)), vocab - 1), sums_SN


def _draw_tile(own_SN: Array, gumbel_SN: Array, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """The tile with the largest noisy log-sum-exp, and the sums of all tiles. Each device looks
    among its own tiles; all that passes between them is one array.
    """
    score_SN = jnp.log(own_SN) + gumbel_SN
    at_S = _argmax(score_SN)
    if vocabulary.axis is None:
        return at_S, own_SN
    best_S = jnp.max(score_SN, axis=1)
    tail_S2 = jnp.stack([best_S, at_S.astype(jnp.float32)], axis=1)
    own_SX = jnp.concatenate([own_SN, tail_S2], axis=1)
    all_SDX = lax.all_gather(own_SX, vocabulary.axis, axis=1)  # D: the devices
    devices, tiles = all_SDX.shape[1], own_SN.shape[1]
    device_S = jnp.minimum(_argmax(all_SDX[:, :, tiles]), devices - 1)
    at_S = pick(all_SDX[:, :, tiles + 1], device_S).astype(jnp.int32)
    return device_S * tiles + at_S, all_SDX[:, :, :tiles].reshape(own_SN.shape[0], -1)


def _argmax(x_SX: Array) -> Array:
    """The first place of each row's maximum, X where there is none but NaN."""
    return first_true(x_SX == jnp.max(x_SX, axis=1, keepdims=True))
