"""The compiled steps, prefill with the draw after it, and decode: packed inputs -> model -> draw ->
packed outputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jpaged.config import EngineConfig
from jpaged.engine.buckets import CONTROLS, Bucket, input_sections, output_sections
from jpaged.engine.packing import PAD_TOKEN
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder, bind
from jpaged.models.kv_view import kv_groups
from jpaged.runtime.attention import Kernel, PagedCache
from jpaged.runtime.kv_cache import copy_blocks
from jpaged.runtime.sampler import Controls, FullControls, Sampled, sample, token_logprobs

STOPPED = -1  # in place of a slot's last token
COUNTS_CHUNK = 2048  # tokens a call of set_counts: one shape, so one compile


def make_step(
    bucket: Bucket,
    model: ModelConfig,
    config: EngineConfig,
    tensor_axis: str | None,
    kernel: Kernel,
) -> Callable[..., Any]:
    """The step of one bucket; packed and out are int32, laid out by engine/batch.py.

    prefill(params, pool, packed) -> (pool, hidden_RE, packed of the sample step, out or None)
    sample(params, hidden_RE, last_R, counts_RV, packed) -> (last_R, counts_RV, out)
    decode(params, pool, last_R, counts_RV, packed) -> (pool, last_R, counts_RV, out)

    pool [L*N, P, 2K, D]; hidden_RE: final hidden states of the rows that draw; last_R int32: the
    last token of each device slot, STOPPED where a stop id was drawn; counts_RV int32 (see
    FullControls) or None for plain buckets. Pool, last_R and counts_RV are donated and updated in
    place.
    """
    steps = {"prefill": _make_prefill, "sample": _make_sample, "decode": _make_decode}
    return steps[bucket.phase](_Setting(bucket, model, config, tensor_axis, kernel))


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What a step is made for."""

    bucket: Bucket
    model: ModelConfig
    config: EngineConfig
    tensor_axis: str | None
    kernel: Kernel

    def unpack(self, packed: Array) -> dict[str, Array]:
        """The inputs by name, sliced as batch.pack laid them out."""
        sections, _ = input_sections(self.bucket, self.config)
        return {
            name: packed[s.offset : s.offset + int(np.prod(s.shape))].reshape(s.shape)
            for name, s in sections.items()
        }

    def pack(self, outputs: dict[str, Array]) -> Array:
        sections, _ = output_sections(self.bucket, self.config)
        return jnp.concatenate([_cast(outputs[name], np.int32).reshape(-1) for name in sections])

    def drawn(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of what every step draws."""
        sections, _ = output_sections(self.bucket, self.config)
        kinds = {name: jnp.float32 if name.endswith("logprobs") else jnp.int32 for name in sections}
        return {name: (s.shape, kinds[name]) for name, s in sections.items() if name != "num_drawn"}

    def cache(
        self,
        pool: Array,
        block_table_SM: Array,
        context_lens_S: Array,
        starts_S1: Array,
        slots_T: Array,
    ):
        prepared, bucket, groups = None, self.bucket, kv_groups(self.model)
        if bucket.phase == "prefill" and len(groups) == 1:
            window = groups[0].window
            prepared = self.kernel.prepare(
                starts_S1, context_lens_S, num_tokens=bucket.tokens, sliding_window=window
            )
        return PagedCache(
            pool=pool,
            block_table_SM=block_table_SM,
            context_lens_S=context_lens_S,
            query_start_loc_S1=starts_S1,
            num_tokens=starts_S1[-1] if bucket.phase == "prefill" else _last_row(context_lens_S),
            slot_mapping_T=slots_T,
            num_layers=self.model.num_layers,
            decode=bucket.phase == "decode",
            tensor_axis=self.tensor_axis,
            kernel=self.kernel,
            prepared=prepared,
        )


def _make_prefill(to: _Setting) -> Callable[..., Any]:
    def step(params: Any, pool: Array, packed: Array):
        fields = to.unpack(packed)
        if "copies" in fields:
            pool = copy_blocks(pool, fields["copies"], num_layers=to.model.num_layers)
        starts_S1, context_lens_S, table_SM = (
            fields["query_starts"],
            fields["context_lens"],
            fields["block_table"],
        )
        row_T, positions_T = _locate(starts_S1, context_lens_S, to.bucket.tokens)
        slots_T = _slots(row_T, positions_T, table_SM, to.config.block_size, pool)
        decoder = bind(to.model, params)
        cache = to.cache(pool, table_SM, context_lens_S, starts_S1, slots_T)
        x_TE, written = decoder(fields["tokens"], jnp.maximum(positions_T, 0), cache)
        assert written is not None
        # What follows does not fuse into the last norm: a token's bits are those of a prefill that
        # scores its prompt.
        x_TE, out = jax.lax.optimization_barrier(x_TE), None
        if to.bucket.features == "prompt":
            out = to.pack(_score_prompt(decoder, x_TE, fields, row_T, to.config))
        hidden_RE = jnp.take(x_TE, fields["drawn_at"], axis=0, mode="clip")
        return written.pool, hidden_RE, fields["sample"], out

    return step


def _make_sample(to: _Setting) -> Callable[..., Any]:
    rows = to.bucket.rows

    def step(params: Any, hidden_RE: Array, last_R: Array, counts_RV: Array | None, packed: Array):
        fields = {name: field[:rows] for name, field in to.unpack(packed).items()}
        logits_SV = bind(to.model, params).logits(
            hidden_RE[:rows], _last_row(fields["context_lens"])
        )
        drawn = _draw(
            to, logits_SV, fields, fields["context_lens"], counts_RV, fields["open_after"]
        )
        slots_S = fields["slots"]
        last_R = last_R.at[slots_S].set(_last(drawn), mode="drop")
        counts_RV = _count(counts_RV, slots_S, drawn.token_S)
        outputs = {name: field[None] for name, field in drawn.outputs.items()}
        return last_R, counts_RV, to.pack(outputs | {"num_drawn": jnp.ones(rows, jnp.int32)})

    return step


def _make_decode(to: _Setting) -> Callable[..., Any]:
    rows, most, block_size = to.bucket.rows, to.bucket.steps, to.config.block_size
    row_S, starts_S1 = np.arange(rows, dtype=np.int32), np.arange(rows + 1, dtype=np.int32)

    def step(params: Any, pool: Array, last_R: Array, counts_RV: Array | None, packed: Array):
        fields = to.unpack(packed)
        decoder, table_SM, slots_S = bind(to.model, params), fields["block_table"], fields["slots"]

        def body(state: Any) -> Any:
            """Step i of the rows that have more than i steps; the others are as if they were
            padding.
            """
            i, last_S, steps_S, pool, counts_RV, outputs = state
            runs_S = i < steps_S
            context_lens_S = jnp.where(runs_S, fields["context_lens"] + i, 0)
            positions_S = context_lens_S - 1
            written_S = _slots(jnp.asarray(row_S), positions_S, table_SM, block_size, pool)
            cache = to.cache(pool, table_SM, context_lens_S, jnp.asarray(starts_S1), written_S)
            x_SE, cache = decoder(jnp.maximum(last_S, 0), jnp.maximum(positions_S, 0), cache)
            assert cache is not None
            logits_SV, open_after_S = (
                decoder.logits(x_SE, cache.num_tokens),
                fields["open_after"] - i,
            )
            drawn = _draw(to, logits_SV, fields, context_lens_S, counts_RV, open_after_S)
            counts_RV = _count(
                counts_RV, jnp.where(runs_S, slots_S, to.config.max_num_seqs), drawn.token_S
            )
            last_S = jnp.where(runs_S, _last(drawn), last_S)
            steps_S = jnp.where(runs_S & drawn.stops_S, i + 1, steps_S)
            outputs = {name: outputs[name].at[i].set(x) for name, x in drawn.outputs.items()}
            return i + 1, last_S, steps_S, cache.pool, counts_RV, outputs

        pool = copy_blocks(pool, fields["copies"], num_layers=to.model.num_layers)
        last_S = jnp.where(
            fields["tokens"] < 0, jnp.take(last_R, slots_S, mode="clip"), fields["tokens"]
        )
        steps_S = jnp.where(
            last_S < 0, 0, fields["steps"]
        )  # none for those that stopped in the dispatch before
        outputs = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in to.drawn().items()}
        state = (jnp.int32(0), last_S, steps_S, pool, counts_RV, outputs)
        if most == 1:
            state = body(state)
        else:
            state = jax.lax.while_loop(lambda state: jnp.any(state[0] < state[2]), body, state)
        _, last_S, steps_S, pool, counts_RV, outputs = state
        ran_S = jnp.where(steps_S > 0, slots_S, to.config.max_num_seqs)  # others are dropped
        last_R = last_R.at[ran_S].set(last_S, mode="drop")
        return pool, last_R, counts_RV, to.pack(outputs | {"num_drawn": steps_S})

    return step


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """One token a row, whether it is a stop id that stops it, and what the host is told."""

    token_S: Array
    stops_S: Array
    outputs: dict[str, Array]


def _draw(
    to: _Setting,
    logits_SV: Array,
    fields: dict[str, Array],
    context_lens_S: Array,
    counts_RV: Array | None,
    open_after_S: Array,
) -> _Drawn:
    """Draw the token that comes right after each row's context. open_after_S > 0: stop ids neither
    stop nor occur.
    """
    columns = {
        name: _cast(fields["controls"][:, i], dtype) for i, (name, dtype) in enumerate(CONTROLS)
    }
    stop_ids_SX = fields["controls"][:, len(CONTROLS) :]
    controls = Controls(
        temperature_S=columns["temperature"],
        top_p_S=columns["top_p"],
        min_p_S=columns["min_p"],
        top_k_S=columns["top_k"],
        key_S2=jnp.stack([columns["key_hi"], columns["key_lo"]], axis=1),
        sample_index_S=columns["sample_index"],
        position_S=context_lens_S,
        logprobs_mode_S=columns["mode"],
    )
    full = None
    if to.bucket.is_full:
        assert counts_RV is not None
        full = FullControls(
            presence_S=columns["presence"],
            frequency_S=columns["frequency"],
            repetition_S=columns["repetition"],
            bias_ids_SB=fields["bias_ids"],
            bias_SB=_cast(fields["bias"], np.float32),
            ban_ids_SX=jnp.where(open_after_S[:, None] > 0, stop_ids_SX, PAD_TOKEN),
            counts_SV=jnp.take(counts_RV, fields["slots"], axis=0, mode="clip"),
        )
    with jax.named_scope("sample"):
        sampled = sample(
            logits_SV,
            controls,
            full,
            max_logprobs=to.config.max_logprobs if full is not None else 0,
        )
    stops_S = jnp.any(stop_ids_SX == sampled.token_S[:, None], axis=1) & (open_after_S <= 0)
    return _Drawn(sampled.token_S, stops_S, _outputs(sampled))


def _last_row(context_lens_S: Array) -> Array:
    """How many rows there are up to the last that is not padding."""
    return jnp.max(
        jnp.where(context_lens_S > 0, jnp.arange(1, 1 + context_lens_S.shape[0]), 0)
    ).astype(jnp.int32)


def _last(drawn: _Drawn) -> Array:
    """What a row's slot keeps: its token, or that it stopped, so that a dispatch already under way
    leaves it out.
    """
    return jnp.where(drawn.stops_S, STOPPED, drawn.token_S)


def _count(counts_RV: Array | None, slots_S: Array, token_S: Array) -> Array | None:
    return (
        None if counts_RV is None else counts_RV.at[slots_S, token_S].add(jnp.int32(2), mode="drop")
    )


def set_counts(
    counts_RV: Array, slot: Array, tokens_C: Array, num_prompt: Array, clear: Array
) -> Array:
    """Enter a chunk of tokens into one slot's counts: the first `num_prompt` as prompt, the rest as
    output.

    tokens_C is padded with V or more; clear > 0 forgets what the slot held.
    """
    vocab = counts_RV.shape[1]
    is_prompt_C = jnp.arange(tokens_C.shape[0], dtype=jnp.int32) < num_prompt
    row_V = jnp.where(clear > 0, jnp.int32(0), counts_RV[slot])
    seen_V = (row_V & 1).at[jnp.where(is_prompt_C, tokens_C, vocab)].set(1, mode="drop")
    drawn_V = (row_V >> 1).at[jnp.where(is_prompt_C, vocab, tokens_C)].add(1, mode="drop")
    return counts_RV.at[slot].set(2 * drawn_V + seen_V)


def _locate(query_starts_S1: Array, context_lens_S: Array, num_tokens: int) -> tuple[Array, Array]:
    """Row and position of each packed token; row S and position -1 for padding."""
    ends_S = query_starts_S1[1:]
    tokens_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(ends_S[None, :] <= tokens_T[:, None], axis=1, dtype=jnp.int32)
    offset_S = context_lens_S - ends_S  # the row's last token ends both its chunk and its context
    positions_T = tokens_T + jnp.take(offset_S, row_T, mode="clip")
    return row_T, jnp.where(row_T < ends_S.shape[0], positions_T, -1)


def _slots(
    row_T: Array, positions_T: Array, block_table_SM: Array, block_size: int, pool: Array
) -> Array:
    """Where each token's KV goes, as block * P + slot; padding (position -1) goes past the end of
    the pool.
    """
    flat = row_T * block_table_SM.shape[1] + positions_T // block_size
    block_T = jnp.take(block_table_SM.reshape(-1), flat, mode="clip")
    return jnp.where(
        positions_T >= 0,
        block_T * block_size + positions_T % block_size,
        pool.shape[0] * block_size,
    )


def _outputs(sampled: Sampled) -> dict[str, Array]:
    outputs = {"tokens": sampled.token_S, "logprobs": sampled.logprob_S}
    if (
        sampled.rank_S is not None
        and sampled.top_ids_SK is not None
        and sampled.top_logprobs_SK is not None
    ):
        outputs |= {
            "ranks": sampled.rank_S,
            "top_ids": sampled.top_ids_SK,
            "top_logprobs": sampled.top_logprobs_SK,
        }
    return outputs


def _score_prompt(
    decoder: Decoder, x_TE: Array, fields: dict[str, Array], row_T: Array, config: EngineConfig
) -> dict[str, Array]:
    temperature_S, mode_S = _cast(fields["scoring"][:, 0], np.float32), fields["scoring"][:, 1]
    scored = token_logprobs(
        lambda x_tE: decoder.logits(x_tE, x_tE.shape[0]),
        x_TE,
        fields["targets"],
        jnp.take(temperature_S, row_T, mode="clip"),
        jnp.take(mode_S, row_T, mode="clip"),
        max_logprobs=config.max_logprobs,
    )
    return {
        "prompt_logprobs": scored.logprob_T,
        "prompt_ranks": scored.rank_T,
        "prompt_top_ids": scored.top_ids_TK,
        "prompt_top_logprobs": scored.top_logprobs_TK,
    }


def _cast(x: Array, dtype: Any) -> Array:
    """The same 32 bits under another type."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
