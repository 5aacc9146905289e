"""The feed-forward part of a layer."""

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jpaged.checks import at_least, positive
from jpaged.models.layers.arithmetic import Apply, apply_by_xla, scaled
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part, share

Activation = Literal["silu", "gelu_tanh", "clamped", "relu2"]
UNGATED = ("relu2",)  # activations of what has no gate
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
    """A gated linear unit (arXiv:2002.05202) of intermediate_size F, or a layer of that width
    without gates, by the activation. bias: of all its products. gate_multiplier: of gates before
    their activation. multiplier: of what it gives.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gate_multiplier: float = 1.0
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, self, "intermediate_size")
        positive(gate_multiplier=self.gate_multiplier, multiplier=self.multiplier)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return {"F": self.intermediate_size}

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        parts, biases = (of_activation(self.activation, x) for x in (GATE_UP, GATE_UP_BIAS))
        axes = f"{len(parts)} F"
        gate_up = ParamSpec("mlp.gate_up", f"{axes}, E", parts, "normal", "F")
        gate_up_bias = ParamSpec("mlp.gate_up_bias", axes, biases, "zeros", "F")
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
            gate_multiplier=self.gate_multiplier,
            multiplier=self.multiplier,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """gate_up has gate and up in one weight: [..., 2, F]; without gates up alone: [..., 1, F].
    limit: as of `gated`.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = dataclasses.field(metadata={"static": True})
    gate_multiplier: float = dataclasses.field(default=1.0, metadata={"static": True})
    multiplier: float = dataclasses.field(default=1.0, metadata={"static": True})
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
        if self._is_products(x, step):
            y = self._by_products(x, step, dtype, is_partial=is_partial)
        else:
            gate_up = self.gate_up(x, step, jnp.float32)
            gate, *up = (gate_up[..., i, :] for i in range(gate_up.shape[-2]))
            gate = scaled(gate, self.gate_multiplier)
            h = gated(self.activation, gate, *up, limit=self.limit, apply=step.apply)
            y = self.down(h.astype(x.dtype), step, dtype, is_partial=is_partial)
        return scaled(y, self.multiplier)

    def _is_products(self, x: Array, step: StepContext) -> bool:
        """Whether the step's module of products activates too. A step's adapters are no matter, so
        that a row has its bits beside rows that have some.
        """
        if step.products is None or x.dtype != jnp.bfloat16 or x.ndim != 2:
            return False
        is_plain = self.limit is None and self.gate_multiplier == 1.0 and self.gate_up.bias is None
        return is_plain and step.products.activates(self.activation)

    def _by_products(
        self, x: Array, step: StepContext, dtype: DTypeLike | None, *, is_partial: bool
    ) -> Array:
        """Return what `down` gives: by one call where nothing is added to the products."""
        assert step.products is not None and self.gate_up.weight is not None
        width = self.gate_up.weight.shape[1]
        between = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
        gate_up = self.gate_up.alone(x, step)
        down = self.down.alone(between, step, is_partial=is_partial)
        if gate_up is not None and down is not None:
            wanted = x.dtype if dtype is None else dtype
            return step.products.mlp(x, gate_up, down, self.activation, step.count(x), wanted)
        h = step.products.activated(
            self.gate_up(x, step, jnp.float32), self.activation, step.count(x)
        )
        return self.down(h, step, dtype, is_partial=is_partial)


def of_activation(kind: Activation, gate_up: tuple[Part, Part]) -> tuple[Part, ...]:
    """Return the parts of gate and up that an activation takes."""
    return gate_up[1:] if kind in UNGATED else gate_up


def gated(
    kind: Activation,
    gate: Array,
    up: Array | None = None,
    *,
    limit: float | None = None,
    apply: Apply = apply_by_xla,
) -> Array:
    """Return the activation of gate, times up; f32 [..., F]. Without gates, `gate` is up, and `up`
    is not looked at. limit: the activation is at most that, and up is between it and its negative;
    None: they have no bounds. apply: what computes functions.
    """
    if kind == "relu2":
        return jnp.square(jax.nn.relu(gate))
    assert up is not None
    if kind == "clamped":  # GPT-OSS's
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * apply("sigmoid", ALPHA * gate) * (up + 1)
    gate = apply("silu" if kind == "silu" else "gelu_tanh", gate)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * up
