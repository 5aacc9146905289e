"""The feed-forward part of a layer."""

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jpaged.checks import at_least
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part, share

Activation = Literal["silu", "gelu_tanh", "clamped"]
ALPHA, LIMIT = 1.702, 7.0  # of "clamped"
GATE_UP = (
    Part("gate", "1 F, E", "mlp.gate_proj.weight"),
    Part("up", "1 F, E", "mlp.up_proj.weight"),
)
GATE_UP_BIAS = (
    Part("gate_bias", "1 F", "mlp.gate_proj.bias"),
    Part("up_bias", "1 F", "mlp.up_proj.bias"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A gated linear unit (arXiv:2002.05202) of intermediate_size F. bias: of all its products."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "intermediate_size")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return {"F": self.intermediate_size}

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        gate_up = ParamSpec("mlp.gate_up", "2 F, E", GATE_UP, "normal", "F")
        gate_up_bias = ParamSpec("mlp.gate_up_bias", "2 F", GATE_UP_BIAS, "zeros", "F")
        down = ParamSpec("mlp.down", "E, F", "mlp.down_proj.weight", "residual", "F")
        down_bias = ParamSpec("mlp.down_bias", "E", "mlp.down_proj.bias", "zeros")
        return (gate_up, gate_up_bias, down, down_bias) if self.bias else (gate_up, down)

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it."""
        return Scratch(shared=step.rows * 12 * self.intermediate_size)

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of it."""
        return dataclasses.replace(self, intermediate_size=share(self.intermediate_size, devices))

    def build(self, weights: Parameters) -> "MLP":
        """Return the module of these parameters."""
        return MLP(
            gate_up=Linear.of(weights["mlp.gate_up"], weights.get("mlp.gate_up_bias")),
            down=Linear.of(weights["mlp.down"], weights.get("mlp.down_bias")),
            activation=self.activation,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """gate_up has gate and up in one weight: [..., 2, F]. limit: as of `gated`."""

    gate_up: Linear
    down: Linear
    activation: Activation = dataclasses.field(metadata={"static": True})
    limit: float | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(
        self,
        x: Array,
        step: StepContext,
        dtype: DTypeLike | None = None,
        *,
        is_partial: bool = False,
    ) -> Array:
        """x [..., E], the result in dtype (None is x's). is_partial: as of Linear."""
        gate_up = self.gate_up(x, step, jnp.float32)
        h = gated(self.activation, gate_up[..., 0, :], gate_up[..., 1, :], self.limit)
        return self.down(h.astype(x.dtype), step, dtype, is_partial=is_partial)


def gated(kind: Activation, gate: Array, up: Array, limit: float | None = None) -> Array:
    """Return the activation of gate, times up; f32 [..., F]. limit: the activation is at most that,
    and up is between it and its negative; None: they have no bounds.
    """
    if kind == "clamped":  # GPT-OSS's
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)
    gate = jax.nn.silu(gate) if kind == "silu" else jax.nn.gelu(gate, approximate=True)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * up
