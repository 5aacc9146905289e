"""From logits to tokens and log-probabilities, on the device, in three functions: `distribution`
applies the controls, `draw` draws, `report` says how likely that was. A new control is a line of
engine/layout.py, a field here, and its arithmetic.

Every row stands alone: its token and logprob depend on its own logits, controls and key, never on
its neighbours, its place in the batch, or which `lax.cond` branch a neighbour forces. The order of
the controls is vLLM's: logit bias, bans, penalties, temperature, min_p, top_k, top_p; the last
three are one number a row (thresholds.py). N is the tiles of the vocabulary, C the tokens of a
tile.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

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
from jpaged.runtime.thresholds import SEARCH_ROWS, thresholds, thresholds_by_kernels
from jpaged.runtime.vocabulary import WHOLE, Vocabulary

__all__ = ["Controls", "FullControls", "Sampled", "named", "sample", "token_logprobs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Controls:
    """What every row has. Off is: top_p 1, min_p 0, top_k 0; temperature 0 is greedy and ignores
    the thresholds; top_k 1 keeps one token, the lowest id of the largest logits.
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
    sampling_mask_S: (
        Array  # i32, 1 of rows that are told what they keep, which is then top_k at most
    )
    # i32, 2 * occurrences in the output so far + (1 if the token is in the prompt).
    counts_SV: Array


