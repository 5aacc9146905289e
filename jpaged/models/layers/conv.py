"""The gated short convolution of LFM2 (arXiv:2511.23404), whose state is its last inputs."""

import dataclasses
from typing import Self

import jax
from jax import Array

from jpaged.checks import at_least
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import multiplied, rounded
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.rope import Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.record import Field, Record
from jpaged.models.rows import State
from kernels_pallas import short_conv
from kernels_pallas.packed_rows import PackedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """A causal convolution over `width` W tokens of N channels, each by itself, of their inputs
    times a gate; its outputs are multiplied by another gate. bias: of its products and its sums.
    """

    channels: int
    width: int = 3
    bias: bool = False
    rope: None = None

    def __post_init__(self) -> None:
        at_least(1, self, "channels")
        at_least(2, self, "width")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        return {"N": self.channels, "W": self.width}

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer: gate of the inputs, gate of the outputs
        and inputs of all channels, in this order.
        """
        specs = [
            ParamSpec("conv.in", "3 N, E", "conv.in_proj.weight", "normal", "N"),
            ParamSpec("conv.taps", "N | 1 | W", "conv.conv.weight", "normal", "N"),
            ParamSpec("conv.out", "E, N", "conv.out_proj.weight", "residual", "N"),
        ]
        if self.bias:
            specs += [
                ParamSpec("conv.in_bias", "3 N", "conv.in_proj.bias", "zeros", "N"),
                ParamSpec("conv.taps_bias", "N", "conv.conv.bias", "zeros", "N"),
                ParamSpec("conv.out_bias", "E", "conv.out_proj.bias", "zeros"),
            ]
        return tuple(specs)

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of a row: the gated inputs that its next token sees."""
        inputs = Field("inputs", (self.width - 1, self.channels), split=1)
        replayed = Field("inputs", (self.channels,), split=0)
        return (Record(fields=(inputs,), per="block", replayed=(replayed,)),)

    def replay(self, tokens: State, pool: State, rows: PackedRows, step: StepContext) -> State:
        """Return the pool with the states after these tokens, of each of which it takes what
        `keeps` names as replayed: arrays [T, *field.shape].
        """
        return {"inputs": short_conv.advanced(tokens["inputs"], pool["inputs"], rows)}

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it, in f32: gates, inputs, and its taps one by one."""
        taps = 4 * (self.width + 3) * step.sequences * self.channels
        return Scratch(shared=step.rows * 28 * self.channels + taps)

    def served(self, devices: int) -> Self:
        """Itself, if so many devices can share its channels; else ConfigError."""
        if self.channels % devices:
            raise ConfigError(
                f"hidden_size={self.channels}: the channels of a short convolution do not divide "
                f"over {devices} devices of the mesh's tensor axis"
            )
        return self

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        return dataclasses.replace(self, channels=self.channels // devices)

    def build(self, weights: Parameters) -> "Conv":
        """Return the module of these parameters."""
        taps_bias = weights.get("conv.taps_bias")
        return Conv(
            gated=Linear.of(weights["conv.in"], weights.get("conv.in_bias")),
            taps=weights["conv.taps"].value,
            taps_bias=None if taps_bias is None else taps_bias.value,
            out=Linear.of(weights["conv.out"], weights.get("conv.out_bias")),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv:
    """gated: both gates and the inputs, [..., 3, N]. taps: [N, 1, W], the last for the token
    itself. taps_bias: [N] or None.
    """

    gated: Linear
    taps: Array
    taps_bias: Array | None
    out: Linear
    config: ConvConfig = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
    ) -> tuple[Array, KVView]:
        """x [..., E]. rotary: None. places: where the cache holds what `keeps` says."""
        (place,) = places
        rows, slots = kv.rows(place), kv.slots(place)
        packed = PackedRows(rows.start_loc_S1, rows.first_S, slots.read_S, slots.written_S)
        gated = self.gated(x, step)
        gate_in, gate_out, u = (gated[..., i, :] for i in range(3))
        u_TN = multiplied(gate_in, u).reshape(-1, u.shape[-1])
        with jax.named_scope("short_conv"):
            convolve = short_conv.decode if rows.length == 1 else short_conv.packed
            y_TN, inputs = convolve(u_TN, self.taps[:, 0], slots.pool["inputs"], packed)
            if self.taps_bias is not None:
                y_TN = y_TN + self.taps_bias.astype(y_TN.dtype)[None]
        kv = kv.with_slots(place, {"inputs": inputs}).with_replayed(place, {"inputs": u_TN})
        y = multiplied(gate_out, rounded(y_TN, x.dtype).reshape(u.shape))
        return self.out(y, step), kv
