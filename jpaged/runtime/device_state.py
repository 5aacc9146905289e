"""DeviceState: what lives on the device between steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.runtime.vocabulary import WHOLE, Vocabulary

STOPPED = -1  # in place of a row's last token: it drew one that stops it
COUNTS_CHUNK = 2048  # tokens a call of set_counts: one shape, so one compile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowState:
    """What a running sequence owns on the device. R: rows, as many as sequences may run at once.

    last_token_R int32: the last one drawn, STOPPED where it stopped the row. context_len_R int32:
    tokens up to it, itself included. counts_RV int32: 2 * occurrences in the output so far +
    (1 if the token is in the prompt); None for steps that need none.
    """

    last_token_R: Any
    context_len_R: Any
    counts_RV: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceState:
    """kv: a pool a group of layers. Donated to steps that change it, and so updated in place."""

    kv: tuple[Any, ...]
    rows: RowState


def set_counts(
    counts_RV: Array,
    row: Array,
    tokens_C: Array,
    num_prompt: Array,
    clear: Array,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> Array:
    """Enter a chunk of tokens into one row's counts: the first `num_prompt` as prompt, the rest as
    output.

    tokens_C is padded with V or more; clear > 0 forgets what the row held. counts_RV: of the
    vocabulary or this device's share of it.
    """
    vocab, tokens_C = counts_RV.shape[1], vocabulary.columns(tokens_C, counts_RV)
    is_prompt_C = jnp.arange(tokens_C.shape[0], dtype=jnp.int32) < num_prompt
    row_V = jnp.where(clear > 0, jnp.int32(0), counts_RV[row])
    seen_V = (row_V & 1).at[jnp.where(is_prompt_C, tokens_C, vocab)].set(1, mode="drop")
    drawn_V = (row_V >> 1).at[jnp.where(is_prompt_C, vocab, tokens_C)].add(1, mode="drop")
    return counts_RV.at[row].set(2 * drawn_V + seen_V)
