"""Per-layer embeddings (Gemma 3n and 4): a table has P numbers of each token for each layer, which
a gate lets into the residual stream at the layer's end.

The table is only gathered from, so it is never in 8 bits and takes no adapter.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least
from jpaged.models.layers.arithmetic import added, rounded, scaled
from jpaged.models.layers.embedding import Embedding
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.mlp import Activation, gated
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig, RMSNorm
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameter, Parameters, ParamSpec

TABLE, PROJECTION, PROJECTION_NORM = (
    "per_layer.table",
    "per_layer.projection",
    "per_layer.norm.scale",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """What a layer does with the `size` P numbers that a token has for it."""

    size: int
    activation: Activation = "gelu_tanh"
    norm: NormConfig = PLAIN_NORM

    def __post_init__(self) -> None:
        at_least(1, self, "size")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return {"P": self.size}

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        norm = "post_per_layer_input_norm.weight"
        return (
            ParamSpec("per_layer.gate", "P, E", "per_layer_input_gate.weight"),
            ParamSpec("per_layer.out", "E, P", "per_layer_projection.weight", "residual"),
            ParamSpec("per_layer.norm.scale", "E", norm, self.norm.init),
        )

    def model_sizes(self, num_layers: int) -> dict[str, int]:
        """Return the sizes of the axes of `model_params` by letter, for a model of L layers."""
        return self.sizes | {"L": num_layers, "LP": num_layers * self.size}

    def model_params(self) -> tuple[ParamSpec, ...]:
        """Return the parameters of a model whose layers have this config. LP: L times P."""
        norm = "model.per_layer_projection_norm.weight"
        projection = "model.per_layer_model_projection.weight"
        return (
            ParamSpec(TABLE, "V, LP", "model.embed_tokens_per_layer.weight", "normal", "V"),
            ParamSpec(PROJECTION, "L P, E", projection),
            ParamSpec(PROJECTION_NORM, "P", norm, self.norm.init),
        )

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it in a layer, with the layer's share of the tokens'
        inputs.
        """
        return Scratch(shared=step.rows * 8 * self.size, kept=step.rows * 6 * self.size)

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of it: all."""
        del devices
        return self

    def build(self, weights: Parameters) -> "PerLayer":
        """Return the module of these parameters."""
        return PerLayer(
            gate=Linear.of(weights["per_layer.gate"]),
            out=Linear.of(weights["per_layer.out"]),
            norm=RMSNorm(scale=weights["per_layer.norm.scale"].value, config=self.norm),
            activation=self.activation,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayer:
    """The end of a layer: what it adds to the residual stream."""

    gate: Linear
    out: Linear
    norm: RMSNorm
    activation: Activation = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array, step: StepContext, inputs: Array) -> Array:
        """x [..., E], inputs [..., P]: of the layer. Returns x with what they give."""
        gate = self.gate(x, step, jnp.float32)
        h = gated(self.activation, gate, inputs.astype(jnp.float32), apply=step.apply)
        return added(x, self.norm(self.out(h.astype(x.dtype), step)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """What the tokens of a step have for all layers: of the table, and of their embeddings."""

    table: Embedding
    projection: Linear
    norm: RMSNorm

    @classmethod
    def of(cls, config: PerLayerConfig, weights: Parameters) -> Self:
        """Return the module of these parameters of a model."""
        norm: Parameter = weights[PROJECTION_NORM]
        return cls(
            table=Embedding.of(weights[TABLE]),
            projection=Linear.of(weights[PROJECTION]),
            norm=RMSNorm(scale=norm.value, config=config.norm),
        )

    def __call__(self, tokens: Array, x: Array, step: StepContext) -> Array:
        """Return the inputs of all layers [..., L, P] of tokens [...] whose embeddings are x."""
        of_embeddings = self.projection(x, step, jnp.float32)  # [..., L, P]
        of_embeddings = rounded(of_embeddings * jnp.float32(x.shape[-1] ** -0.5), x.dtype)
        of_tokens = self.table(tokens, step).reshape(of_embeddings.shape)
        of_tokens = scaled(of_tokens, of_embeddings.shape[-1] ** 0.5)
        return scaled(added(self.norm(of_embeddings), of_tokens), 2**-0.5)
