"""The feed-forward part of a mixture of experts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least, positive
from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import multiplied, rounded, scaled
from jpaged.models.layers.linear import Linear, Products, StepContext
from jpaged.models.layers.mlp import MLP, UNGATED, Activation, gated, of_activation
from jpaged.models.layers.norm import RMSNorm
from jpaged.models.layers.router import PLAIN_ROUTER, RouterConfig, route
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part, axes_of, share
from jpaged.models.quantized import QuantizedWeight, is_quantized
from jpaged.models.record import CHOSEN_EXPERTS, Field, Record
from kernels_cpu.experts import MOST_PAIRS
from kernels_pallas.experts import tiles
from kernels_pallas.experts.interface import ExpertWeights, Glu

GATE_UP = (
    Part("gate", "X 1 I, E", "mlp.experts.{x}.gate_proj.weight"),
    Part("up", "X 1 I, E", "mlp.experts.{x}.up_proj.weight"),
)
BIASES = (
    Part("gate_bias", "X 1 I", "mlp.experts.gate_proj_bias"),
    Part("up_bias", "X 1 I", "mlp.experts.up_proj_bias"),
)
CHOOSING_BIAS = "mlp.choosing_bias"
LATENT_IN, LATENT_OUT = "mlp.latent_in", "mlp.latent_out"
ROUTER_NORM, EXPERT_SCALES = "mlp.router_norm.scale", "mlp.expert_scales"
SHARED = (
    Part("gate", "1 R, E", "mlp.shared_expert.gate_proj.weight"),
    Part("up", "1 R, E", "mlp.shared_expert.up_proj.weight"),
)


type Compute = Callable[[Array, Array, Array], Array]  # rows, chosen and weight to their sums


class Routed(NamedTuple):
    """The experts of each token, int32 [T, A], and their weights, f32 [T, A]."""

    chosen: Array
    weight: Array


class ExpertSharing(NamedTuple):
    """How devices are to share a mixture. whole: each has whole experts; False: shares of their
    widths; None: shares, unless the width does not divide and the number of experts does. replicas:
    how many replicas of the model share whole experts.
    """

    whole: bool | None = None
    replicas: int = 1


BY_SHAPE = ExpertSharing()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of num_experts X experts of expert_size I, of which each token takes
    experts_per_token, and of one of shared_expert_size R that every token takes (0: there is none).

    router: how a token's experts are chosen and weighed. shared_gate: what the shared expert gives
    is weighed by a gate. bias: of the router and the experts. latent_size: Le, experts take and
    give so many numbers, which products of their own make of x and of which they make what is
    added; 0: they take and give E. The router and the shared expert take x. limit: of what is
    activated in an expert, as mlp.gated has it; shared_limit: in the one that is shared; None:
    there is none.

    split: devices that share the model have a share of every expert's width, or an equal number of
    whole experts each. replicas: how many replicas of the model share whole experts; each has the
    tokens of all of them, and computes those that chose its own. keeps_choice: the cache holds
    which experts each token took, and a caller may say which it takes.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int = 0
    shared_gate: bool = True
    router: RouterConfig = PLAIN_ROUTER
    bias: bool = False
    activation: Activation = "silu"
    latent_size: int = 0
    limit: float | None = None
    shared_limit: float | None = None
    split: Literal["width", "expert"] = "width"
    replicas: int = 1
    keeps_choice: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "num_experts", "experts_per_token", "expert_size")
        at_least(0, self, "shared_expert_size", "latent_size")
        positive(limit=self.limit, shared_limit=self.shared_limit)
        if self.activation in UNGATED and (self.limit or self.shared_limit):
            raise ConfigError(f"activation={self.activation!r}: takes no limit, which gates have")
        if self.experts_per_token > self.num_experts:
            most = f"num_experts={self.num_experts}"
            raise ConfigError(f"experts_per_token={self.experts_per_token} of {most}")
        self.router.check(self.num_experts, self.experts_per_token)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        sizes = {"X": self.num_experts, "I": self.expert_size, "R": self.shared_expert_size}
        return sizes | {"Le": self.latent_size} if self.latent_size else sizes

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of each token; () where that is nothing."""
        if not self.keeps_choice:
            return ()
        dtype = "uint8" if self.num_experts <= 256 else "uint16"
        return (Record(fields=(Field(CHOSEN_EXPERTS, (self.experts_per_token,), dtype=dtype),)),)

    def width(self, hidden_size: int) -> int:
        """Return how many numbers an expert takes and gives, in a model of this hidden_size."""
        return self.latent_size or hidden_size

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        specs: list[ParamSpec] = []
        split = "I" if self.split == "width" else "X"
        is_exchanged = self.replicas > 1
        parts, biases, shared = (
            of_activation(self.activation, x) for x in (GATE_UP, BIASES, SHARED)
        )
        count, inputs = len(parts), "E"
        if self.latent_size:
            inputs, latent_in, latent_out = "Le", "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"
            parts = tuple(part._replace(axes=part.axes.replace("E", inputs)) for part in parts)
            specs.append(ParamSpec(LATENT_IN, "Le, E", f"{latent_in}.weight", is_quantized=True))
            source = f"{latent_out}.weight"
            specs.append(ParamSpec(LATENT_OUT, "E, Le", source, "residual", is_quantized=True))
        if self.router.norm is not None:
            init = self.router.norm.init
            specs.append(ParamSpec(ROUTER_NORM, "E", "router.scale", init))
        specs.append(ParamSpec("mlp.router", "X, E", "mlp.gate.weight"))
        if self.router.has_expert_scales:
            specs.append(ParamSpec(EXPERT_SCALES, "X", "router.per_expert_scale", "ones"))
        if self.router.has_bias:
            source = "mlp.gate.e_score_correction_bias"
            specs.append(ParamSpec(CHOOSING_BIAS, "X", source, "zeros", in_f32=True))
        if self.bias:
            down_bias = "mlp.experts.down_proj_bias"
            specs += [
                ParamSpec("mlp.router_bias", "X", "mlp.router.bias", "zeros"),
                ParamSpec(
                    "mlp.experts.gate_up_bias",
                    f"X {count} I",
                    biases,
                    "zeros",
                    split,
                    over_replicas=is_exchanged,
                ),
                ParamSpec("mlp.experts.down_bias", f"X {inputs}", down_bias, "zeros"),
            ]
        down = "mlp.experts.{x}.down_proj.weight"
        specs += [
            ParamSpec(
                "mlp.experts.gate_up",
                f"X {count} I, {inputs}",
                parts,
                "normal",
                split,
                over_replicas=is_exchanged,
            ),
            ParamSpec(
                "mlp.experts.down",
                f"X {inputs}, I",
                down,
                "residual",
                split,
                over_replicas=is_exchanged,
            ),
        ]
        if self.shared_expert_size:
            down = "mlp.shared_expert.down_proj.weight"
            specs += [
                ParamSpec("mlp.shared.gate_up", f"{count} R, E", shared, "normal", "R"),
                ParamSpec("mlp.shared.down", "E, R", down, "residual", "R"),
            ]
            if self.shared_gate:
                gate = "mlp.shared_expert_gate.weight"
                specs.append(ParamSpec("mlp.shared_gate", "1, E", gate))
        return tuple(specs)

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it: an expert's weights, the pairs of token and choice
        in their order, and a sum that each layer has for itself.
        """
        width, hidden = self.expert_size, self.width(step.hidden_size)
        tokens = step.tokens * self.replicas
        pairs = tokens * self.experts_per_token
        shared = 24 * hidden * width + 64 * pairs
        shared += min(pairs, MOST_PAIRS) * (24 * width + 16 * hidden)
        shared += step.rows * 12 * self.shared_expert_size
        shared += 8 * step.expert_adapter_rank * (hidden + width)  # an expert's, out of the tables
        shared += step.rows * 12 * self.latent_size
        if self.replicas > 1:  # the tokens of all, and of each a sum, or what each choice gives
            shared += 2 * tokens * hidden * (step.itemsize + 4 * self.experts_per_token)
        return Scratch(shared=shared, kept=8 * step.tokens * max(hidden, step.hidden_size))

    def served(self, devices: int, sharing: ExpertSharing) -> Self:
        """Return an equal mixture that so many devices can share. ConfigError where `sharing` asks
        for whole experts and their number does not divide.
        """
        holders = devices * sharing.replicas
        if sharing.whole is None:
            is_whole = self.expert_size % devices > 0 and self.num_experts % holders == 0
        else:
            is_whole = sharing.whole
            if is_whole:
                check_combination(Facts(num_experts=self.num_experts, holders=holders))
        if not is_whole:
            return self
        return dataclasses.replace(self, split="expert", replicas=sharing.replicas)

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of it; of whole experts all are counted, though
        it has some of them.
        """
        expert, shared = (share(n, devices) for n in (self.expert_size, self.shared_expert_size))
        if self.split == "expert":
            expert = self.expert_size
        return dataclasses.replace(self, expert_size=expert, shared_expert_size=shared)

    def build(self, weights: Parameters) -> "Experts":
        """Return the module of these parameters."""
        gate_up, down = weights["mlp.experts.gate_up"], weights["mlp.experts.down"]
        values = {name: parameter.value for name, parameter in weights.items()}
        shared, shared_gate = None, weights.get("mlp.shared_gate")
        if self.shared_expert_size:
            shared = MLP(
                gate_up=Linear.of(weights["mlp.shared.gate_up"]),
                down=Linear.of(weights["mlp.shared.down"]),
                activation=self.activation,
                limit=self.shared_limit,
            )
        norm = self.router.norm
        latents = (weights.get(name) for name in (LATENT_IN, LATENT_OUT))
        latent_in, latent_out = (None if x is None else Linear.of(x) for x in latents)
        return Experts(
            latent_in=latent_in,
            latent_out=latent_out,
            router_norm=None if norm is None else RMSNorm.of(norm, weights[ROUTER_NORM]),
            expert_scales=values.get(EXPERT_SCALES),
            router=Linear.of(weights["mlp.router"], weights.get("mlp.router_bias")),
            choosing_bias=values.get(CHOOSING_BIAS),
            gate_up=gate_up.value,
            gate_up_bias=values.get("mlp.experts.gate_up_bias"),
            down=down.value,
            down_bias=values.get("mlp.experts.down_bias"),
            shared=shared,
            shared_gate=None if shared_gate is None else Linear.of(shared_gate),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Each token through the few experts that its router scores highest (arXiv:1701.06538), and
    through one that is shared (arXiv:2401.06066), where there is one.

    latent_in, latent_out: to what experts take, and from what they give; None where that is x.
    router_norm: of what the router sees, which is then divided by the root of E; or None.
    expert_scales: [X] or None. choosing_bias: f32 [X] or None. gate_up: [X, 2, I, E], its bias [X,
    2, I] or None. down: [X, E, I], its bias [X, E] or None. shared and shared_gate are None where
    no expert is shared, and shared_gate also where what it gives is not weighed. config: the width
    and the number of experts are those of all devices together; the arrays of experts, but for the
    bias of down, are a device's share.
    """

    latent_in: Linear | None
    latent_out: Linear | None
    router_norm: RMSNorm | None
    expert_scales: Array | None
    router: Linear
    choosing_bias: Array | None
    gate_up: Array | QuantizedWeight
    gate_up_bias: Array | None
    down: Array | QuantizedWeight
    down_bias: Array | None
    shared: MLP | None
    shared_gate: Linear | None
    config: ExpertsConfig = dataclasses.field(metadata={"static": True})

    def route(
        self, x: Array, step: StepContext, kv: KVView, place: Place
    ) -> tuple["Routed", KVView]:
        """Return the experts of each token of x [..., E], those that a caller says where there are
        any; and the view that keeps them.
        """
        with jax.named_scope("router"):
            rows = x.reshape(-1, x.shape[-1])
            routed = self._route(rows, step, kv.forced_experts(place))
        return routed, kv.with_experts(place, routed.chosen)

    def __call__(
        self,
        x: Array,
        step: StepContext,
        routed_by: Array | None = None,
        routed: "Routed | None" = None,
    ) -> Array:
        """x [..., E]. routed_by [..., E]: what the router sees; None is x. routed: of `route`,
        where the choice is kept.
        """
        rows = x.reshape(-1, x.shape[-1])
        if routed is None:
            with jax.named_scope("router"):
                seen = rows if routed_by is None else routed_by.reshape(rows.shape)
                routed = self._route(seen, step)
        chosen, weight = routed
        if step.num_rows is not None:  # padding chooses none
            is_real = jnp.arange(rows.shape[0]) < step.num_rows
            chosen = jnp.where(is_real[:, None], chosen, self.config.num_experts)
        weights = self._weights(step)
        limit = self.config.limit
        glu = functools.partial(gated, self.config.activation, limit=limit, apply=step.apply)
        experts = every_expert if step.experts is None else step.experts.experts
        if weights.adapters is not None:  # the others know of none
            experts = tiles.experts
        if step.products is not None and x.dtype == jnp.bfloat16:
            weights = _multiplied_by(step.products, weights)
        compute = functools.partial(experts, weights=weights, glu=glu)
        in_order = step.in_order and self.config.split == "expert"
        with jax.named_scope("experts"):
            taken = rows if self.latent_in is None else self.latent_in(rows, step)
            if self.config.split == "width":
                y = compute(taken, chosen, weight)
            elif in_order:
                y = self._in_order(compute, taken, chosen, weight, step)
            else:
                y = self._of_all(compute, taken, chosen, weight, step)
        # Each device has a share of every expert's width; None: this one has it whole.
        divides = self.config.expert_size % step.axis_size == 0 or self.config.split == "expert"
        sum_over = step.tensor_axis if divides and not in_order else None
        # Where the shared one is split too, both are summed over the devices at once.
        splits_shared = self.config.shared_expert_size % step.axis_size == 0
        sums_shared = self.shared is not None and splits_shared and sum_over is not None
        sums_shared &= self.latent_out is None
        shared = self._shared(rows, step, is_partial=sums_shared)
        if sums_shared:
            y, shared = y + shared, 0.0
        if sum_over is not None:
            y = jax.lax.psum(y, sum_over)
        if self.down_bias is not None:  # once, whoever holds which share
            for choice in range(self.config.experts_per_token):  # in one order, whatever the rows
                bias = jnp.take(self.down_bias, chosen[:, choice], 0, mode="fill", fill_value=0)
                y = y + multiplied(weight[:, choice, None], bias.astype(jnp.float32))
        if self.latent_out is not None:
            y = self.latent_out(rounded(y, x.dtype), step, jnp.float32)
        return rounded(y + shared, x.dtype).reshape(x.shape)

    def _of_all(
        self, compute: Compute, rows: Array, chosen: Array, weight: Array, step: StepContext
    ) -> Array:
        """Return for each row of this replica [T, E] the weighted sum of those of its experts that
        this device has, or another replica's device in its place. The devices of a replica are yet
        to be summed.

        Every device takes the tokens of all replicas. A token may choose any expert, so that an
        exchange of tokens with shapes that are fixed before would move as much.
        """
        axes = step.data_axes if self.config.replicas > 1 else ()
        if axes:
            rows, chosen, weight = (
                jax.lax.all_gather(x, axes, axis=0, tiled=True) for x in (rows, chosen, weight)
            )
        held = self.gate_up.shape[0]
        names = (*axes, *axes_of(step.tensor_axis))
        place = chosen - jax.lax.axis_index(names) * held
        is_here = (place >= 0) & (place < held)
        y = compute(rows, jnp.where(is_here, place, held), weight)
        if axes:
            y = jax.lax.psum_scatter(y, axes, scatter_dimension=0, tiled=True)
        return y

    def _in_order(
        self, compute: Compute, rows: Array, chosen: Array, weight: Array, step: StepContext
    ) -> Array:
        """Return the same for each row, summed over the devices of a replica too, with the bits
        that one device with all experts would give: devices exchange what each choice gives, which
        is one device's number and zeros, and add up none of them.
        """
        num = chosen.shape[1]
        apart = jnp.repeat(rows, num, axis=0), chosen.reshape(-1, 1)
        y = self._of_all(compute, *apart, jnp.ones((chosen.size, 1), weight.dtype), step)
        if step.tensor_axis is not None:
            y = jax.lax.psum(y, step.tensor_axis)
        y = y.reshape(*chosen.shape, -1)
        total = y[:, 0] * weight[:, :1]
        for choice in range(1, num):
            total = total + y[:, choice] * weight[:, choice, None]
        return total

    def _route(self, x: Array, step: StepContext, forced: Array | None = None) -> "Routed":
        """Return the experts of each row of x [T, E], and their weights. forced: int32 [T, A],
        those that it takes in place of the router's choice, or -1; None chooses all.
        """
        if self.router_norm is not None:
            x = scaled(self.router_norm(x), x.shape[-1] ** -0.5)
        logits = self.router(x, step, jnp.float32)
        num = self.config.experts_per_token
        bias = self.choosing_bias
        chosen, weight = route(self.config.router, logits, bias, num, forced, step.apply)
        if self.expert_scales is not None:
            weight = weight * jnp.take(self.expert_scales, chosen).astype(jnp.float32)
        return Routed(chosen, weight)

    def _weights(self, step: StepContext) -> ExpertWeights:
        """Return the experts' weights, with the adapters of the step's rows."""
        up = step.expert_low_rank("mlp.experts.gate_up")
        down = step.expert_low_rank("mlp.experts.down")
        rows = None if up is None and down is None else (up, down)
        return ExpertWeights(
            gate_up=self.gate_up, gate_up_bias=self.gate_up_bias, down=self.down, adapters=rows
        )

    def _shared(self, x: Array, step: StepContext, *, is_partial: bool) -> Array | float:
        if self.shared is None:
            return 0.0
        with jax.named_scope("shared_expert"):
            y = self.shared(x, step, jnp.float32, is_partial=is_partial)
            if self.shared_gate is None:
                return y
            gate = step.apply("sigmoid", self.shared_gate(x, step, jnp.float32))
            return multiplied(gate, y)


def _multiplied_by(products: Products, weights: ExpertWeights) -> ExpertWeights:
    """Return the weights with `products` set in those whose form it multiplies."""

    def one(weight: Any) -> Any:
        if not is_quantized(weight):
            return weight
        if not products.multiplies(weight.form.name, weight.shape[-1]):
            return weight
        values = weight.values
        if weight.form.is_float8:  # XLA:CPU would take an expert out of it a number at a time
            values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        return dataclasses.replace(weight, values=values, products=products)

    return jax.tree.map(one, weights, is_leaf=is_quantized)


def every_expert(
    x_TE: Array, chosen_TA: Array, weight_TA: Array, weights: ExpertWeights, glu: Glu
) -> Array:
    """Compute the definition: every expert for every token, unwanted results times 0; see
    kernels_pallas.experts. It can be differentiated.
    """
    _, count, width, embed = weights.gate_up.shape

    def dot(x: Array, weight: Array | QuantizedWeight, outputs: int) -> Array:
        if isinstance(weight, QuantizedWeight):
            return weight.of_one().matrix().linear(x)
        weight, contract = weight.reshape(outputs, -1), (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)

    @jax.checkpoint
    def add(y_TE: Array, expert: tuple[Array, ExpertWeights]) -> tuple[Array, None]:
        at, one = expert
        h = dot(x_TE, one.gate_up, count * width)
        if one.gate_up_bias is not None:
            h = h + one.gate_up_bias.reshape(1, -1).astype(jnp.float32)
        share_T = jnp.sum(jnp.where(chosen_TA == at, weight_TA, 0.0), axis=1)
        h = glu(h[:, :width], h[:, width:]).astype(x_TE.dtype)
        y = dot(h, one.down, embed)
        return y_TE + share_T[:, None] * y, None

    every = (jnp.arange(weights.down.shape[0]), weights)
    y_TE, _ = jax.lax.scan(add, jnp.zeros(x_TE.shape, jnp.float32), every)
    return y_TE
