"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each channel of a
key, and outputs that are gated by a sigmoid.
"""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.arithmetic import rounded
from jpaged.models.layers.delta import GatedDeltaConfig, delta_rule, in_f32
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.layers.rope import Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec, Part

QKV = (
    Part("q", "N C, E", "self_attn.q_proj.weight"),
    Part("k", "N C, E", "self_attn.k_proj.weight"),
    Part("v", "N U, E", "self_attn.v_proj.weight"),
)
GATE = Part("z", "N U, E", "self_attn.g_proj.weight")
DOWN = (
    Part("decay_down", "Lg, E", "self_attn.f_a_proj.weight"),
    Part("gate_down", "Lg, E", "self_attn.g_a_proj.weight"),
)
CONV = (
    Part("conv_q", "N C | 1 | W", "self_attn.q_conv1d.weight"),
    Part("conv_k", "N C | 1 | W", "self_attn.k_conv1d.weight"),
    Part("conv_v", "N U | 1 | W", "self_attn.v_conv1d.weight"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig(GatedDeltaConfig):
    """A key head serves one value head. gate_rank: decays and gates come of so many numbers each,
    which come of x; None: of x. lowest_decay: g is that number, below 0, times a sigmoid; None: g
    has no bound, as in Gated DeltaNet.
    """

    gate_rank: int | None = None
    lowest_decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_value_heads != self.num_key_heads:
            heads = f"num_value_heads={self.num_value_heads}, num_key_heads={self.num_key_heads}"
            raise ConfigError(f"{heads}: Kimi Delta Attention has as many of both")
        if self.gate_rank is not None:
            at_least(1, self, "gate_rank")
        if self.lowest_decay is not None and not -math.inf < self.lowest_decay < 0:
            raise ConfigError(f"lowest_decay={self.lowest_decay!r}: must be a number below 0")

    @property
    def num_decays(self) -> int:
        """One decay for each channel of a key."""
        return self.key_dim

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        sizes = super().sizes
        return sizes if self.gate_rank is None else sizes | {"Lg": self.gate_rank}

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer. What belongs to a head lies together: a
        split over heads is contiguous. What makes decays and strengths stays plain.
        """
        plain = {"split": "N", "is_quantized": False}
        f32 = {"split": "N", "in_f32": True}
        if self.gate_rank is None:
            decay = "self_attn.f_proj.weight"
            gated = [
                ParamSpec("kda.qkvz", "N C+C+U+U, E", (*QKV, GATE), "normal", "N"),
                ParamSpec("kda.decay", "N C, E", decay, **plain),
            ]
        else:
            decay, gate = "self_attn.f_b_proj.weight", "self_attn.g_b_proj.weight"
            gated = [
                ParamSpec("kda.qkv", "N C+C+U, E", QKV, "normal", "N"),
                ParamSpec("kda.down", "Lg+Lg, E", DOWN, is_quantized=False),
                ParamSpec("kda.decay_up", "N C, Lg", decay, **plain),
                ParamSpec("kda.gate_up", "N U, Lg", gate, **plain),
            ]
        return (
            *gated,
            ParamSpec("kda.strength", "N, E", "self_attn.b_proj.weight", **plain),
            ParamSpec("kda.conv", "N C+C+U | 1 | W", CONV, "normal", "N"),
            ParamSpec("kda.log_decay", "N", "self_attn.A_log", "zeros", **f32),
            ParamSpec("kda.dt_bias", "N C", "self_attn.dt_bias", "ones", **f32),
            ParamSpec("kda.norm.scale", "Y", "self_attn.o_norm.weight", "ones"),
            ParamSpec("kda.out", "E, N U", "self_attn.o_proj.weight", "residual", "N"),
        )

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it: decays of all channels beside the rest."""
        of_token = 20 * self.num_key_heads * self.key_dim + 8 * (self.gate_rank or 0)
        return super().scratch(step) + Scratch(shared=step.rows * of_token)

    def served(self, devices: int) -> Self:
        """Itself, if so many devices can share its heads; else ConfigError."""
        if self.num_key_heads % devices:
            raise ConfigError(
                f"{self.num_key_heads} heads of Kimi Delta Attention do not divide over {devices} "
                "devices of the mesh's tensor axis"
            )
        return self

    def build(self, weights: Parameters) -> "KimiDelta":
        """Return the module of these parameters."""
        norm = NormConfig(eps=self.norm_eps, in_f32=True)
        norm = RMSNorm.of(norm, weights["kda.norm.scale"])
        assert norm is not None
        has_rank = self.gate_rank is not None
        return KimiDelta(
            qkvz=Linear.of(weights["kda.qkv" if has_rank else "kda.qkvz"]),
            down=Linear.of(weights["kda.down"]) if has_rank else None,
            decay=Linear.of(weights["kda.decay_up" if has_rank else "kda.decay"]),
            gate_up=Linear.of(weights["kda.gate_up"]) if has_rank else None,
            strength=Linear.of(weights["kda.strength"]),
            conv=weights["kda.conv"].value,
            log_decay=weights["kda.log_decay"].value,
            dt_bias=weights["kda.dt_bias"].value,
            norm=norm,
            out=Linear.of(weights["kda.out"]),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDelta:
    """qkvz: query, key, values and their gates of each head, together: [..., N, C+C+U+U]; without
    the gates, [..., N, C+C+U], where these come of fewer numbers. down: to these, of decays and of
    gates, [..., Lg+Lg]. decay: of x or of its share of them, [..., N, C]. gate_up: [..., N, U].
    strength: [..., N]. conv: [N, C+C+U, 1, W]. log_decay: f32 [N]. dt_bias: f32 [N, C].
    """

    qkvz: Linear
    down: Linear | None
    decay: Linear
    gate_up: Linear | None
    strength: Linear
    conv: Array
    log_decay: Array
    dt_bias: Array
    norm: RMSNorm
    out: Linear
    config: KimiDeltaConfig = dataclasses.field(metadata={"static": True})

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
            inputs, z = qkvz[..., :channels], qkvz[..., channels:]
            of_decay = x
            if self.down is not None and self.gate_up is not None:
                of_decay, of_gate = jnp.split(self.down(x, step), 2, axis=-1)
                z = self.gate_up(of_gate, step)
            inputs, decay = (
                y.reshape(-1, *y.shape[-2:]) for y in (inputs, self.decay(of_decay, step))
            )
            strength = self.strength(x, step)
        changes = (inputs, self._decays(decay, step), strength.reshape(-1, strength.shape[-1]))
        o_TNY, kv = delta_rule(self.config, self.conv, changes, step, kv, places)
        with jax.named_scope("out"):
            y_TNY = self.norm(rounded(o_TNY, x.dtype).astype(jnp.float32))
            gate = step.apply("sigmoid", z.reshape(o_TNY.shape).astype(jnp.float32))
            return self.out(rounded(y_TNY * gate, x.dtype).reshape(*x.shape[:-1], -1), step), kv

    def _decays(self, product_TNC: Array, step: StepContext) -> Array:
        """Return g f32 [T, N, C]."""
        x_TNC = product_TNC.astype(jnp.float32) + in_f32(self.dt_bias)[None]
        rate = step.apply("exp", in_f32(self.log_decay))[None, :, None]
        if self.config.lowest_decay is None:
            return -rate * step.apply("softplus", x_TNC)
        return jnp.float32(self.config.lowest_decay) * step.apply("sigmoid", rate * x_TNC)
