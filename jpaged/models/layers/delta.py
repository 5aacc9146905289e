"""Gated DeltaNet (arXiv:2412.06464): attention whose cache is one matrix a value head, after a
short convolution over the queries, keys and values.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.checks import at_least
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import multiplied, rounded, sum_of_last
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part
from jpaged.models.record import Field, Record
from jpaged.models.rows import State
from kernels_pallas import short_conv
from kernels_pallas.gated_delta import xla
from kernels_pallas.gated_delta.interface import Shapes
from kernels_pallas.packed_rows import PackedRows

QKVZ = (
    Part("q", "N C, E", "linear_attn.in_proj_qkv.weight"),
    Part("k", "N C, E", "linear_attn.in_proj_qkv.weight"),
    Part("v", "N U, E", "linear_attn.in_proj_qkv.weight"),
    Part("z", "N U, E", "linear_attn.in_proj_z.weight"),
)
BA = (
    Part("b", "N J, E", "linear_attn.in_proj_b.weight"),
    Part("a", "N J, E", "linear_attn.in_proj_a.weight"),
)
CONV = (
    Part("conv_q", "N C | 1 | W", "linear_attn.conv1d.weight"),
    Part("conv_k", "N C | 1 | W", "linear_attn.conv1d.weight"),
    Part("conv_v", "N U | 1 | W", "linear_attn.conv1d.weight"),
)
NORM_EPS = 1e-6  # added to the sum of squares of a query or key


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """What all kinds of layers with the gated delta rule share: num_key_heads N of width key_dim C,
    which serve num_value_heads of width value_dim Y: J = num_value_heads / N value heads each, U =
    J Y channels of values.

    conv_width: W, tokens that the convolution sees. allows_negative: the strength of a change is in
    (0, 2) in place of (0, 1). norm_eps: of the norm of the outputs.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    allows_negative: bool = False
    norm_eps: float = 1e-6
    rope: None = None

    def __post_init__(self) -> None:
        at_least(1, self, "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        at_least(2, self, "conv_width")
        if self.num_value_heads % self.num_key_heads:
            keys = f"num_key_heads={self.num_key_heads}"
            raise ConfigError(f"num_value_heads={self.num_value_heads} is not a multiple of {keys}")

    @property
    def num_decays(self) -> int:
        """How many decays a token has in a value head: one, or one for each channel of its key."""
        return 1

    @property
    def channels(self) -> int:
        """What the convolution of a key head has: its query, its key and its values."""
        values = self.num_value_heads // self.num_key_heads * self.value_dim
        return 2 * self.key_dim + values

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        repeats = self.num_value_heads // self.num_key_heads
        widths = {"C": self.key_dim, "U": repeats * self.value_dim, "Y": self.value_dim}
        return {"N": self.num_key_heads, "J": repeats, **widths, "W": self.conv_width}

    @property
    def shapes(self) -> Shapes:
        """The shapes by which a kernel is chosen."""
        return Shapes(
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds of a row: the matrices, and the inputs of the convolution
        that the next token sees.
        """
        state = (self.num_value_heads, self.key_dim, self.value_dim)
        inputs = (self.conv_width - 1, self.num_key_heads, self.channels)
        fields = (Field("state", state, 0, jnp.float32), Field("inputs", inputs, split=1))
        heads, f32 = self.num_value_heads, jnp.float32
        replayed = (
            Field("keys", (self.num_key_heads, self.key_dim), 0, f32),
            Field("values", (heads, self.value_dim), 0, f32),
            Field("decay", (heads, self.num_decays), 0, f32),
            Field("strength", (heads,), 0, f32),
            Field("inputs", (self.num_key_heads, self.channels), 0),
        )
        return (Record(fields=fields, per="block", replayed=replayed),)

    def replay(self, tokens: State, pool: State, rows: PackedRows, step: StepContext) -> State:
        """Return the pool with the states after these tokens, of each of which it takes what
        `keeps` names as replayed: arrays [T, *field.shape].
        """
        keys, kernel = tokens["keys"], xla if step.delta is None else step.delta
        changes = (keys, tokens["values"], tokens["decay"], tokens["strength"])
        _, state = kernel.prefill(keys, *changes, pool["state"], rows)  # what it reads is of no use
        inputs = short_conv.advanced(tokens["inputs"], pool["inputs"], rows)
        return {"state": state, "inputs": inputs}

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it: f32 channels and heads of every token, and what the
        kernel of the rule does.
        """
        tokens = 8 * step.rows * self.num_key_heads * self.channels
        tokens += 8 * step.rows * self.num_value_heads * self.value_dim
        kernel = xla if step.delta is None else step.delta
        in_kernel = kernel.scratch_bytes(self.shapes, self.num_decays, step.sequences)
        return Scratch(shared=tokens + in_kernel, kept=4 * step.tokens * step.hidden_size)

    def served(self, devices: int) -> Self:
        """Itself, if so many devices can share its key heads; else ConfigError."""
        if self.num_key_heads % devices:
            raise ConfigError(
                f"linear_num_key_heads={self.num_key_heads} do not divide over {devices} devices "
                "of the mesh's tensor axis"
            )
        return self

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        keys, values = self.num_key_heads // devices, self.num_value_heads // devices
        return dataclasses.replace(self, num_key_heads=keys, num_value_heads=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(GatedDeltaConfig):
    """Gated DeltaNet: each value head of a token has one decay."""

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer. What belongs to a key head lies together:
        a split over key heads is contiguous.
        """
        f32 = {"split": "N", "in_f32": True}
        out = "linear_attn.out_proj.weight"
        return (
            ParamSpec("delta.qkvz", "N C+C+U+U, E", QKVZ, "normal", "N"),
            ParamSpec("delta.ba", "N J+J, E", BA, "normal", "N", is_quantized=False),
            ParamSpec("delta.conv", "N C+C+U | 1 | W", CONV, "normal", "N"),
            ParamSpec("delta.log_decay", "N J", "linear_attn.A_log", "zeros", **f32),
            ParamSpec("delta.dt_bias", "N J", "linear_attn.dt_bias", "ones", **f32),
            ParamSpec("delta.norm.scale", "Y", "linear_attn.norm.weight", "ones"),
            ParamSpec("delta.out", "E, N U", out, "residual", "N"),
        )

    def build(self, weights: Parameters) -> "Delta":
        """Return the module of these parameters."""
        norm = RMSNorm.of(NormConfig(eps=self.norm_eps), weights["delta.norm.scale"])
        assert norm is not None
        return Delta(
            qkvz=Linear.of(weights["delta.qkvz"]),
            ba=Linear.of(weights["delta.ba"]),
            conv=weights["delta.conv"].value,
            log_decay=weights["delta.log_decay"].value,
            dt_bias=weights["delta.dt_bias"].value,
            norm=norm,
            out=Linear.of(weights["delta.out"]),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """qkvz: query, key, values and their gates of each key head, together: [..., N, C+C+U+U]. ba:
    strengths and decays of its J value heads: [..., N, J+J]. conv: [N, C+C+U, 1, W]. log_decay,
    dt_bias: f32 [N, J].
    """

    qkvz: Linear
    ba: Linear
    conv: Array
    log_decay: Array
    dt_bias: Array
    norm: RMSNorm
    out: Linear
    config: DeltaConfig = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
    ) -> tuple[Array, KVView]:
        """x [..., E]. rotary: None. places: where the cache holds what `keeps` says."""
        channels = self.config.channels
        with jax.named_scope("qkvz"):
            qkvz = self.qkvz(x, step)
            qkvz_TNC = qkvz.reshape(-1, *qkvz.shape[-2:])
            inputs_TNC, z_TNU = qkvz_TNC[..., :channels], qkvz_TNC[..., channels:]
            ba = self.ba(x, step)
            beta_TNJ, decay_TNJ = jnp.split(ba.reshape(-1, *ba.shape[-2:]), 2, axis=-1)
            rate_TNJ = decay_TNJ.astype(jnp.float32) + in_f32(self.dt_bias)[None]
            rate_TNJ = step.apply("softplus", rate_TNJ)
            g_TNJ = -step.apply("exp", in_f32(self.log_decay))[None] * rate_TNJ
            beta_TH, g_TH = (y.reshape(y.shape[0], -1) for y in (beta_TNJ, g_TNJ))
        changes = (inputs_TNC, g_TH[..., None], beta_TH)
        o_THY, kv = delta_rule(self.config, self.conv, changes, step, kv, places)
        with jax.named_scope("out"):
            z_THY = z_TNU.reshape(o_THY.shape)
            y_THY = self.norm(rounded(o_THY, x.dtype)).astype(jnp.float32)
            y_THY = rounded(y_THY * step.apply("silu", z_THY.astype(jnp.float32)), x.dtype)
            return self.out(y_THY.reshape(*x.shape[:-1], -1), step), kv


def in_f32(weight: Array) -> Array:
    """Return a weight in f32: a caller may have cast its whole tree to a smaller type."""
    return weight.astype(jnp.float32)


def delta_rule(
    config: GatedDeltaConfig,
    conv: Array,
    tokens: tuple[Array, Array, Array],
    step: StepContext,
    kv: KVView,
    places: tuple[Place, ...],
) -> tuple[Array, KVView]:
    """Return the outputs f32 [T, H, Y] of the rule behind its short convolution, and the view with
    what it kept.

    conv: [N, C+C+U, 1, W]. tokens: queries, keys and values [T, N, C+C+U], decays g f32 [T, H, 1 or
    C], and what becomes their strengths [T, H]. places: where the cache holds what `keeps` says.
    """
    (place,) = places
    inputs_TNC, g_THC, strength_TH = tokens
    rows, slots = kv.rows(place), kv.slots(place)
    packed = PackedRows(rows.start_loc_S1, rows.first_S, slots.read_S, slots.written_S)
    with jax.named_scope("short_conv"):
        convolve = short_conv.decode if rows.length == 1 else short_conv.packed
        u_TNC, inputs = convolve(inputs_TNC, conv[..., 0, :], slots.pool["inputs"], packed)
        u_TNC = rounded(step.apply("silu", u_TNC), inputs_TNC.dtype).astype(jnp.float32)
    with jax.named_scope("gated_delta"):
        q_TNC, k_TNC, v_TNU = jnp.split(u_TNC, [config.key_dim, 2 * config.key_dim], axis=-1)
        q_TNC, k_TNC = unit(q_TNC) * jnp.float32(config.key_dim**-0.5), unit(k_TNC)
        v_THY = v_TNU.reshape(v_TNU.shape[0], -1, config.value_dim)
        beta_TH = step.apply("sigmoid", strength_TH.astype(jnp.float32))
        beta_TH = rounded(beta_TH, strength_TH.dtype).astype(jnp.float32)
        if config.allows_negative:
            beta_TH = 2 * beta_TH
        changes = (q_TNC, k_TNC, v_THY, g_THC, beta_TH)
        kernel = xla if step.delta is None else step.delta
        if rows.length is None:
            o_THY, state = kernel.prefill(*changes, slots.pool["state"], packed)
        elif rows.length == 1:
            o_THY, state = kernel.decode(*changes, slots.pool["state"], packed)
        else:
            o_THY, state = dense(changes, slots.pool["state"], packed, rows.length)
    kv = kv.with_slots(place, {"state": state, "inputs": inputs})
    replayed = {"keys": k_TNC, "values": v_THY, "decay": g_THC, "strength": beta_TH}
    return o_THY, kv.with_replayed(place, replayed | {"inputs": inputs_TNC})


def unit(x: Array) -> Array:
    """Return f32 heads x [..., C] divided by their lengths."""
    return x * lax.rsqrt(sum_of_last(multiplied(x, x)) + jnp.float32(NORM_EPS))


def dense(
    tokens: tuple[Array, ...], pool: Array, rows: PackedRows, length: int
) -> tuple[Array, Array]:
    """Return o [T, H, Y] of q, k, v, g and beta of rows of so many tokens each, and the pool: in a
    form that can be differentiated.
    """
    q, k, v, g, beta = (x.reshape(-1, length, *x.shape[1:]) for x in tokens)
    o, states = xla.dense(q, k, v, g, beta, rows.read(pool))
    return o.reshape(-1, *o.shape[2:]), rows.written(pool, states)
