"""A decoder layer: a mixer of tokens and a feed-forward part, each with its norms and residual."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import positive
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.attention import Attention, AttentionConfig
from jpaged.models.layers.conv import Conv, ConvConfig
from jpaged.models.layers.delta import Delta, DeltaConfig
from jpaged.models.layers.experts import Experts, ExpertsConfig
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.mlp import MLP, MLPConfig
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig, RMSNorm
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.quantized import is_quantized
from jpaged.models.record import Record

type MixerConfig = AttentionConfig | DeltaConfig | ConvConfig
type Mixer = Attention | Delta | Conv


class PartConfig[Module](Protocol):
    """What each kind of mixer and of feed-forward part says of itself, beside its mathematics.

    A mixer also has `keeps`, what the cache holds for it; `served`, an equal mixer that so many
    devices can share; and `rope`, or None.
    """

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        ...

    def params(self) -> tuple[ParamSpec, ...]:
        """Its parameters, by names within a layer."""
        ...

    def scratch(self, step: StepSizes) -> Scratch:
        """What a step allocates for it."""
        ...

    def share(self, devices: int) -> Self:
        """What each of so many devices has of it."""
        ...

    def build(self, weights: Parameters) -> Module:
        """The module of these parameters."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer. mixer, ffn: None where the layer has no such part.

    norms: "pre" normalises what a part takes, "post" what it gives, before that is added; "both"
    does both. residual_multiplier: of what is added.
    """

    mixer: MixerConfig | None
    ffn: MLPConfig | ExpertsConfig | None
    norms: Literal["pre", "post", "both"] = "pre"
    norm: NormConfig = PLAIN_NORM
    residual_multiplier: float = 1.0

    def __post_init__(self) -> None:
        positive(residual_multiplier=self.residual_multiplier)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters, but for those of the model."""
        return {name: size for part in self._parts for name, size in part.sizes.items()}

    @property
    def _parts(self) -> Iterator[PartConfig[Mixer | MLP | Experts]]:
        return (part for part in (self.mixer, self.ffn) if part is not None)

    def params(self) -> tuple[ParamSpec, ...]:
        """Its parameters in the order of the forward pass, by names within it."""
        specs: list[ParamSpec] = []
        has_pre, has_post, init = self.norms != "post", self.norms != "pre", self.norm.init
        if self.mixer is not None:
            if has_pre:
                specs.append(ParamSpec(INPUT_NORM, "E", "input_layernorm.weight", init))
            specs += self.mixer.params()
            if has_post:
                source = "post_attention_layernorm.weight"
                specs.append(ParamSpec(ATTENTION_POST_NORM, "E", source, init))
        if self.ffn is not None:
            if has_pre:
                specs.append(ParamSpec(POST_NORM, "E", "post_attention_layernorm.weight", init))
            specs += self.ffn.params()
            if has_post:
                source = "post_feedforward_layernorm.weight"
                specs.append(ParamSpec(MLP_POST_NORM, "E", source, init))
        return tuple(specs)

    def keeps(self) -> tuple[Record, ...]:
        """What the cache holds for it; () where that is nothing."""
        return () if self.mixer is None else self.mixer.keeps()

    def scratch(self, step: StepSizes) -> Scratch:
        """What a step allocates for it."""
        norms = Scratch(shared=step.rows * 4 * step.hidden_size)
        return sum((part.scratch(step) for part in self._parts), norms)

    def served(self, devices: int) -> Self:
        """An equal layer that so many devices can share; ConfigError where there is none."""
        return self if self.mixer is None else self._with(mixer=self.mixer.served(devices))

    def share(self, devices: int) -> Self:
        """What each of so many devices has of a served one."""
        mixer = None if self.mixer is None else self.mixer.share(devices)
        return self._with(mixer=mixer, ffn=None if self.ffn is None else self.ffn.share(devices))

    def _with(self, **changes: MixerConfig | MLPConfig | ExpertsConfig | None) -> Self:
        return dataclasses.replace(self, **changes)

    def build(self, weights: Parameters) -> "Layer":
        """The module of these parameters."""

        def residual(before: str, after: str) -> Residual:
            norms = (RMSNorm.of(self.norm, weights.get(name)) for name in (before, after))
            return Residual(*norms, multiplier=self.residual_multiplier)

        return Layer(
            around_mixer=residual(INPUT_NORM, ATTENTION_POST_NORM),
            mixer=None if self.mixer is None else self.mixer.build(weights),
            around_ffn=residual(POST_NORM, MLP_POST_NORM),
            ffn=None if self.ffn is None else self.ffn.build(weights),
        )


INPUT_NORM, ATTENTION_POST_NORM = "input_norm.scale", "attention_post_norm.scale"
POST_NORM, MLP_POST_NORM = "post_norm.scale", "mlp_post_norm.scale"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The residual connection around a part. before, after: norms of what it takes and of what it
    gives, or None. multiplier: of what is added.
    """

    before: RMSNorm | None
    after: RMSNorm | None
    multiplier: float = dataclasses.field(default=1.0, metadata={"static": True})

    def taken(self, x: Array) -> Array:
        """What the part takes of x [..., E]."""
        return x if self.before is None else self.before(x)

    def added(self, x: Array, y: Array) -> Array:
        """x with what the part gives."""
        return x + scaled(y if self.after is None else self.after(y), self.multiplier)


def scaled(x: Array, factor: float) -> Array:
    """x times a number, which is rounded to its dtype first."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer of tokens, then a feed-forward part; None where the layer has no such part."""

    around_mixer: Residual
    mixer: Mixer | None
    around_ffn: Residual
    ffn: MLP | Experts | None

    @property
    def experts_are_plain(self) -> bool:
        """Whether the weights of its experts are arrays; True without experts."""
        return not (isinstance(self.ffn, Experts) and is_quantized(self.ffn.gate_up))

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that it takes."""
        return None if self.mixer is None else self.mixer.config.rope

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
    ) -> tuple[Array, KVView]:
        """x [..., E]. rotary: of `rope`. places: where the cache holds what LayerConfig.keeps says.
        Returns x after the layer, and the view with what it kept.
        """
        if self.mixer is not None:
            with jax.named_scope("attention"):
                y, kv = self.mixer(self.around_mixer.taken(x), step, rotary, kv, places)
                x = self.around_mixer.added(x, y)
        if self.ffn is not None:
            with jax.named_scope("mlp"):
                y = self.ffn(self.around_ffn.taken(x), step)
                x = self.around_ffn.added(x, y)
        return x, kv
