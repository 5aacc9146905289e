"""The two compiled steps, prefill and decode: packed inputs -> model -> sampling -> packed outputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.batch import CONTROLS, Bucket, input_sections, output_sections
from jpaged.models.decoder import Decoder, bind
from jpaged.runtime.attention import Kernel, PagedCache
from jpaged.runtime.kv_cache import copy_blocks
from jpaged.runtime.sampling import Controls, FullControls, Sampled, sample, token_logprobs

COUNTS_CHUNK = 2048  # tokens a call of set_counts: one shape, so one compile


def make_step(
    bucket: Bucket, model: ModelConfig, config: EngineConfig, tensor_axis: str | None, kernel: Kernel
) -> Callable[..., Any]:
    """The step of one bucket.

    step(params, pool, last_R, counts_RV, packed) -> (pool, last_R, counts_RV, out): pool [L*N, P, 2K, D]; last_R
    int32, the last token of each device slot; counts_RV int32 (see FullControls) or None for plain buckets; packed
    and out int32, laid out by engine/batch.py. The first three are donated and updated in place.
    """
    full = bucket.features != "plain"

    def step(params: Any, pool: Array, last_R: Array, counts_RV: Array | None, packed: Array):
        fields = _unpack(packed, bucket, config)
        context_lens_S, slots_S, tiles = fields["context_lens"], fields["slots"], None
        if bucket.phase == "decode":
            pool = copy_blocks(pool, fields["copies"], num_layers=model.num_layers)
            tokens_T = jnp.where(fields["tokens"] < 0, jnp.take(last_R, slots_S, mode="clip"), fields["tokens"])
            row_T, positions_T = jnp.arange(bucket.rows, dtype=jnp.int32), context_lens_S - 1
            query_starts_S1 = jnp.arange(bucket.rows + 1, dtype=jnp.int32)
        else:
            tokens_T, query_starts_S1 = fields["tokens"], fields["query_starts"]
            row_T, positions_T = _locate(query_starts_S1, context_lens_S, bucket.tokens)
            tiles = kernel.prefill_tiles(query_starts_S1, context_lens_S, bucket.tokens, model.group_size)
        cache = PagedCache(
            pool=pool,
            block_table_SM=fields["block_table"],
            context_lens_S=context_lens_S,
            query_starts_S1=query_starts_S1,
            slot_mapping_T=_slots(row_T, positions_T, fields["block_table"], config.block_size, pool),
            num_layers=model.num_layers,
            decode=bucket.phase == "decode",
            tensor_axis=tensor_axis,
            kernel=kernel,
            tiles=tiles,
        )
        decoder = bind(model, params)
        x_TE, written = decoder(tokens_T, jnp.maximum(positions_T, 0), cache)
        assert written is not None
        x_SE = x_TE
        if bucket.phase == "prefill":
            x_SE = jnp.take(x_TE, query_starts_S1[1:] - 1, axis=0, mode="clip")  # each row's last token of this chunk
        controls = _controls(fields)
        with jax.named_scope("sample"):
            sampled = sample(
                decoder.logits(x_SE),
                controls,
                _full_controls(fields, counts_RV, slots_S) if full else None,
                max_logprobs=config.max_logprobs if full else 0,
            )
        slots_S = jnp.where(fields["samples"] > 0, slots_S, config.max_num_seqs)  # others are dropped
        last_R = last_R.at[slots_S].set(sampled.token_S, mode="drop")
        if counts_RV is not None:
            counts_RV = counts_RV.at[slots_S, sampled.token_S].add(jnp.int32(2), mode="drop")
        outputs = _outputs(sampled)
        if bucket.features == "prompt":
            outputs |= _score_prompt(decoder, x_TE, fields, controls, row_T, config)
        return written.pool, last_R, counts_RV, _pack_outputs(outputs, bucket, config)

    return step


def set_counts(counts_RV: Array, slot: Array, tokens_C: Array, num_prompt: Array, clear: Array) -> Array:
    """Enter a chunk of tokens into one slot's counts: the first `num_prompt` as prompt, the rest as output.

    tokens_C is padded with V or more; clear > 0 forgets what the slot held.
    """
    vocab = counts_RV.shape[1]
    is_prompt_C = jnp.arange(tokens_C.shape[0], dtype=jnp.int32) < num_prompt
    row_V = jnp.where(clear > 0, jnp.int32(0), counts_RV[slot])
    seen_V = (row_V & 1).at[jnp.where(is_prompt_C, tokens_C, vocab)].set(1, mode="drop")
    drawn_V = (row_V >> 1).at[jnp.where(is_prompt_C, vocab, tokens_C)].add(1, mode="drop")
    return counts_RV.at[slot].set(2 * drawn_V + seen_V)


def _unpack(packed: Array, bucket: Bucket, config: EngineConfig) -> dict[str, Array]:
    sections, _ = input_sections(bucket, config)
    return {name: packed[s.offset : s.offset + int(np.prod(s.shape))].reshape(s.shape) for name, s in sections.items()}


def _locate(query_starts_S1: Array, context_lens_S: Array, num_tokens: int) -> tuple[Array, Array]:
    """Row and position of each packed token; row S and position -1 for padding."""
    ends_S = query_starts_S1[1:]
    tokens_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(ends_S[None, :] <= tokens_T[:, None], axis=1, dtype=jnp.int32)
    offset_S = context_lens_S - ends_S  # the row's last token ends both its chunk and its context
    positions_T = tokens_T + jnp.take(offset_S, row_T, mode="clip")
    return row_T, jnp.where(row_T < ends_S.shape[0], positions_T, -1)


def _slots(row_T: Array, positions_T: Array, block_table_SM: Array, block_size: int, pool: Array) -> Array:
    """Where each token's KV goes, as block * P + slot; padding (position -1) goes past the end of the pool."""
    flat = row_T * block_table_SM.shape[1] + positions_T // block_size
    block_T = jnp.take(block_table_SM.reshape(-1), flat, mode="clip")
    return jnp.where(positions_T >= 0, block_T * block_size + positions_T % block_size, pool.shape[0] * block_size)