def named[T](record: type[T], columns: Mapping[str, Array], **others: Array) -> T:
    """Controls or FullControls: a field `name_S` is the column of that name (engine/layout.py);
    others: the fields that no column has.
    """
    of_columns = {f"{name}_S": column for name, column in columns.items()}
    fields = [field.name for field in dataclasses.fields(record)]  # pyright: ignore[reportArgumentType]
    return record(**{name: of_columns[name] for name in fields if name in of_columns}, **others)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """One token a row; rank and lists only of the full step. Lists fall in value, equal values rise
    in id.
    """

    token_S: Array  # i32
    logprob_S: Array  # f32, in the row's logprobs mode
    rank_S: Array | None = None  # i32, 1 is the most probable
    top_ids_SK: Array | None = None  # i32
    top_logprobs_SK: Array | None = None  # f32
    # f32, of rows that ask for tempered logprobs: of all that the mask allows.
    allowed_logprob_S: Array | None = None
    # i32, of rows with a sampling mask: what the token was drawn from, -1 past its end. f32: the
    # logarithm of its share of all that filters chose from.
    kept_ids_SK: Array | None = None
    kept_logprob_S: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What each row draws from: token v with a probability proportional to exp((z_v - max) / temp)
    where z_v >= floor and the mask allows v, 0 elsewhere.

    logits_SV: the model's. z_SV: after biases, bans, penalties and mask; where `mask_later`, the
    mask is yet to come. tile_max_SN: maxima of all tiles. sums_SN: sums of exponentials of the
    tiles that this device has. raw_S: the sum over all logits, mask or no mask, at tau against
    max_S, where a kernel gave it too. tau_S: what log-probabilities of the row's mode divide by.
    takes_first_S: rows that take the lowest id of the largest logits in place of a draw;
    keeps_one_S: those that keep nothing else, None without filters. kept_ids_SK, last_S: of rows
    with a sampling mask, what they keep, and the largest id that is kept of logits that equal the
    floor; -1 and the largest number where nothing is listed or left out. None where no row has one.
    """

    logits_SV: Array
    z_SV: Array
    mask_SW: Array | None
    mask_later: bool
    tile_max_SN: Array
    sums_SN: Array
    raw_S: Array | None
    max_S: Array
    temp_S: Array
    floor_S: Array
    tau_S: Array
    mode_S: Array
    takes_first_S: Array
    keeps_one_S: Array | None
    is_full: bool
    vocabulary: Vocabulary
    one_pass: OnePass | None
    kept_ids_SK: Array | None = None
    last_S: Array | None = None

    def weights(self, z_SX: Array, ids_SX: Array) -> Array:
        """Return the unnormalised probabilities of tokens [S, X] with these ids."""
        p_SX = weights(z_SX, self.max_S, self.temp_S, self.floor_S)
        if self.last_S is None:
            return p_SX
        return jnp.where(self.leaves_out(z_SX, ids_SX), jnp.float32(0), p_SX)

    def leaves_out(self, z_SX: Array, ids_SX: Array) -> Array:
        """Return which tokens a sampling mask leaves out, of those at the floor; bool [S, X]."""
        assert self.last_S is not None
        return (z_SX == self.floor_S[:, None]) & (ids_SX > self.last_S[:, None])


class _Sums(NamedTuple):
    """Fields of Kept that a pass over the vocabulary gives."""

    tile_max_SN: Array
    max_S: Array
    floor_S: Array
    sums_SN: Array
    raw_S: Array | None = None


def scratch_bytes(rows: int, vocab: int) -> int:
    """Return the bytes that a draw of so many rows allocates at most: f32 logits [rows, V], as
    often as a draw with every control holds them, and those of the rows whose thresholds are
    searched.
    """
    return 4 * vocab * (4 * rows + 4 * SEARCH_ROWS)


def sample(
    logits_SV: Array,
    controls: Controls,
    full: FullControls | None = None,
    mask_SW: Array | None = None,
    *,
    max_logprobs: int = 0,
    max_sampling_mask: int = 0,
    vocabulary: Vocabulary = WHOLE,
    filters: bool = True,
    one_pass: OnePass | None = None,
) -> Sampled:
    """Draw one token a row, and its log-probability. sampler_reference.py is the same in plain
    numpy, a row at a time.

    logits_SV f32, -inf allowed (a row of nothing else, or of NaN, gives some valid id and logprob
    NaN). `full` None is the plain step: no penalties, biases, bans or top lists; a row that uses
    none of them gets the same bits from both. mask_SW int32: a bit a token of the whole
    vocabulary, 0 forbids it; comes after all else. max_logprobs (K) is at most V, and so is
    max_sampling_mask: ids that a sampling mask has room for, 0 makes none. vocabulary: how V lies;
    of a share the results are those of the whole, on every device. filters: whether any row may
    have a top_k, a top_p or a min_p. one_pass: who sums, other than XLA.
    """
    kept = distribution(logits_SV, controls, full, mask_SW, vocabulary, filters, one_pass)
    if full is not None and max_sampling_mask:
        kept = _listed(kept, full.sampling_mask_S > 0, controls.top_k_S, max_sampling_mask)
    gumbel_SX = _noise(controls, kept.sums_SN.shape[1], vocabulary)
    token_S, total_S = draw(kept, gumbel_SX)
    return report(kept, token_S, total_S, max_logprobs)


def distribution(
    logits_SV: Array,
    controls: Controls,
    full: FullControls | None,
    mask_SW: Array | None,
    vocabulary: Vocabulary,
    filters: bool,
    one_pass: OnePass | None,
) -> Kept:
    """Apply every control: what each row keeps, and the sums of its tiles. Arguments as of
    `sample`.
    """
    greedy_S = controls.temperature_S <= 0
    # Below 1e-30 a quotient of two logits' difference is 0 or -inf already; denormals would divide
    # 0 by 0.
    temp_S = jnp.where(
        greedy_S, jnp.float32(1), jnp.maximum(controls.temperature_S, jnp.float32(1e-30))
    )
    mode_S = controls.logprobs_mode_S
    tau_S = jnp.where(mode_S == RAW, jnp.float32(1), temp_S)
    z_SV = logits_SV if full is None else _apply_full(logits_SV, full, vocabulary)
    # A draw that is plain but for its mask makes what is allowed anew in each of its passes.
    mask_later = mask_SW is not None and full is None and not filters and one_pass is None
    if mask_SW is not None and not mask_later:
        # Stored: else each search for a threshold makes it anew.
        z_SV = jnp.where(vocabulary.allowed(mask_SW, z_SV), z_SV, NEG_INF)
        z_SV = lax.optimization_barrier(z_SV)
    if mask_later:
        assert mask_SW is not None
        sums = _masked_sums(logits_SV, mask_SW, temp_S, tau_S, mode_S == PROCESSED, vocabulary)
    elif filters and one_pass is not None and vocabulary.axis is None:
        filtered = (controls.min_p_S, controls.top_p_S, controls.top_k_S)
        of_rows = thresholds_by_kernels(z_SV, temp_S, tau_S, greedy_S, *filtered, one_pass)
        is_raw_too = full is None and mask_SW is None
        sums = _Sums(*of_rows[:4], of_rows.raw_S if is_raw_too else None)
    elif filters or one_pass is None:
        tile_max_SN = tile_max(z_SV, SUM_TILE, vocabulary)
        max_S = finite_max(tile_max_SN)
        filtered = (controls.min_p_S, controls.top_p_S, controls.top_k_S)
        floor_S = thresholds(z_SV, max_S, temp_S, greedy_S, *filtered, vocabulary, filters)
        sums_SN = kept_sums(z_SV, max_S, temp_S, floor_S, one_pass)
        sums = _Sums(tile_max_SN, max_S, floor_S, sums_SN)
    else:
        is_raw_too = full is None and mask_SW is None
        sums = _sums_in_one_pass(z_SV, temp_S, is_raw_too, vocabulary, one_pass)
    keeps_one_S = ~greedy_S & (controls.top_k_S == 1) if filters else None
    return Kept(
        logits_SV=logits_SV,
        z_SV=z_SV,
        mask_SW=mask_SW,
        mask_later=mask_later,
        temp_S=temp_S,
        tau_S=tau_S,
        mode_S=mode_S,
        takes_first_S=greedy_S if keeps_one_S is None else greedy_S | keeps_one_S,
        keeps_one_S=keeps_one_S,
        is_full=full is not None,
        vocabulary=vocabulary,
        one_pass=one_pass,
        **sums._asdict(),
    )


def draw(kept: Kept, gumbel_SX: Array) -> tuple[Array, Array]:
    """Gumbel-max in two levels: a tile of the vocabulary by its log-sum-exp, then a token of it.
    Returns the token, and the sum of all that the row keeps.

    Exact, as the largest of noisy logits falls into a tile with the tile's probability; and stable:
    rounding noise in the logits turns hardly more draws than it must. gumbel_SX: see _noise. Rows
    that take the first take the first tile, and in it the first token, with the row's maximum.
    """
    vocabulary = kept.vocabulary
    vocab, tiles = vocabulary.tokens(kept.z_SV), kept.tile_max_SN.shape[1]
    in_tile_SC, of_tile_SN = gumbel_SX[:, :SUM_TILE], gumbel_SX[:, SUM_TILE:]
    best_S = first_true(kept.tile_max_SN == kept.max_S[:, None])
    drawn_S, sums_SN = _draw_tile(kept.sums_SN, of_tile_SN, vocabulary)
    tile_S = jnp.where(kept.takes_first_S, best_S, drawn_S)
    tile_S = jnp.minimum(tile_S, tiles - 1)

    z_SC, ids_SC = gather_tiles(kept.z_SV, tile_S[:, None], SUM_TILE, vocabulary)
    if kept.mask_later:
        assert kept.mask_SW is not None
        z_SC = jnp.where(vocabulary.bits(kept.mask_SW, ids_SC), z_SC, NEG_INF)
    p_SC = kept.weights(z_SC, ids_SC)
    # The tile's largest logit is kept whenever any of the tile is.
    at_S = jnp.where(kept.takes_first_S, _argmax(z_SC), _argmax(jnp.log(p_SC) + in_tile_SC))
    token_S = jnp.minimum(pick(ids_SC, jnp.minimum(at_S, SUM_TILE - 1)), vocab - 1)
    total_S = total(sums_SN)
    if kept.keeps_one_S is not None:  # equal logits were summed too
        total_S = jnp.where(kept.keeps_one_S, jnp.minimum(total_S, jnp.float32(1)), total_S)
    return token_S, total_S


def report(kept: Kept, token_S: Array, total_S: Array, max_logprobs: int) -> Sampled:
    """Return the tokens with their log-probabilities, in the full step their ranks and alternatives
    too. total_S: of `draw`.
    """
    max_S, sum_S = _denominators(kept, total_S)
    allowed_S = None if kept.mask_SW is None else _allowed_logprobs(kept, max_S, sum_S)
    if not kept.is_full:
        value_S = kept.vocabulary.pick(kept.logits_SV, token_S)
        logprob_S = logprob(value_S, max_S, kept.tau_S, sum_S)
        return Sampled(token_S=token_S, logprob_S=logprob_S, allowed_logprob_S=allowed_S)
    value_S, rank_S, top_SK, top_ids_SK = _ranked(kept, token_S, max_logprobs)
    return Sampled(
        token_S=token_S,
        logprob_S=logprob(value_S, max_S, kept.tau_S, sum_S),
        rank_S=rank_S,
        top_ids_SK=top_ids_SK,
        top_logprobs_SK=logprob(top_SK, max_S[:, None], kept.tau_S[:, None], sum_S[:, None]),
        allowed_logprob_S=allowed_S,
        kept_ids_SK=kept.kept_ids_SK,
        kept_logprob_S=None if kept.kept_ids_SK is None else _kept_logprobs(kept, total_S),
    )


def _listed(kept: Kept, asks_S: Array, top_k_S: Array, most: int) -> Kept:
    """List what each row that asks for it keeps, in `most` columns, and leave out all else.

    More than top_k tokens are kept where several equal the last one: the lowest ids stay.
    """
    z_SV, vocabulary = kept.z_SV, kept.vocabulary
    size, all_ids = min(most + 1, vocabulary.tokens(z_SV)), jnp.iinfo(jnp.int32).max
    no_end_S = jnp.full(asks_S.shape, all_ids)

    def nothing() -> tuple[Array, Array, Array]:
        return jnp.full((asks_S.shape[0], most), jnp.int32(-1)), no_end_S, kept.sums_SN

    def listed() -> tuple[Array, Array, Array]:
        top_SK, ids_SK = top_values(z_SV, size, vocabulary)
        place_SK = lax.broadcasted_iota(jnp.int32, top_SK.shape, 1)
        is_kept_SK = (top_SK >= kept.floor_S[:, None]) & (top_SK > NEG_INF) & asks_S[:, None]
        is_over_SK = place_SK >= top_k_S[:, None]
        is_cut_S = jnp.any(is_kept_SK & is_over_SK, axis=1)
        last_S = pick(ids_SK, jnp.clip(top_k_S - 1, 0, size - 1))
        last_S = jnp.where(is_cut_S, last_S, no_end_S)
        cut = dataclasses.replace(kept, last_S=last_S)
        sums_SN = lax.cond(
            jnp.any(is_cut_S),
            lambda: tile_sums(cut.weights(z_SV, vocabulary.ids(z_SV))),
            lambda: kept.sums_SN,
        )
        kept_ids_SK = jnp.where(is_kept_SK & ~is_over_SK, ids_SK, jnp.int32(-1))[:, :most]
        beyond = [(0, 0), (0, most - kept_ids_SK.shape[1])]
        return jnp.pad(kept_ids_SK, beyond, constant_values=-1), last_S, sums_SN

    kept_ids_SK, last_S, sums_SN = lax.cond(jnp.any(asks_S), listed, nothing)
    return dataclasses.replace(kept, kept_ids_SK=kept_ids_SK, last_S=last_S, sums_SN=sums_SN)


def _kept_logprobs(kept: Kept, total_S: Array) -> Array:
    """Return the logarithm of the share that rows with a sampling mask keep of all that filters
    chose from; 0 elsewhere. total_S: of `draw`.
    """
    assert kept.kept_ids_SK is not None
    has_mask_S = kept.kept_ids_SK[:, 0] >= 0

    def mass() -> Array:
        none_S = jnp.full_like(kept.max_S, NEG_INF)
        of_all = kept.z_SV, kept.max_S, kept.temp_S, none_S, kept.one_pass, kept.vocabulary
        share_S = total_S / total(kept_sums(*of_all))
        return jnp.where(has_mask_S, jnp.log(share_S), jnp.float32(0))

    return lax.cond(jnp.any(has_mask_S), mass, lambda: jnp.zeros_like(total_S))


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


def _masked_sums(
    logits_SV: Array,
    mask_SW: Array,
    temp_S: Array,
    tau_S: Array,
    processed_S: Array,
    vocabulary: Vocabulary,
) -> _Sums:
    """Sum rows without filters and penalties under their masks, without storing masked logits.

    raw_S may be anything where `processed_S`.
    """
    tile_max_SN = masked_tile_max(logits_SV, mask_SW, vocabulary)
    max_S, none_S = finite_max(tile_max_SN), jnp.full_like(temp_S, NEG_INF)
    allowed = functools.partial(vocabulary.allowed, mask_SW, logits_SV)  # in a branch: never stored

    def at_once() -> tuple[Array, Array]:
        """One exponential of each logit, and one pass: XLA:CPU makes no two results in a loop, but
        a complex one.
        """
        p_SV = weights(logits_SV, max_S, temp_S, none_S)
        kept_SV = allowed() & (logits_SV >= none_S[:, None])
        both_SN = tile_sums(lax.complex(jnp.where(kept_SV, p_SV, jnp.float32(0)), p_SV))
        return jnp.real(both_SN), total(vocabulary.gather(jnp.imag(both_SN)))

    def apart() -> tuple[Array, Array]:
        z_SV = jnp.where(allowed(), logits_SV, NEG_INF)
        sums_SN = tile_sums(weights(z_SV, max_S, temp_S, none_S))

        def summed() -> Array:
            return total(tile_sums(weights(logits_SV, max_S, tau_S, none_S), vocabulary))

        return sums_SN, lax.cond(jnp.all(processed_S), lambda: jnp.zeros_like(max_S), summed)

    is_one = jnp.all(processed_S | (tau_S == temp_S)) & ~jnp.all(processed_S)
    sums_SN, raw_S = lax.cond(is_one, at_once, apart)
    return _Sums(tile_max_SN, max_S, none_S, sums_SN, raw_S)


def _sums_in_one_pass(
    z_SV: Array, temp_S: Array, is_raw_too: bool, vocabulary: Vocabulary, one_pass: OnePass
) -> _Sums:
    """Sum rows without filters by a kernel that reads the logits once.

    is_raw_too: the logits are the model's, so that the kernel also has their sum at temperature 1.
    """
    none_S = jnp.full_like(temp_S, NEG_INF)
    sums = one_pass.read(z_SV, temp_S, none_S)
    tile_max_SN = vocabulary.gather(sums.max_SN)
    max_S = finite_max(tile_max_SN)
    raw_S = total(vocabulary.gather(sums.all_against(max_S))) if is_raw_too else None
    return _Sums(tile_max_SN, max_S, none_S, sums.against(max_S), raw_S)


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


def _draw_tile(sums_SN: Array, gumbel_SN: Array, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """Return the tile with the largest noisy log-sum-exp, and the sums of all tiles. Each device
    looks among its own tiles; all that passes between them is one array.
    """
    score_SN = jnp.log(sums_SN) + gumbel_SN
    at_S = _argmax(score_SN)
    if vocabulary.axis is None:
        return at_S, sums_SN
    best_S = jnp.max(score_SN, axis=1)
    tail_S2 = jnp.stack([best_S, at_S.astype(jnp.float32)], axis=1)
    sums_SX = jnp.concatenate([sums_SN, tail_S2], axis=1)
    all_SDX = lax.all_gather(sums_SX, vocabulary.axis, axis=1)  # D: the devices
    devices, tiles = all_SDX.shape[1], sums_SN.shape[1]
    device_S = jnp.minimum(_argmax(all_SDX[:, :, tiles]), devices - 1)
    at_S = pick(all_SDX[:, :, tiles + 1], device_S).astype(jnp.int32)
    return device_S * tiles + at_S, all_SDX[:, :, :tiles].reshape(sums_SN.shape[0], -1)


def _argmax(x_SX: Array) -> Array:
    """Return the first place of each row's maximum, X where there is none but NaN."""
    return first_true(x_SX == jnp.max(x_SX, axis=1, keepdims=True))


