"""One decoder for every family: it trains (dense, causal) and serves (paged).

`Forward` takes tokens [..., T] and attends causally within them: differentiable, for training and
tests. With a KVView of a step (see models/kv_view.py) it takes one packed row of tokens [T], whose
keys and values are kept as they attend. Everything else is the same code.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.config import LM_HEAD, SCORE_HEAD, ModelConfig
from jpaged.models.embedded import Embedded
from jpaged.models.kv_groups import dense_view, kv_places
from jpaged.models.kv_view import KVView, Place
from jpaged.models.last import Last
from jpaged.models.layers.arithmetic import scaled
from jpaged.models.layers.embedding import EMBED, Embedding
from jpaged.models.layers.layer import Layer, Stream
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.per_layer import PerLayerInputs
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.param_spec import Parameter
from jpaged.models.params import parameters
from jpaged.models.pooling import Dense
from jpaged.models.trees import to_tree
from jpaged.models.vision.tower import Tower

IN_TRAINING = StepContext()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """The language model: its modules, a pytree of their arrays. `bind` makes it.

    per_layer: what tokens have for each layer, where the model has per-layer embeddings. head: its
    weight is None where the model ties it to the embedding. score: the head of a classifier, which
    has no vocabulary. dense: the layers after pooling of a model of embeddings. vision: the tower
    that makes embeddings of images; no step takes it.
    """

    embed: Embedding
    per_layer: PerLayerInputs | None
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Linear
    score: Linear | None = None
    dense: tuple[Dense, ...] = ()
    vision: Tower | None = None
    config: ModelConfig = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of its weights."""
        return self.embed.weight.dtype

    @property
    def experts_are_plain(self) -> bool:
        """Whether the weights of experts are arrays, as those of a model without experts are."""
        return all(layer.experts_are_plain for layer in self.layers)

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        kv: KVView | None = None,
        step: StepContext = IN_TRAINING,
        *,
        routed: Array | None = None,
        embedded: Embedded | None = None,
        axes: Array | None = None,
    ) -> tuple[Array, KVView]:
        """Final-norm hidden states [..., T, E] of int tokens [..., T], and the view with their keys
        and values. positions: [..., T], None counts from 0. kv: None is that of training. routed:
        in training, int32 [..., T, L, A], the experts that each token takes in each of the L layers
        that have any, whatever their routers would choose, which weigh them; -1 where they choose.
        It needs a config that keeps choices (`keeping_choices`). embedded: embeddings in place of
        those of some tokens. axes: [3, ..., T], positions on the three axes of a rope with
        sections; None: `positions` on all.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        x, view, _ = self.tapped(
            tokens, positions, kv, (), step, routed=routed, embedded=embedded, axes=axes
        )
        return x, view

    def tapped(
        self,
        tokens: Array,
        positions: Array,
        kv: KVView | None,
        taps: tuple[int, ...] = (),
        step: StepContext = IN_TRAINING,
        last: Last | None = None,
        routed: Array | None = None,
        embedded: Embedded | None = None,
        axes: Array | None = None,
    ) -> tuple[Array, KVView, list[Array]]:
        """Like __call__, and also returns the residual stream [..., T, E] entering each layer in
        `taps` (num_layers: leaving the last one, before the final norm).

        last: the hidden states [R, E] of these of packed tokens [T] are returned; None: of all.
        """
        assert last is None or not taps, "a head takes those of all tokens"
        length = step.max_len or tokens.shape[-1]
        rotaries = self._rotaries(positions, length, axes)
        with jax.named_scope("embed"):
            x = scaled(self.embed(tokens, step), self.config.embedding_scale)
            if embedded is not None:
                x = embedded.placed(x)
                tokens = jnp.where(embedded.row < 0, tokens, 0)  # as per-layer embeddings take them
        inputs = None if self.per_layer is None else self.per_layer(tokens, x, step)
        ends = None if embedded is None else embedded.ends
        view: KVView = dense_view(self.config, x, routed, ends) if kv is None else kv
        stream = Stream(x)
        entering: list[Stream] = []
        are_last = False  # whether stream and inputs are of the last tokens alone
        for i, (layer, at) in enumerate(zip(self.layers, kv_places(self.config), strict=True)):
            if last is not None and i == self.config.num_keeping:
                if not are_last:
                    stream, inputs = jax.tree.map(last.rows_of, (stream, inputs))
                are_last = True
                assert embedded is None or i >= self.config.num_deepstack, "added before"
                axes = None if axes is None else jnp.take(axes, last.index_R, -1, mode="clip")
                rotaries = self._rotaries(last.rows_of(positions), length, axes)
                step, view = last.step, last.view(view)
            entering.append(stream)
            # The index is an argument of what is traced: layers of one form share one trace.
            places = tuple(Place(group, np.int32(index)) for group, index in at)
            rotary, of_layer = rotaries[layer.rope], None if inputs is None else inputs[..., i, :]
            adds = embedded is not None and i < self.config.num_deepstack
            rest = (step.in_layer(i), rotary, view, places, of_layer)
            if last is not None and i + 1 == self.config.num_keeping and layer.narrows and not adds:
                stream, view = layer(stream, *rest, last.in_layer(i))
                inputs, are_last = jax.tree.map(last.rows_of, inputs), True
            else:
                stream, view = _run_layer(layer, stream, *rest)
            if embedded is not None and adds:
                stream = Stream(embedded.added(stream.sum, i))
        if last is not None and not are_last:
            stream = jax.tree.map(last.rows_of, stream)
        entering.append(stream)
        return self.norm(stream.sum), view, [entering[i].sum for i in taps]

    def _rotaries(
        self, positions: Array, length: int, axes: Array | None
    ) -> dict[RopeConfig | None, Rotary | None]:
        """Return the rotation of every kind of layer at these positions."""
        ropes = dict.fromkeys(layer.rope for layer in self.layers)
        return {
            rope: None if rope is None else Rotary.at(rope, positions, length, axes)
            for rope in ropes
        }

    def logits(self, x: Array, step: StepContext = IN_TRAINING) -> Array:
        """f32 logits [..., V] of final hidden states [..., E]; [..., Y] of a classifier."""
        return self.unembedding(x, step) if self.score is None else self.score(x, step, jnp.float32)

    @property
    def for_logits(self) -> "Forward":
        """What `logits` takes of it, without the layers."""
        return dataclasses.replace(self, per_layer=None, layers=(), dense=(), vision=None)

    @property
    def unembedding(self) -> "Unembedding":
        """What makes logits of hidden states, with the embedding's weight where it is tied."""
        head = self.head
        if head.weight is None:
            head = dataclasses.replace(head, weight=self.embed.weight)
        return Unembedding(head=head, config=self.config)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unembedding:
    """From final hidden states to logits: the product with the head, and what the config does to
    it.
    """

    head: Linear
    config: ModelConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array, step: StepContext = IN_TRAINING) -> Array:
        """f32 logits [..., V] of x [..., E]."""
        config = self.config
        with jax.named_scope("head"):
            logits = self.head(x, step, jnp.float32)
            if config.logits_scaling != 1.0:
                logits = logits / jnp.float32(config.logits_scaling)
            if (cap := config.final_logit_softcapping) is not None:
                logits = jnp.float32(cap) * jnp.tanh(logits / jnp.float32(cap))
            # As one with what reads them, a temperature above all, these would have other bits in
            # other programs: XLA divides once where it is asked to divide twice.
            is_changed = config.logits_scaling != 1.0 or cap is not None
            return jax.lax.optimization_barrier(logits) if is_changed else logits


