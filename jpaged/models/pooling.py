"""PoolingConfig: how a model of embeddings makes one vector of a sequence's hidden states, as the
modules of sentence-transformers describe it; Dense, a layer after that.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least
from jpaged.errors import ConfigError
from jpaged.models.param_spec import Parameters, ParamSpec

Pooled = Literal["last", "first", "mean"]  # the states of a sequence that its vector is made of
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "silu"]
POOLED, ACTIVATIONS = get_args(Pooled), get_args(DenseActivation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """One linear layer after pooling, and the function of its outputs."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: DenseActivation = "identity"

    def __post_init__(self) -> None:
        at_least(1, self, "inputs", "outputs")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation!r}: must be one of {ACTIVATIONS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """The vector of a sequence: its last or first hidden state, or the mean of all of them, through
    `dense` layers, and divided by its length where it is normalised.
    """

    at: Pooled = "last"
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.at not in POOLED:
            raise ConfigError(f"pooling at={self.at!r}: must be one of {POOLED}")
        for before, dense in zip(self.dense, self.dense[1:], strict=False):
            _check_follows(before.outputs, dense)

    def check(self, hidden_size: int) -> None:
        """Raise ConfigError where the first dense layer does not take hidden states."""
        if self.dense:
            _check_follows(hidden_size, self.dense[0])

    def width(self, hidden_size: int) -> int:
        """Return how many numbers a vector has."""
        return self.dense[-1].outputs if self.dense else hidden_size

    def params(self) -> Iterator[ParamSpec]:
        """The parameters of the dense layers."""
        for i, dense in enumerate(self.dense):
            sizes = {f"O{i}": dense.outputs, f"I{i}": dense.inputs}
            weight, bias = f"dense.{i}.weight", f"dense.{i}.bias"
            source = f"dense.{i}.linear."
            yield ParamSpec(weight, f"O{i}, I{i}", f"{source}weight").placed(sizes)
            if dense.bias:
                yield ParamSpec(bias, f"O{i}", f"{source}bias", "zeros").placed(sizes)

    def build(self, weights: Parameters) -> tuple["Dense", ...]:
        """Return the modules of these parameters."""
        layers: list[Dense] = []
        for i, dense in enumerate(self.dense):
            bias = weights.get(f"dense.{i}.bias")
            layers.append(
                Dense(
                    weight=weights[f"dense.{i}.weight"].value,
                    bias=None if bias is None else bias.value,
                    activation=dense.activation,
                )
            )
        return tuple(layers)


def _check_follows(width: int, dense: DenseConfig) -> None:
    if dense.inputs != width:
        raise ConfigError(
            f"a dense layer after pooling takes {dense.inputs} numbers where there are {width}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """weight: [outputs, inputs], bias [outputs] or None; the product is in f32."""

    weight: Array
    bias: Array | None
    activation: DenseActivation = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        """Return f32 [..., outputs] of x [..., inputs]."""
        y = product(x, self.weight)
        if self.bias is not None:
            y = y + self.bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
        if self.activation == "identity":
            return y
        if self.activation == "gelu":
            return jax.nn.gelu(y, approximate=False)  # as torch.nn.GELU
        return {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}[self.activation](y)


def product(x: Array, weight: Array) -> Array:
    """Return x [..., inputs] times a weight [outputs, inputs] transposed, in f32."""
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return jnp.einsum("...i,oi->...o", x, weight, precision=jax.lax.Precision.HIGHEST)