def _denominators(kept: Kept, total_S: Array) -> tuple[Array, Array]:
    """Return what each row's log-probabilities are taken against, in its mode: the maximum of the
    logits, and the sum of their exponentials beside it.
    """
    logits_SV, mask_SW, vocabulary = kept.logits_SV, kept.mask_SW, kept.vocabulary
    processed_S = kept.mode_S == PROCESSED
    none_S = jnp.full_like(kept.max_S, NEG_INF)
    max_S, same_S = kept.max_S, processed_S  # same: the sum is that of the draw
    if kept.is_full:
        # Of what is allowed, as below: a row's bits do not depend on whether others have penalties.
        if mask_SW is None:
            raw_max_S = finite_max(tile_max(logits_SV, SUM_TILE, vocabulary))
        else:
            raw_max_S = finite_max(masked_tile_max(logits_SV, mask_SW, vocabulary))
        max_S = jnp.where(processed_S, kept.max_S, raw_max_S)
    elif mask_SW is None:
        same_S = processed_S | ((kept.tau_S == kept.temp_S) & (kept.floor_S == NEG_INF))

    def summed(max_S: Array) -> Array:
        sums_SN = kept_sums(logits_SV, max_S, kept.tau_S, none_S, kept.one_pass, vocabulary)
        return jnp.where(same_S, total_S, total(sums_SN))

    if kept.raw_S is None:
        sum_S = lax.cond(jnp.all(same_S), lambda: total_S, lambda: summed(max_S))
    else:
        sum_S = jnp.where(same_S, total_S, kept.raw_S)
    if mask_SW is None:
        return max_S, sum_S
    # The largest of what is allowed does for the raw logits too, and saves looking for theirs,
    # unless some are so far above it that their exponentials overflow.
    is_over_S = jnp.isposinf(sum_S) & ~same_S

    def again() -> tuple[Array, Array]:
        raw_max_S = finite_max(tile_max(logits_SV, SUM_TILE, vocabulary))
        max_again_S = jnp.where(is_over_S, raw_max_S, max_S)
        return max_again_S, jnp.where(is_over_S, summed(max_again_S), sum_S)

    return lax.cond(jnp.any(is_over_S), again, lambda: (max_S, sum_S))