def _controls(fields: dict[str, Array]) -> Controls:
    columns = {name: _cast(fields["controls"][:, i], dtype) for i, (name, dtype) in enumerate(CONTROLS)}
    fields |= columns
    return Controls(
        temperature_S=columns["temperature"],
        top_p_S=columns["top_p"],
        min_p_S=columns["min_p"],
        top_k_S=columns["top_k"],
        key_S2=jnp.stack([columns["key_hi"], columns["key_lo"]], axis=1),
        sample_index_S=columns["sample_index"],
        position_S=fields["context_lens"],  # the token drawn now comes right after the context
        logprobs_mode_S=columns["mode"],
    )


def _full_controls(fields: dict[str, Array], counts_RV: Array | None, slots_S: Array) -> FullControls:
    assert counts_RV is not None
    return FullControls(
        presence_S=fields["presence"],
        frequency_S=fields["frequency"],
        repetition_S=fields["repetition"],
        bias_ids_SB=fields["bias_ids"],
        bias_SB=_cast(fields["bias"], np.float32),
        ban_ids_SX=fields["ban_ids"],
        counts_SV=jnp.take(counts_RV, slots_S, axis=0, mode="clip"),
    )


def _outputs(sampled: Sampled) -> dict[str, Array]:
    outputs = {"tokens": sampled.token_S, "logprobs": sampled.logprob_S}
    if sampled.rank_S is not None and sampled.top_ids_SK is not None and sampled.top_logprobs_SK is not None:
        outputs |= {"ranks": sampled.rank_S, "top_ids": sampled.top_ids_SK, "top_logprobs": sampled.top_logprobs_SK}
    return outputs


def _score_prompt(
    decoder: Decoder, x_TE: Array, fields: dict[str, Array], controls: Controls, row_T: Array, config: EngineConfig
) -> dict[str, Array]:
    scored = token_logprobs(
        decoder.logits,
        x_TE,
        fields["targets"],
        jnp.take(controls.temperature_S, row_T, mode="clip"),
        jnp.take(controls.logprobs_mode_S, row_T, mode="clip"),
        max_logprobs=config.max_logprobs,
    )
    return {
        "prompt_logprobs": scored.logprob_T,
        "prompt_ranks": scored.rank_T,
        "prompt_top_ids": scored.top_ids_TK,
        "prompt_top_logprobs": scored.top_logprobs_TK,
    }


def _pack_outputs(outputs: dict[str, Array], bucket: Bucket, config: EngineConfig) -> Array:
    sections, _ = output_sections(bucket, config)
    return jnp.concatenate([_cast(outputs[name], np.int32).reshape(-1) for name in sections])


def _cast(x: Array, dtype: Any) -> Array:
    """The same 32 bits under another type."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
