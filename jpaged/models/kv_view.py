"""KVView: what the layers of a step see of the cache; DenseKV, that of training."""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jpaged.errors import UnsupportedError
from jpaged.models.layers.heads import Heads, LatentHeads
from jpaged.models.layers.indexer import IndexQueries
from jpaged.models.rows import Rows, Slots, State
from kernels_pallas.paged_attention.interface import AttentionOptions, unknown_options
from kernels_pallas.sparse_attention import index_scores

# Those that dense attention has.
OPTIONS = ("scale", "soft_cap", "window", "value_dim", "sinks", "latent", "causal")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """Where the cache holds a layer's record. group: of kv_groups. index: of the layer within the
    group, an int or a scalar array, so that layers of one form are traced once.
    """

    group: int = dataclasses.field(metadata={"static": True})
    index: Any


class KVView(Protocol):
    """What the cache holds for the tokens of a step; threaded through the layers.

    Attention writes and attends. A mixer with a state, whose record is one per block, takes that of
    each row before the step and keeps the one after it:

        old, rows = kv.state(place), kv.rows(place)
        y, new = scan(u, old, rows)
        kv = kv.with_state(place, new)

    Where its record names what is `replayed`, it hands that over too, so that rows may guess.
    """

    def write(self, place: Place, qkv: Any, heads: Heads | LatentHeads) -> tuple[Any, Self]:
        """Keep these tokens' keys and values, or latents and rotated keys: q, k, v = heads(qkv).
        Returns q [..., H, D] and the view with k and v in it. qkv: what `heads` takes.
        """
        ...

    def attend(self, place: Place, q: Any, options: AttentionOptions, sinks: Any = None) -> Any:
        """Attend over each row's whole context of what was written at a place.

        options: passed on to the kernel as it is. sinks: f32 [H] or None, passed on likewise.
        Returns o [..., H, Dv] in q's dtype. A layer that reads another's keys and values calls
        this alone, at the other's place.
        """
        ...

    def choose(self, place: Place, queries: IndexQueries) -> Self:
        """Keep these tokens' index keys at a place, and choose by those of its context which tokens
        each of them attends to: `attend_chosen` of this and of later layers goes by that.
        """
        ...

    def attend_chosen(self, place: Place, q: Any, options: AttentionOptions, count: int) -> Any:
        """Attend as `attend` does, over the tokens of the last choice alone. count: how many that
        chose at most.
        """
        ...

    def rows(self, place: Place) -> Rows:
        """Return how the tokens split into rows, for a mixer with a state. Its arrays [..., T, C]
        are packed tokens once their leading axes are one: a dense batch is as many rows of T.
        """
        ...

    def state(self, place: Place) -> State:
        """Return what was kept at a place after the token before each row's first: arrays [S,
        *field.shape] by the names of the record's fields. Zeros for a row that begins a sequence,
        and for padding. A mesh splits the axes that a field names: those are a device's share.
        """
        ...

    def with_state(self, place: Place, new: State) -> Self:
        """Return the view that keeps the states after each row's last token: every field of the
        record, in its dtype. Rows of padding keep nothing, whatever `new` has for them.
        """
        ...

    def slots(self, place: Place) -> Slots:
        """Return where these states lie, for a kernel that changes them in place."""
        ...

    def with_slots(self, place: Place, pool: State) -> Self:
        """Return the view after such a kernel. pool: that of `slots` with the rows' new states."""
        ...

    def with_replayed(self, place: Place, tokens: State) -> Self:
        """Return the view that keeps what the rule of a state takes of each token: arrays [T,
        *field.shape] by the names of Record.replayed. Nothing is kept where no step guesses.
        """
        ...

    def forced_experts(self, place: Place) -> Any:
        """Return the experts that a caller says each token takes, int32 [T, A] of packed tokens, -1
        where its router chooses; None where nobody says any.
        """
        ...

    def with_experts(self, place: Place, chosen: Any) -> Self:
        """Return the view that keeps the experts of each token, int32 [T, A]."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstState:
    """The state that every row of a dense batch begins with: zeros. rows: of the batch."""

    zeros: State
    rows: Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseKV:
    """The keys and values of the tokens at hand and no others, for training: causal by index, where
    the layer is. Every sequence begins at its first token, and no state outlives the call.

    newest: by group, the keys and values [..., T, K, D] that were last written, or latents and
    rotated keys, or the first state of a mixer with one; None of a group that keeps neither.
    `kv_groups.dense_view` makes an empty one. forced: int32 [..., T, L, A], see KVView; L are the
    layers with experts. chosen: bool [..., T, T], which tokens each one chose last; None before any
    choice.
    """

    newest: tuple[tuple[Any, Any] | FirstState | None, ...]
    chosen: Any = None
    forced: Any = None

    def write(self, place: Place, qkv: Any, heads: Heads | LatentHeads) -> tuple[Any, Self]:
        """See KVView."""
        q, k, v = heads(qkv)
        return q, self.keeping(place, k, v)

    def keeping(self, place: Place, k: Any, v: Any) -> Self:
        """Return the view in which these are the keys and values [..., T, K, D] of the group, or
        latents and rotated keys.
        """
        at = place.group
        newest = (*self.newest[:at], (k, v), *self.newest[at + 1 :])
        return dataclasses.replace(self, newest=newest)

    def written(self, place: Place) -> tuple[Any, Any]:
        """Return the keys and values that the last layer of the group has written."""
        written = self.newest[place.group]
        assert isinstance(written, tuple), "this group keeps no keys and values"
        return written

    def attend(self, place: Place, q: Any, options: AttentionOptions, sinks: Any = None) -> Any:
        """See KVView: jax's reference attention, differentiable, its softmax in f32. The layer
        reads what the last layer of its group wrote.
        """
        k, v = self.written(place)
        if options.latent:
            k, v = jnp.concatenate([k, v], axis=-1), k
        if reason := unknown_options(options, OPTIONS):
            raise UnsupportedError(f"dense attention: {reason}")
        is_plain = options.causal and k.shape == v.shape
        if options.soft_cap is not None or sinks is not None or not is_plain:
            return _attention(q, k, v, options, sinks)
        local = None if options.window is None else (options.window - 1, 0)
        with jax.numpy_dtype_promotion("standard"):  # it mixes bf16 with f32
            return jax.nn.dot_product_attention(
                q, k, v, scale=options.scale, is_causal=True, local_window_size=local
            )

    def choose(self, place: Place, queries: IndexQueries) -> Self:
        """See KVView. The choice itself has no derivative."""
        scores = index_scores(queries.q, queries.key[..., None, :, :], queries.weights)
        position = jnp.arange(scores.shape[-1])
        is_past = position[None, :] <= position[:, None]
        scores = jnp.where(is_past, jax.lax.stop_gradient(scores), -jnp.inf)
        count = min(queries.count, scores.shape[-1])
        best, at = jax.lax.top_k(scores, count)
        chosen = jnp.zeros(scores.shape, jnp.bool_)
        chosen = jnp.put_along_axis(chosen, at, best > -jnp.inf, axis=-1, inplace=False)
        return dataclasses.replace(self, chosen=chosen)

    def attend_chosen(self, place: Place, q: Any, options: AttentionOptions, count: int) -> Any:
        """See KVView."""
        written = self.newest[place.group]
        assert options.latent and self.chosen is not None and isinstance(written, tuple)
        latent, rotated_key = written
        keys = jnp.concatenate([latent, rotated_key], axis=-1)
        return _attention(q, keys, latent, options, None, self.chosen)

    def rows(self, place: Place) -> Rows:
        """See KVView."""
        return self._first(place).rows

    def state(self, place: Place) -> State:
        """See KVView: zeros."""
        return self._first(place).zeros

    def with_state(self, place: Place, new: State) -> Self:
        """See KVView: nothing is kept."""
        assert new.keys() == self._first(place).zeros.keys()
        return self

    def slots(self, place: Place) -> Slots:
        """See KVView: a slot a row."""
        first = self._first(place)
        slot_S = jnp.arange(first.rows.num_rows, dtype=jnp.int32)
        return Slots(pool=first.zeros, read_S=slot_S, written_S=slot_S)

    def with_slots(self, place: Place, pool: State) -> Self:
        """See KVView: nothing is kept."""
        return self.with_state(place, pool)

    def with_replayed(self, place: Place, tokens: State) -> Self:
        """See KVView: nothing is kept."""
        return self

    def forced_experts(self, place: Place) -> Any:
        """See KVView."""
        if self.forced is None:
            return None
        of_layer = jax.lax.dynamic_index_in_dim(self.forced, place.index, -2, keepdims=False)
        return of_layer.reshape(-1, of_layer.shape[-1])

    def with_experts(self, place: Place, chosen: Any) -> Self:
        """See KVView: nothing is kept."""
        return self

    def _first(self, place: Place) -> FirstState:
        first = self.newest[place.group]
        assert isinstance(first, FirstState), "this group keeps keys and values"
        return first


def _attention(
    q: Any, k: Any, v: Any, options: AttentionOptions, sinks: Any, chosen: Any = None
) -> Any:
    """Dense attention with sinks, capped scores, values of another width than keys, and of chosen
    tokens [..., T, T] alone, which jax's reference does not have.
    """
    tokens, heads, kv_heads = q.shape[-3], q.shape[-2], k.shape[-2]
    q = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=jnp.float32)
    scores = scores * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    position = jnp.arange(tokens)
    away = position[None, :] - position[:, None]  # of each token from each query
    seen = away <= 0 if options.causal else jnp.ones(away.shape, jnp.bool_)
    if options.window is not None:
        seen &= (away > -options.window) & (away < options.window)
    seen = seen.reshape((1,) * (scores.ndim - 2) + seen.shape)
    if chosen is not None:  # by no head apart
        seen &= chosen[..., None, None, :, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    most = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        sinks = sinks.reshape((1,) * (scores.ndim - 4) + sinks.shape)
        most = jnp.maximum(most, sinks)
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - most)
    weights = (weights / total).astype(v.dtype)
    o = jnp.einsum("...kgts,...skd->...tkgd", weights, v, preferred_element_type=jnp.float32)
    return o.astype(v.dtype).reshape(*o.shape[:-3], heads, -1)