def _allowed_logprobs(kept: Kept, max_S: Array, sum_S: Array) -> Array:
    """Return the logarithm of what the model gives to all that the mask allows, of rows that ask
    for tempered log-probabilities; 0 elsewhere. max_S, sum_S: of _denominators.
    """
    logits_SV, mask_SW, vocabulary = kept.logits_SV, kept.mask_SW, kept.vocabulary
    assert mask_SW is not None
    is_tempered_S = kept.mode_S == TEMPERED

    def mass() -> Array:
        p_SV = weights(logits_SV, max_S, kept.temp_S, jnp.full_like(max_S, NEG_INF))
        p_SV = jnp.where(vocabulary.allowed(mask_SW, p_SV), p_SV, jnp.float32(0))
        ratio_S = total(tile_sums(p_SV, vocabulary)) / sum_S
        return jnp.where(is_tempered_S, jnp.log(ratio_S), jnp.float32(0))

    return lax.cond(jnp.any(is_tempered_S), mass, lambda: jnp.zeros_like(max_S))


def _ranked(kept: Kept, token_S: Array, max_logprobs: int) -> tuple[Array, Array, Array, Array]:
    """Return the token's logit in the row's mode and its rank, and the largest logits with their
    ids.
    """
    z_SV, vocabulary, processed_S = kept.z_SV, kept.vocabulary, kept.mode_S == PROCESSED

    def lists(source_SV: Array) -> tuple[Array, Array, Array, Array]:
        value_S = vocabulary.pick(source_SV, token_S)
        rank_S = rank(source_SV, value_S, token_S, vocabulary)
        return value_S, rank_S, *top_values(source_SV, max_logprobs, vocabulary)

    def processed() -> tuple[Array, Array, Array, Array]:
        is_kept_SV = z_SV >= kept.floor_S[:, None]
        if kept.last_S is not None:
            is_kept_SV &= ~kept.leaves_out(z_SV, vocabulary.ids(z_SV))
        if kept.keeps_one_S is not None:
            is_drawn_SV = vocabulary.ids(z_SV) == token_S[:, None]
            is_kept_SV = jnp.where(kept.keeps_one_S[:, None], is_drawn_SV, is_kept_SV)
        kept_SV = jnp.where(is_kept_SV, z_SV, NEG_INF)
        return lists(jnp.where(processed_S[:, None], kept_SV, kept.logits_SV))

    return lax.cond(jnp.any(processed_S), processed, lambda: lists(kept.logits_SV))