@jax.jit
def _run_layer(
    layer: Layer,
    stream: Stream,
    step: StepContext,
    rotary: Rotary | None,
    kv: KVView,
    places: tuple[Place, ...],
    inputs: Array | None,
) -> tuple[Stream, KVView]:
    # Inside another jit: layers of one form are traced and lowered once, not once each. XLA inlines
    # the calls.
    return layer(stream, step, rotary, kv, places, inputs)


def bind(config: ModelConfig, tree: Mapping[str, Any]) -> Forward:
    """Return the model whose parameters are the leaves of a canonical tree; no array is copied.

    Training binds in each call of a loss. An engine binds once (see runtime.weights), and its steps
    take the modules as an argument.
    """
    weights = parameters(config, to_tree(tree))
    if config.tie_word_embeddings or config.num_labels is not None:
        head = Linear(weight=None, name=LM_HEAD.name)
    else:
        head = Linear.of(weights[LM_HEAD.name])
    score = Linear.of(weights[SCORE_HEAD.name]) if config.num_labels else None
    norm, per_layer = RMSNorm.of(config.norm, weights["norm.scale"]), config.layers[0].per_layer
    assert norm is not None
    return Forward(
        embed=Embedding.of(weights[EMBED.name]),
        per_layer=None if per_layer is None else PerLayerInputs.of(per_layer, weights),
        layers=bind_layers(config, weights),
        norm=norm,
        head=head,
        score=score,
        dense=() if config.pooling is None else config.pooling.build(weights),
        vision=None if config.vision is None else config.vision.build(weights),
        config=config,
    )


def bind_layers(config: ModelConfig, weights: Mapping[str, Parameter]) -> tuple[Layer, ...]:
    """Return the layers of a model with these parameters."""
    by_layer: list[dict[str, Parameter]] = [{} for _ in config.layers]
    for parameter in weights.values():
        spec = parameter.spec
        if spec.layer is not None:
            by_layer[spec.layer][spec.name.removeprefix("layers.{i}.")] = parameter
    return tuple(
        layer.build(of_layer) for layer, of_layer in zip(config.layers, by_layer, strict=True)
    )
