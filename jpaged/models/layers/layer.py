"""A decoder layer: a mixer of tokens and a feed-forward part, each with its norms and residual."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, Self

import jax
from jax import Array

from jpaged.checks import positive
from jpaged.errors import ConfigError
from jpaged.models.kv_view import KVView, Place
from jpaged.models.last import Last
from jpaged.models.layers.arithmetic import added, multiplied, scaled
from jpaged.models.layers.attention import Attention, AttentionConfig
from jpaged.models.layers.conv import Conv, ConvConfig
from jpaged.models.layers.delta import Delta, DeltaConfig
from jpaged.models.layers.experts import Experts, ExpertsConfig, ExpertSharing
from jpaged.models.layers.kda import KimiDelta, KimiDeltaConfig
from jpaged.models.layers.latent import Latent, LatentConfig
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.mamba import Mamba, MambaConfig
from jpaged.models.layers.mlp import MLP, MLPConfig
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig, RMSNorm
from jpaged.models.layers.parallel_ffn import ParallelFFN, ParallelFFNConfig
from jpaged.models.layers.parallel_mixer import ParallelMixer, ParallelMixerConfig
from jpaged.models.layers.per_layer import PerLayer, PerLayerConfig
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.quantized import is_quantized
from jpaged.models.record import Record

type SingleMixerConfig = (
    AttentionConfig | LatentConfig | DeltaConfig | KimiDeltaConfig | MambaConfig | ConvConfig
)
type MixerConfig = SingleMixerConfig | ParallelMixerConfig
type Mixer = Attention | Latent | Delta | KimiDelta | Mamba | Conv | ParallelMixer
type FFNConfig = MLPConfig | ExpertsConfig | ParallelFFNConfig
type FFN = MLP | Experts | ParallelFFN


class PartConfig[Module](Protocol):
    """What each kind of mixer and of feed-forward part says of itself, beside its mathematics.

    A mixer also has `keeps`, what the cache holds for it; `served`, an equal mixer that so many
    devices can share; and `rope`, or None. A mixture of experts has `served`, too.
    """

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters."""
        ...

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters, by names within a layer."""
        ...

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it."""
        ...

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of it."""
        ...

    def build(self, weights: Parameters) -> Module:
        """Return the module of these parameters."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer. mixer, ffn: None where the layer has no such part.

    norms: "pre" normalises what a part takes, "post" what it gives, before that is added; "both"
    does both. residual_multiplier: of what is added. per_layer: what the layer does at its end with
    embeddings that tokens have for each layer. has_scalar: what leaves the layer is multiplied by a
    number, a parameter.
    """

    mixer: MixerConfig | None
    ffn: FFNConfig | None
    norms: Literal["pre", "post", "both"] = "pre"
    norm: NormConfig = PLAIN_NORM
    residual_multiplier: float = 1.0
    per_layer: PerLayerConfig | None = None
    has_scalar: bool = False

    def __post_init__(self) -> None:
        positive(residual_multiplier=self.residual_multiplier)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters, but for those of the model."""
        return {name: size for part in self._parts for name, size in part.sizes.items()}

    @property
    def _parts(self) -> Iterator[PartConfig[Mixer | FFN | PerLayer]]:
        return (part for part in (self.mixer, self.ffn, self.per_layer) if part is not None)

    @property
    def mixers(self) -> tuple[SingleMixerConfig, ...]:
        """Its mixer; both where attention and Mamba-2 stand side by side; or none."""
        if isinstance(self.mixer, ParallelMixerConfig):
            return self.mixer.attention, self.mixer.mamba
        return () if self.mixer is None else (self.mixer,)

    @property
    def ffns(self) -> tuple[MLPConfig | ExpertsConfig, ...]:
        """Its feed-forward part; both where an MLP and experts stand side by side; or none."""
        if isinstance(self.ffn, ParallelFFNConfig):
            return self.ffn.mlp, self.ffn.experts
        return () if self.ffn is None else (self.ffn,)

    def params(self) -> tuple[ParamSpec, ...]:
        """Return its parameters in the order of the forward pass, by names within it."""
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
        if self.per_layer is not None:
            specs += self.per_layer.params()
        if self.has_scalar:
            specs.append(ParamSpec(SCALAR, "1", "layer_scalar", "ones"))
        return tuple(specs)

    def keeps(self) -> tuple[Record, ...]:
        """Return what the cache holds for it; () where that is nothing."""
        mixed = () if self.mixer is None else self.mixer.keeps()
        routed = self.ffn.keeps() if isinstance(self.ffn, ExpertsConfig | ParallelFFNConfig) else ()
        return (*mixed, *routed)

    def keeping_choices(self) -> Self:
        """Return the layer, whose experts, if it has any, keep which of them each token took."""
        ffn = self.ffn
        if isinstance(ffn, ExpertsConfig):
            return self._with(ffn=dataclasses.replace(ffn, keeps_choice=True))
        if isinstance(ffn, ParallelFFNConfig):
            experts = dataclasses.replace(ffn.experts, keeps_choice=True)
            return self._with(ffn=dataclasses.replace(ffn, experts=experts))
        return self

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for it."""
        norms = Scratch(shared=step.rows * 4 * step.hidden_size)
        return sum((part.scratch(step) for part in self._parts), norms)

    def served(self, devices: int, sharing: ExpertSharing) -> Self:
        """Return an equal layer that so many devices can share; ConfigError where there is none."""
        mixer = None if self.mixer is None else self.mixer.served(devices)
        ffn = self.ffn
        if isinstance(ffn, ExpertsConfig | ParallelFFNConfig):
            ffn = ffn.served(devices, sharing)
        return self._with(mixer=mixer, ffn=ffn)

    def share(self, devices: int) -> Self:
        """Return what each of so many devices has of a served one."""
        mixer = None if self.mixer is None else self.mixer.share(devices)
        return self._with(mixer=mixer, ffn=None if self.ffn is None else self.ffn.share(devices))

    def _with(self, **changes: MixerConfig | FFNConfig | None) -> Self:
        return dataclasses.replace(self, **changes)

    def build(self, weights: Parameters) -> "Layer":
        """Return the module of these parameters."""

        def residual(before: str, after: str) -> Residual:
            norms = (RMSNorm.of(self.norm, weights.get(name)) for name in (before, after))
            return Residual(*norms, multiplier=self.residual_multiplier)

        scalar = weights.get(SCALAR)
        return Layer(
            around_mixer=residual(INPUT_NORM, ATTENTION_POST_NORM),
            mixer=None if self.mixer is None else self.mixer.build(weights),
            around_ffn=residual(POST_NORM, MLP_POST_NORM),
            ffn=None if self.ffn is None else self.ffn.build(weights),
            per_layer=None if self.per_layer is None else self.per_layer.build(weights),
            scalar=None if scalar is None else scalar.value,
        )


INPUT_NORM, ATTENTION_POST_NORM = "input_norm.scale", "attention_post_norm.scale"
POST_NORM, MLP_POST_NORM = "post_norm.scale", "mlp_post_norm.scale"
SCALAR = "scalar"


def check_layers(layers: Sequence[LayerConfig]) -> None:
    """ConfigError unless these can be the layers of one model: all have the same per-layer
    embeddings, or none; a layer that reads another's keys and values names the last one before it
    that keeps such keys and values, of as many heads and with the same window; and one that attends
    to what another chose comes after one that chooses as many.
    """
    for i, layer in enumerate(layers):
        if layer.per_layer != layers[0].per_layer:
            raise ConfigError(f"per_layer={layer.per_layer} in layer {i}: must be that of layer 0")
    last: dict[tuple[object, ...], int] = {}
    chosen: int | None = None
    for i, layer in enumerate(layers):
        mixer = layer.mixer
        if isinstance(mixer, LatentConfig) and mixer.chosen is not None:
            if mixer.indexer is None and mixer.chosen != chosen:
                raise ConfigError(
                    f"layer {i} attends to {mixer.chosen} tokens that a layer before it chose: the "
                    f"last indexer before it chooses {chosen}"
                )
            chosen = mixer.chosen
        if not isinstance(mixer, AttentionConfig):
            continue
        heads = (mixer.num_heads, mixer.num_kv_heads)
        form = (*heads, mixer.head_dim, mixer.value_width, mixer.window)
        if mixer.keys_of is None:
            last[form] = i
        elif last.get(form) != mixer.keys_of:
            kept = f"layer {last[form]}" if form in last else "no layer"
            raise ConfigError(
                f"keys_of={mixer.keys_of} in layer {i}: the last layer before it that keeps keys "
                f"and values of its heads, widths and window is {kept}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream: x [..., E] and what is not yet added to it, of the same shape; None is
    nothing. The next norm can do both at once.
    """

    x: Array
    addend: Array | None = None

    @property
    def sum(self) -> Array:
        """What it stands for."""
        return self.x if self.addend is None else added(self.x, self.addend)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The residual connection around a part. before, after: norms of what it takes and of what it
    gives, or None. multiplier: of what is added.
    """

    before: RMSNorm | None
    after: RMSNorm | None
    multiplier: float = dataclasses.field(default=1.0, metadata={"static": True})

    def taken(self, x: Array, step: StepContext) -> Array:
        """Return what the part takes of x [..., E]."""
        return self.taken_of_sum(Stream(x), step)[1]

    def taken_of_sum(self, stream: Stream, step: StepContext) -> tuple[Array, Array]:
        """Return what the stream stands for [..., E], and what the part takes of that."""
        return _normed(self.before, stream, step)

    def addend(self, y: Array, step: StepContext) -> Array:
        """Return what is added to x of what the part gives."""
        return scaled(_normed(self.after, Stream(y), step)[1], self.multiplier)


def _normed(norm: RMSNorm | None, stream: Stream, step: StepContext) -> tuple[Array, Array]:
    """Return what the stream stands for, and that normed by the step's module of products where
    that can; as it is where there is no norm.
    """
    x, scale, products = stream.x, None if norm is None else norm.scale, step.products
    if norm is None or scale is None or products is None or not products.norms(x, scale):
        x = stream.sum
        return x, x if norm is None else norm(x)
    config = norm.config
    rest = (config.eps, config.has_offset, config.in_f32)
    return products.normed(x, stream.addend, scale, step.count(x), *rest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer of tokens, then a feed-forward part, then what per-layer embeddings add; None where
    the layer has no such part. scalar: [1], what leaves the layer is multiplied by it; None is 1.
    """

    around_mixer: Residual
    mixer: Mixer | None
    around_ffn: Residual
    ffn: FFN | None
    per_layer: PerLayer | None = None
    scalar: Array | None = None

    @property
    def experts_are_plain(self) -> bool:
        """Whether the weights of its experts are arrays; True without experts."""
        return self.experts is None or not is_quantized(self.experts.gate_up)

    @property
    def experts(self) -> Experts | None:
        """Its mixture of experts, or None."""
        ffn = self.ffn.experts if isinstance(self.ffn, ParallelFFN) else self.ffn
        return ffn if isinstance(ffn, Experts) else None

    @property
    def narrows(self) -> bool:
        """Whether what follows what it keeps can be computed for some of a step's tokens alone."""
        keeps_choice = self.experts is not None and self.experts.config.keeps_choice
        return self.mixer is not None and not keeps_choice

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that it takes."""
        return None if self.mixer is None else self.mixer.config.rope

    def __call__(
        self,
        stream: Stream,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
        inputs: Array | None = None,
        last: Last | None = None,
    ) -> tuple[Stream, KVView]:
        """rotary: of `rope`. places: where the cache holds what LayerConfig.keeps says, or what the
        layer keeps whose keys it reads. inputs [..., P]: of per-layer embeddings. last: the tokens
        that are wanted of what leaves a layer that `narrows`; None is all. Returns the stream after
        the layer, and the view with what it kept of all tokens.
        """
        experts, mixed = self.experts, places
        routes: Place | None = None
        if experts is not None and experts.config.keeps_choice:
            *mixed, routes = places
        if self.mixer is not None:
            with jax.named_scope("attention"):
                x, taken = self.around_mixer.taken_of_sum(stream, step)
                if isinstance(self.mixer, Attention):
                    y, kv = self.mixer(taken, step, rotary, kv, tuple(mixed), last)
                else:
                    y, kv = self.mixer(taken, step, rotary, kv, tuple(mixed))
                    y = y if last is None else last.rows_of(y)
                if last is not None:
                    x, inputs = jax.tree.map(last.rows_of, (x, inputs))
                    step = last.step
                stream = Stream(x, self.around_mixer.addend(y, step))
        if self.ffn is not None:
            with jax.named_scope("mlp"):
                x, taken = self.around_ffn.taken_of_sum(stream, step)
                routed = None
                if experts is not None and routes is not None:
                    seen = x if isinstance(self.ffn, ParallelFFN) else taken
                    routed, kv = experts.route(seen, step, kv, routes)
                if isinstance(self.ffn, ParallelFFN):
                    y = self.ffn(taken, step, x, routed)
                elif isinstance(self.ffn, Experts):
                    y = self.ffn(taken, step, routed=routed)
                else:
                    y = self.ffn(taken, step)
                stream = Stream(x, self.around_ffn.addend(y, step))
        if self.per_layer is not None:
            assert inputs is not None, "the model has them for all layers"
            with jax.named_scope("per_layer"):
                stream = Stream(self.per_layer(stream.sum, step, inputs))
        if self.scalar is not None:
            stream = Stream(multiplied(stream.sum, self.scalar[0]))
        return stream, kv
