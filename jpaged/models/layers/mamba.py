"""Mamba-2 (arXiv:2405.21060): a state space whose state decays by one number a token, after a short
convolution over its inputs, keys and queries.

The time step of a token is not clamped, neither in chunks nor in steps: transformers clamps it in
the former alone for Nemotron-H, so that its decode differs from its prefill.
"""

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jpaged.checks import at_least, positive
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import mean_of_squares, multiplied, rounded, scaled
from jpaged.models.layers.linear import Linear, Scan, StepContext
from jpaged.models.layers.rope import Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import MeshAxis, Parameters, ParamSpec, Part
from jpaged.models.record import Field, Record
from jpaged.models.rows import Slots, State
from kernels_pallas import short_conv
from kernels_pallas.mamba2 import xla
from kernels_pallas.mamba2.interface import Shapes
from kernels_pallas.packed_rows import PackedRows

IN_PROJ, IN_PROJ_BIAS = "mamba.in_proj.weight", "mamba.in_proj.bias"
CONV, CONV_BIAS = "mamba.conv1d.weight", "mamba.conv1d.bias"
ZX = (Part("z", "Hm Pm, E", IN_PROJ), Part("x", "Hm Pm, E", IN_PROJ))
BC = (Part("b", "Gm Nm, E", IN_PROJ), Part("c", "Gm Nm, E", IN_PROJ))
ZX_BIAS = (Part("z_bias", "Hm Pm", IN_PROJ_BIAS), Part("x_bias", "Hm Pm", IN_PROJ_BIAS))
BC_BIAS = (Part("b_bias", "Gm Nm", IN_PROJ_BIAS), Part("c_bias", "Gm Nm", IN_PROJ_BIAS))
CONV_BC = (Part("conv_b", "Gm Nm | 1 | W", CONV), Part("conv_c", "Gm Nm | 1 | W", CONV))
CONV_BC_BIAS = (Part("conv_b_bias", "Gm Nm", CONV_BIAS), Part("conv_c_bias", "Gm Nm", CONV_BIAS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Mamba-2 of num_heads Hm of width head_dim Pm, whose states have state_dim Nm columns; keys
    and queries of num_groups Gm serve as many heads each.

    conv_width: W, tokens that the convolution sees. conv_bias: of the convolution; bias: of the
    products. norm: the outputs of a group are normed after they are multiplied by their gate, or
    before; None does not norm. norm_eps: of that. multipliers: of what is projected: gates, inputs,
    keys, queries and time steps.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["after", "before"] | None = "after"
    norm_eps: float = 1e-5
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    rope: None = None

    def __post_init__(self) -> None:
        at_least(1, self, "num_heads", "head_dim", "state_dim", "num_groups")
        at_least(2, self, "conv_width")
        if self.num_heads % self.num_groups:
            groups = f"num_groups={self.num_groups}"
            raise ConfigError(
                f"num_heads={self.num_heads} of Mamba-2 is not a multiple of {groups}"
            )
        if len(self.multipliers) != 5:
            raise ConfigError(f"{len(self.multipliers)} ssm_multipliers: Mamba-2 has five parts")
        positive(**{f"ssm_multipliers[{i}]": x for i, x in enumerate(self.multipliers)})

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        heads = {"Hm": self.num_heads, "Pm": self.head_dim}
        return heads | {"Gm": self.num_groups, "Nm": self.state_dim, "W": self.conv_width}

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer. What belongs to a head lies together, and
        so does what belongs to a group: a split over either is contiguous. Files have the rows of
        gates, inputs, keys, queries and time steps in one tensor, in this order.
        """
        heads, groups = "Hm Pm+Pm", "Gm Nm+Nm"
        specs = [
            ParamSpec("mamba.zx", f"{heads}, E", ZX, "normal", "Hm"),
            ParamSpec("mamba.bc", f"{groups}, E", BC, "normal", "Gm"),
            ParamSpec("mamba.dt", "Hm, E", IN_PROJ, "normal", "Hm", is_quantized=False),
        ]
        if self.bias:
            specs += [
                ParamSpec("mamba.zx_bias", heads, ZX_BIAS, "zeros", "Hm"),
                ParamSpec("mamba.bc_bias", groups, BC_BIAS, "zeros", "Gm"),
                ParamSpec("mamba.dt_proj_bias", "Hm", IN_PROJ_BIAS, "zeros", "Hm"),
            ]
        specs += [
            ParamSpec("mamba.conv_x", "Hm Pm | 1 | W", CONV, "normal", "Hm"),
            ParamSpec("mamba.conv_bc", f"{groups} | 1 | W", CONV_BC, "normal", "Gm"),
        ]
        if self.conv_bias:
            specs += [
                ParamSpec("mamba.conv_x_bias", "Hm Pm", CONV_BIAS, "zeros", "Hm"),
                ParamSpec("mamba.conv_bc_bias", groups, CONV_BC_BIAS, "zeros", "Gm"),
            ]
        f32 = {"split": "Hm", "in_f32": True}
        specs += [
            ParamSpec("mamba.log_decay", "Hm", "mamba.A_log", "zeros", **f32),
            ParamSpec("mamba.dt_bias", "Hm", "mamba.dt_bias", "ones", **f32),
            ParamSpec("mamba.skip", "Hm", "mamba.D", "ones", **f32),
        ]
        if self.norm is not None:
            scale = "mamba.norm.scale"
            specs.append(ParamSpec(scale, "Hm Pm", "mamba.norm.weight", "ones", "Hm"))
        out = "mamba.out_proj.weight"
        specs.append(ParamSpec("mamba.out", "E, Hm Pm", out, "residual", "Hm"))
        if self.bias:
            specs.append(ParamSpec("mamba.out_bias", "E", "mamba.out_proj.bias", "zeros"))
        return tuple(specs)

    @property
    def _split_groups(self) -> int | None:
        """The axis that a mesh splits of what groups have: their first; one group lies whole on
        every device.
        """
        return 0 if self.num_groups > 1 else None

    @property
    def shapes(self) -> Shapes:
        """The shapes by which a kernel is chosen."""
        return Shapes(
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
        )

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of a row: the states, and the inputs of the convolution that
        the next token sees.
        """
        heads, groups = (self.num_heads, self.head_dim), (self.num_groups, 2 * self.state_dim)
        of_groups, past, f32 = self._split_groups, self.conv_width - 1, jnp.float32
        fields = (
            Field("state", (*heads, self.state_dim), 0, f32),
            Field("inputs", (past, *heads), split=1),
            Field("group_inputs", (past, *groups), None if of_groups is None else 1),
        )
        replayed = (
            Field("values", heads, 0, f32),
            Field("decay", (self.num_heads,), 0, f32),
            Field("keys", (self.num_groups, self.state_dim), of_groups, f32),
            Field("inputs", heads, 0),
            Field("group_inputs", groups, of_groups),
        )
        return (Record(fields=fields, per="block", replayed=replayed),)

    def replay(self, tokens: State, pool: State, rows: PackedRows, step: StepContext) -> State:
        """Return the pool with the states after these tokens, of each of which it takes what
        `keeps` names as replayed: arrays [T, *field.shape].
        """
        keys, kernel = tokens["keys"], xla if step.scan is None else step.scan
        changes = (tokens["values"], tokens["decay"], keys)
        _, state = kernel.prefill(
            *changes, keys, pool["state"], rows
        )  # what keys read is of no use
        inputs = {
            name: short_conv.advanced(tokens[name], pool[name], rows)
            for name in ("inputs", "group_inputs")
        }
        return {"state": state, **inputs}

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it: f32 channels of every token, and what the kernel of
        the scan does.
        """
        values, keys = self.num_heads * self.head_dim, 2 * self.num_groups * self.state_dim
        tokens = 4 * step.rows * (6 * values + 4 * keys + 4 * self.num_heads)
        kernel = xla if step.scan is None else step.scan
        in_kernel = kernel.scratch_bytes(self.shapes, step.sequences)
        return Scratch(shared=tokens + in_kernel, kept=4 * step.tokens * step.hidden_size)

    def served(self, devices: int) -> Self:
        """Itself, if so many devices can share its heads and groups, or its heads where all have
        one group; else ConfigError.
        """
        sizes = {"heads": self.num_heads}
        if self.num_groups > 1:
            sizes["groups"] = self.num_groups
        for name, size in sizes.items():
            if size % devices:
                raise ConfigError(
                    f"{size} {name} of Mamba-2 do not divide over {devices} devices of the mesh's "
                    "tensor axis"
                )
        return self

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        groups = 1 if self.num_groups == 1 else self.num_groups // devices
        return dataclasses.replace(self, num_heads=self.num_heads // devices, num_groups=groups)

    def build(self, weights: Parameters) -> "Mamba":
        """Return the module of these parameters."""

        def value(name: str) -> Array | None:
            return weights[f"mamba.{name}"].value if f"mamba.{name}" in weights else None

        return Mamba(
            zx=Linear.of(weights["mamba.zx"], weights.get("mamba.zx_bias")),
            bc=Linear.of(weights["mamba.bc"], weights.get("mamba.bc_bias")),
            dt=Linear.of(weights["mamba.dt"], weights.get("mamba.dt_proj_bias")),
            conv_x=weights["mamba.conv_x"].value,
            conv_x_bias=value("conv_x_bias"),
            conv_bc=weights["mamba.conv_bc"].value,
            conv_bc_bias=value("conv_bc_bias"),
            log_decay=weights["mamba.log_decay"].value,
            dt_bias=weights["mamba.dt_bias"].value,
            skip=weights["mamba.skip"].value,
            norm=value("norm.scale"),
            out=Linear.of(weights["mamba.out"], weights.get("mamba.out_bias")),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba:
    """zx: gate and input of each head, [..., Hm, Pm+Pm]. bc: key and query of each group, [..., Gm,
    Nm+Nm]. dt: time steps [..., Hm]. conv_x: [Hm, Pm, 1, W], conv_bc: [Gm, Nm+Nm, 1, W]; their
    biases or None. log_decay, dt_bias, skip: f32 [Hm]. norm: the scale [Hm, Pm] or None.
    """

    zx: Linear
    bc: Linear
    dt: Linear
    conv_x: Array
    conv_x_bias: Array | None
    conv_bc: Array
    conv_bc_bias: Array | None
    log_decay: Array
    dt_bias: Array
    skip: Array
    norm: Array | None
    out: Linear
    config: MambaConfig = dataclasses.field(metadata={"static": True})

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
        rows, slots, c = kv.rows(place), kv.slots(place), self.config
        packed = PackedRows(rows.start_loc_S1, rows.first_S, slots.read_S, slots.written_S)
        of_z, of_x, of_b, of_c, of_dt = c.multipliers
        with jax.named_scope("zxbcdt"):
            zx, bc = self.zx(x, step), self.bc(x, step)
            z_THP, x_THP = jnp.split(zx.reshape(-1, *zx.shape[-2:]), 2, axis=-1)
            b_TGN, c_TGN = jnp.split(bc.reshape(-1, *bc.shape[-2:]), 2, axis=-1)
            z_THP, x_THP = scaled(z_THP, of_z), scaled(x_THP, of_x)
            bc_TGN = jnp.concatenate([scaled(b_TGN, of_b), scaled(c_TGN, of_c)], axis=-1)
            dt_TH = self.dt(x, step, jnp.float32).reshape(x_THP.shape[:2])
            dt_TH = scaled(dt_TH, of_dt)
        with jax.named_scope("short_conv"):
            length = rows.length
            convolve = short_conv.decode if length == 1 else short_conv.packed
            u_THP, inputs = convolve(x_THP, self.conv_x[..., 0, :], slots.pool["inputs"], packed)
            u_TGN, group_inputs = convolve(
                bc_TGN, self.conv_bc[..., 0, :], slots.pool["group_inputs"], packed
            )
            u_THP = activated(u_THP, self.conv_x_bias, x.dtype, step)
            u_TGN = activated(u_TGN, self.conv_bc_bias, x.dtype, step)
        with jax.named_scope("mamba2"):
            b_TGN, c_TGN = jnp.split(u_TGN, 2, axis=-1)
            # A caller may have cast its whole tree to a smaller type.
            log_decay, dt_bias, skip = (
                w.astype(jnp.float32) for w in (self.log_decay, self.dt_bias, self.skip)
            )
            dt_TH = step.apply("softplus", dt_TH + dt_bias[None])
            g_TH = -step.apply("exp", log_decay)[None] * dt_TH
            values_THP = dt_TH[..., None] * u_THP
            changes = (values_THP, g_TH, b_TGN, c_TGN)
            y_THP, state = scanned(changes, slots, packed, length, step.scan)
            y_THP = y_THP + multiplied(skip[None, :, None], u_THP)
        kv = kv.with_slots(place, {"state": state, "inputs": inputs, "group_inputs": group_inputs})
        replayed = {"values": values_THP, "decay": g_TH, "keys": b_TGN}
        kv = kv.with_replayed(place, replayed | {"inputs": x_THP, "group_inputs": bc_TGN})
        with jax.named_scope("out"):
            # The heads of the one group may be on several devices.
            mean_over = step.axis_over(c.num_heads) if c.num_groups == 1 else None
            gate_THP = step.apply("silu", z_THP.astype(jnp.float32))
            y_THP = rounded(self._gated(y_THP, gate_THP, bc_TGN.shape[1], mean_over), x.dtype)
            return self.out(y_THP.reshape(*x.shape[:-1], -1), step), kv

    def _gated(self, y: Array, gate: Array, num_groups: int, mean_over: MeshAxis | None) -> Array:
        """Return outputs y [T, Hm, Pm], f32, times their gates, normed if the model does that.

        mean_over: the mesh axis whose devices share what is normed together.
        """
        if self.norm is None:
            return y * gate
        if self.config.norm == "after":
            y = y * gate
        groups = y.reshape(y.shape[0], num_groups, -1)
        mean = mean_of_squares(groups)
        if mean_over is not None:
            mean = jax.lax.pmean(mean, mean_over)
        groups = groups * jax.lax.rsqrt(mean + jnp.float32(self.config.norm_eps))
        y = groups.reshape(y.shape) * self.norm.astype(jnp.float32)[None]
        return y if self.config.norm == "after" else y * gate


def activated(y: Array, bias: Array | None, dtype: DTypeLike, step: StepContext) -> Array:
    """Return silu of what a convolution makes, y [T, ...] in f32, and its bias; f32, but rounded to
    a dtype.
    """
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return rounded(step.apply("silu", y), dtype).astype(jnp.float32)


def scanned(
    tokens: tuple[Array, Array, Array, Array],
    slots: Slots,
    rows: PackedRows,
    length: int | None,
    scan: Scan | None,
) -> tuple[Array, Array]:
    """Return y [T, Hm, Pm] of values, decays, keys and queries, and the pool of states. length: of
    every row, if all have as many tokens: a dense batch, in a form that can be differentiated.
    scan: see StepContext.
    """
    pool, kernel = slots.pool["state"], xla if scan is None else scan
    if length is None:
        return kernel.prefill(*tokens, pool, rows)
    if length == 1:
        return kernel.decode(*tokens, pool, rows)
    x, g, b, c = (part.reshape(-1, length, *part.shape[1:]) for part in tokens)
    y, states = xla.dense(x, g, b, c, rows.read(pool))
    return y.reshape(-1, *y.shape[2:]), rows.written(pool, states)
