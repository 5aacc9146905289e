"""Groups of layers that share one block table and one pool."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from jpaged.models.config import ModelConfig
from jpaged.models.kv_view import DenseKV, FirstState
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.record import KEYS_AND_VALUES, LATENT, Record
from jpaged.models.rows import Rows
from kernels_pallas.paged_attention.interface import AttentionOptions

# A step reads the state after the token before it: the last two tokens are all that is looked at.
STATE_WINDOW = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers with equal record, window and query heads: one pool and one block table hold them.

    layers: their indices in the model, ascending. window: tokens that a query sees, itself
    included; None is all of them. num_heads: of queries, which a kernel is made for; None where no
    kernel of attention reads the record.
    """

    layers: tuple[int, ...]
    record: Record
    window: int | None
    num_heads: int | None

    @property
    def num_kv_heads(self) -> int:
        """K; 1 of latents."""
        return 1 if self.record.is_latent else self.record["keys"].shape[0]

    @property
    def head_dim(self) -> int:
        """D, the width of a key; of latents, that of a latent and its rotated key."""
        return sum(self.vectors) if self.record.is_latent else self.vectors[0]

    @property
    def value_dim(self) -> int:
        """The width of a value; of latents, that of a latent."""
        return self.vectors[0] if self.record.is_latent else self.vectors[1]

    @property
    def vectors(self) -> tuple[int, int]:
        """The widths of the two vectors that the cache holds of a token and a KV head: of a key and
        a value, or of a latent and a rotated key.
        """
        first, second = LATENT if self.record.is_latent else KEYS_AND_VALUES
        return self.record[first].shape[-1], self.record[second].shape[-1]


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """Return the groups of a model, in the order of their first layers."""
    layers: dict[tuple[Record, int | None, int | None], list[int]] = {}
    for i, (layer, records) in enumerate(zip(config.layers, config.keeps(), strict=True)):
        for record in records:
            layers.setdefault((record, *_reach_of(layer, record)), []).append(i)
    return tuple(
        KVGroup(layers=tuple(members), record=record, window=window, num_heads=heads)
        for (record, window, heads), members in layers.items()
    )


def _reach_of(layer: LayerConfig, record: Record) -> tuple[int | None, int | None]:
    """Return the window of what a layer keeps, and the heads that look at it."""
    if record.per == "block":
        return STATE_WINDOW, None
    if not record.has_keys:
        return None, None
    mixers = [x for x in layer.mixers if isinstance(x, AttentionConfig | LatentConfig)]
    (mixer,) = mixers  # what is kept is attended to
    if isinstance(mixer, AttentionConfig) and not mixer.is_causal:
        return None, mixer.num_heads  # a step has whole sequences: none leaves tokens behind
    return mixer.window, mixer.num_heads


def kv_places(config: ModelConfig) -> list[tuple[tuple[int, int], ...]]:
    """For each layer the group of each of its records, and its index among the group's layers; for
    a layer that reads another's keys and values those of the other.
    """
    by_record: dict[tuple[int, Record], tuple[int, int]] = {}
    for group, members in enumerate(kv_groups(config)):
        for index, layer in enumerate(members.layers):
            by_record[layer, members.record] = (group, index)
    places = [
        tuple(by_record[i, record] for record in records)
        for i, records in enumerate(config.keeps())
    ]
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.keys_of is not None:
            places[i] = (places[layer.mixer.keys_of][0], *places[i])
    return places


def attention_options(config: ModelConfig) -> list[set[AttentionOptions]]:
    """Return for each of kv_groups what the layers that read it ask of a kernel; nothing for
    states.
    """
    groups = kv_groups(config)
    options: list[set[AttentionOptions]] = [set() for _ in groups]
    for layer, places in zip(config.layers, kv_places(config), strict=True):
        attending = [group for group, _ in places if groups[group].record.has_keys]
        for mixer in layer.mixers:
            if isinstance(mixer, AttentionConfig | LatentConfig):
                for group in attending:
                    options[group].add(mixer.options)
    return options


def dense_view(config: ModelConfig, x: Array, forced: Array | None = None) -> DenseKV:
    """Return the view of a model in training, of tokens whose embeddings are x [..., T, E]. forced:
    see DenseKV.
    """
    batch, length = x.shape[:-2], x.shape[-2]

    def keys_and_values(group: KVGroup) -> tuple[Array, Array]:
        k, v = ((*x.shape[:-1], group.num_kv_heads, width) for width in group.vectors)
        return jnp.zeros(k, x.dtype), jnp.zeros(v, x.dtype)

    def first_state(group: KVGroup) -> FirstState:
        rows = math.prod(batch)
        zeros = {
            field.name: jnp.zeros((rows, *field.shape), field.dtype or x.dtype)
            for field in group.record.fields
        }
        return FirstState(zeros=zeros, rows=Rows.of_batch(rows, length))

    # Not None: layers are traced once, whether one of their group has written before or not.
    def first(group: KVGroup) -> tuple[Array, Array] | FirstState | None:
        if group.record.per == "block":
            return first_state(group)
        return keys_and_values(group) if group.record.has_keys else None

    return DenseKV(newest=tuple(map(first, kv_groups(config))), forced=forced)
