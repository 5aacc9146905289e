"""ModelConfig: the architecture, read from a Hugging Face config.json; frozen and compared by
value.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jpaged.checks import at_least, positive, read_json
from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError, UnsupportedError
from jpaged.models.alike import OPTIONS, Alike
from jpaged.models.draft_head import HeadConfig, MTPConfig
from jpaged.models.hf_config import read_hf, write_hf
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.embedding import EMBED
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig, check_layers
from jpaged.models.layers.mlp import Activation, MLPConfig
from jpaged.models.layers.norm import PLAIN_NORM, NormConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.layers.scratch import Scratch, StepSizes
from jpaged.models.param_spec import ParamSpec
from jpaged.models.pooling import PoolingConfig
from jpaged.models.record import Record
from jpaged.models.rope_scaling import RopeScaling
from jpaged.models.sentence import read_pooling
from jpaged.models.vision.tower import VisionConfig

UNSET: Any = object()  # of a switch that nobody named
LM_HEAD = ParamSpec("lm_head.weight", "V, E", "lm_head.weight", "normal", "V")
SCORE_HEAD = ParamSpec("score.weight", "Y, E", "score.weight")


@dataclasses.dataclass(frozen=True, init=False)
class ModelConfig:
    """The architecture of one decoder: its layers, what stands before and after them, and nothing
    that differs by layer beside `layers`.

    Layers that are alike can be described by switches instead (see models.alike.Alike): by
    ModelConfig(num_layers=2, num_heads=4, ..., qk_norm=True), and dataclasses.replace(config,
    qk_norm=False) changes them in every layer. `config.switches` reads them back where layers are
    alike. The sizes that most models have once, such as config.num_heads, are properties too, which
    raise AttributeError where layers differ.

    Compared by value, without `eos_token_ids`: they ride along and change no shape and no number.
    """

    family: str  # one of FAMILIES
    vocab_size: int  # V
    hidden_size: int  # E
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    norm: NormConfig = PLAIN_NORM  # after the last layer
    tie_word_embeddings: bool = False
    scaled_embedding: bool = False  # by the root of hidden_size
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0  # logits are divided by it
    final_logit_softcapping: float | None = None  # c: a logit z becomes c * tanh(z / c)
    draft_head: HeadConfig | MTPConfig | None = None  # a head, which guesses for another model
    num_labels: int | None = None  # Y: of a classifier; 0: no head; None: a vocabulary
    pooling: PoolingConfig | None = None  # what `embed` does to hidden states; None: the last one
    num_deepstack: int = 0  # first layers after which embeddings of images add something
    vision: VisionConfig | None = None  # the tower that makes embeddings of images
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    def __init__(
        self,
        *,
        family: str,
        vocab_size: int,
        hidden_size: int,
        max_position_embeddings: int,
        layers: Iterable[LayerConfig] | None = None,
        norm: NormConfig | None = None,
        tie_word_embeddings: bool = False,
        scaled_embedding: bool = False,
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
        final_logit_softcapping: float | None = None,
        draft_head: HeadConfig | MTPConfig | None = None,
        num_labels: int | None = None,
        pooling: PoolingConfig | None = None,
        num_deepstack: int = 0,
        vision: VisionConfig | None = None,
        eos_token_ids: tuple[int, ...] = (),
        intermediate_size: int = UNSET,
        num_layers: int = UNSET,
        num_heads: int = UNSET,
        num_kv_heads: int = UNSET,
        head_dim: int = UNSET,
        rms_norm_eps: float = UNSET,
        rope_theta: float = UNSET,
        rope_scaling: RopeScaling | None = UNSET,
        local_rope_theta: float | None = UNSET,
        no_rope_layers: tuple[int, ...] = UNSET,
        partial_rotary_factor: float = UNSET,
        qk_norm: bool = UNSET,
        qk_norm_whole: bool = UNSET,
        attention_sinks: bool = UNSET,
        qkv_bias: bool = UNSET,
        out_bias: bool = UNSET,
        mlp_bias: bool = UNSET,
        pre_norms: bool = UNSET,
        post_norms: bool = UNSET,
        norm_offset: bool = UNSET,
        norm_in_f32: bool = UNSET,
        activation: Activation = UNSET,
        residual_multiplier: float = UNSET,
        attention_multiplier: float | None = UNSET,
        query_pre_attn_scalar: float | None = UNSET,
        attn_logit_softcapping: float | None = UNSET,
        num_experts: int = UNSET,
        experts_per_token: int = UNSET,
        expert_size: int = UNSET,
        shared_expert_size: int = UNSET,
        expert_bias: bool = UNSET,
        norm_topk_prob: bool = UNSET,
        dense_layers: tuple[int, ...] = UNSET,
        sliding_windows: tuple[int | None, ...] = UNSET,
    ):
        """layers: None is what the switches describe; switches beside them change every layer.
        norm: None is that of the layers. num_labels: a model without a vocabulary has no output
        matrix, so tie_word_embeddings says nothing. ConfigError names the first value that cannot
        be.
        """
        named = dict(locals())
        switches = {name: named[name] for name in SWITCHES if named[name] is not UNSET}
        values = {field.name: named[field.name] for field in dataclasses.fields(ModelConfig)}
        if layers is None:
            if missing := [name for name in NEEDED if name not in switches]:
                raise ConfigError(f"ModelConfig needs layers=, or {missing[0]}= and other switches")
            values["layers"] = Alike(**switches).layers()
        elif switches:
            changed = dataclasses.replace(Alike.of(tuple(layers)), **switches)
            values["layers"] = changed.layers()
            if not switches.keys().isdisjoint(("rms_norm_eps", "norm_offset", "norm_in_f32")):
                values["norm"] = changed.norm
        values["layers"] = tuple(values["layers"])
        if not values["layers"]:
            raise ConfigError("layers=(): a model has at least one")
        check_layers(values["layers"])
        if draft_head is not None and len(values["layers"]) != 1:
            raise ConfigError(f"{len(values['layers'])} layers: an {draft_head.title} has one")
        values["norm"] = values["norm"] or values["layers"][0].norm
        for name, value in values.items():
            object.__setattr__(self, name, value)
        at_least(1, self, "vocab_size", "hidden_size", "max_position_embeddings")
        if num_labels is not None:
            at_least(0, self, "num_labels")
            object.__setattr__(self, "tie_word_embeddings", False)
        if pooling is not None:
            pooling.check(hidden_size)
        if not isinstance(num_deepstack, int) or not 0 <= num_deepstack <= len(values["layers"]):
            most = len(values["layers"])
            raise ConfigError(
                f"num_deepstack={num_deepstack!r}: must be at most {most}, the layers"
            )
        if vision is not None and vision.hidden_size != hidden_size:
            raise ConfigError(
                f"vision: rows of embeddings of width {vision.hidden_size}: must have the model's "
                f"hidden_size={hidden_size}"
            )
        if vision is not None and vision.on_axes and not self.has_axes:
            raise ConfigError(
                "vision: the rope of layers needs sections for positions on three axes: "
                "mrope_section in the rope_parameters of a config.json"
            )
        positive(
            embedding_multiplier=embedding_multiplier,
            logits_scaling=logits_scaling,
            final_logit_softcapping=final_logit_softcapping,
        )

    def __hash__(self) -> int:
        # One layer stands for all: hashed at each call of a jitted function that takes Params.
        return hash((self.family, self.vocab_size, self.hidden_size, self.layers[0]))

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        with contextlib.suppress(ConfigError):  # layers that switches cannot describe
            switches = self.switches
            del fields["layers"], fields["norm"]
            fields |= {
                field.name: getattr(switches, field.name)
                for field in dataclasses.fields(switches)
                if getattr(switches, field.name) != field.default
            }
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return f"{type(self).__name__}({shown})"

    @property
    def switches(self) -> Alike:
        """The switches that describe the layers; ConfigError where none do."""
        return Alike.of(self.layers)

    @property
    def is_head(self) -> bool:
        """Whether it is a head, which guesses for another model."""
        return self.draft_head is not None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """H, of attention in every layer that has it."""
        return self._same(AttentionConfig | LatentConfig, "num_heads")

    @property
    def num_kv_heads(self) -> int:
        """K, of attention in every layer that has it."""
        return self._same(AttentionConfig, "num_kv_heads")

    @property
    def head_dim(self) -> int:
        """D, of attention in every layer that has it."""
        return self._same(AttentionConfig, "head_dim")

    @property
    def group_size(self) -> int:
        """G: query heads a KV head."""
        return self._same(AttentionConfig, "group_size")

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return bool(self.mixtures)

    @property
    def mixtures(self) -> tuple[ExpertsConfig, ...]:
        """The mixtures of experts of its layers, in order."""
        ffns = (ffn for layer in self.layers for ffn in layer.ffns)
        return tuple(ffn for ffn in ffns if isinstance(ffn, ExpertsConfig))

    @property
    def num_experts(self) -> int:
        """X, of experts in every layer that has them; 0 where none has."""
        return self._same(ExpertsConfig, "num_experts", 0)

    @property
    def experts_per_token(self) -> int:
        """Experts that each token takes; 0 where no layer has any."""
        return self._same(ExpertsConfig, "experts_per_token", 0)

    @property
    def expert_size(self) -> int:
        """I, of experts in every layer that has them; 0 where none has."""
        return self._same(ExpertsConfig, "expert_size", 0)

    @property
    def shared_expert_size(self) -> int:
        """R, of the expert that every token takes; 0 where there is none."""
        return self._same(ExpertsConfig, "shared_expert_size", 0)

    @property
    def intermediate_size(self) -> int:
        """F, of the MLP in every layer that has one; where none has, the width of an expert."""
        return self._same(MLPConfig, "intermediate_size", self.expert_size)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The window of each layer in tokens (a query sees itself and window - 1 before it; None is
        full attention); () is full attention everywhere.
        """
        windows = tuple(
            layer.mixer.window if isinstance(layer.mixer, AttentionConfig) else None
            for layer in self.layers
        )
        return windows if any(windows) else ()

    def _same(self, kind: Any, name: str, default: int | None = None) -> Any:
        """Return what all parts of a kind have; AttributeError where they differ."""
        parts = (part for layer in self.layers for part in (*layer.mixers, *layer.ffns))
        values = {getattr(part, name) for part in parts if isinstance(part, kind)}
        if not values and default is not None:
            return default
        if len(values) != 1:
            problem = f"is one of {sorted(values)} by layer" if values else "is in no layer"
            raise AttributeError(f"{name} {problem}: read config.layers")
        return values.pop()

    @property
    def score_scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        return self._same(AttentionConfig, "scale")

    @property
    def rms_norm_eps(self) -> float:
        """What all norms add to the mean square."""
        return self.norm.eps

    @property
    def rope(self) -> RopeConfig:
        """The rotation of layers without a window, or of all where there are none of those."""
        mixers = [m for x in self.layers for m in x.mixers if isinstance(m, AttentionConfig)]
        rotating = [mixer for mixer in mixers if mixer.rope is not None]
        ropes = {m.rope for m in rotating if m.window is None} or {m.rope for m in rotating}
        if len(ropes) != 1:
            problem = f"is one of {len(ropes)} by layer" if ropes else "is in no layer"
            raise AttributeError(f"rope {problem}: read config.layers")
        (rope,) = ropes
        assert rope is not None
        return rope

    @property
    def rope_theta(self) -> float:
        """The base of the frequencies of `rope`."""
        return self.rope.theta

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """How these frequencies are scaled."""
        return self.rope.scaling

    @property
    def has_axes(self) -> bool:
        """Whether tokens have positions on three axes, which differ in images."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return any(mixer.rope is not None and mixer.rope.sections for mixer in mixers)

    @property
    def sees_images(self) -> bool:
        """Whether a token of an image sees others of it that come later, in some layer."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return any(isinstance(mixer, AttentionConfig) and mixer.sees_images for mixer in mixers)

    @property
    def embedding_scale(self) -> float:
        """What an embedding is multiplied by."""
        return self.hidden_size**0.5 if self.scaled_embedding else self.embedding_multiplier

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the model's own axes by their letters."""
        sizes = {"V": self.vocab_size, "E": self.hidden_size, "Y": self.num_labels or 0}
        return sizes if self.draft_head is None else sizes | self.draft_head.sizes

    def params(self) -> Iterator[ParamSpec]:
        """Its parameters in the order of the forward pass, under the names that most files have."""
        if self.draft_head is not None:
            yield from self.draft_head.params(self.sizes, self.layer_params(), self.norm.init)
            return
        yield EMBED.placed(self.sizes)
        if (per_layer := self.layers[0].per_layer) is not None:
            sizes = self.sizes | per_layer.model_sizes(self.num_layers)
            yield from (spec.placed(sizes) for spec in per_layer.model_params())
        yield from self.layer_params()
        yield ParamSpec("norm.scale", "E", "model.norm.weight", self.norm.init).placed(self.sizes)
        if self.num_labels is None and not self.tie_word_embeddings:
            yield LM_HEAD.placed(self.sizes)
        if self.num_labels:
            yield SCORE_HEAD.placed(self.sizes)
        if self.pooling is not None:
            yield from self.pooling.params()
        if self.vision is not None:
            yield from self.vision.params()

    def layer_params(self) -> Iterator[ParamSpec]:
        """The parameters of its layers."""
        for i, layer in enumerate(self.layers):
            sizes = self.sizes | layer.sizes
            yield from (spec.placed(sizes, i) for spec in layer.params())

    def keeps(self) -> tuple[tuple[Record, ...], ...]:
        """Return what the cache holds for each layer."""
        records = tuple(layer.keeps() for layer in self.layers)
        if self.draft_head is None:
            return records
        ((record,),) = records
        return ((self.draft_head.keeps(record, self.hidden_size),),)

    def keeping_choices(self) -> Self:
        """Return the model, whose cache keeps which experts each token took. UnsupportedError where
        it has none, or layers take unequal numbers of them.
        """
        taken = tuple(mixture.experts_per_token for mixture in self.mixtures)
        check_combination(Facts(taken_experts=taken))
        return dataclasses.replace(self, layers=tuple(x.keeping_choices() for x in self.layers))

    @property
    def num_keeping(self) -> int:
        """How many layers there are up to the last of which the cache holds something. Those after
        it read what others keep, so that the states of a token matter to that token alone.
        """
        return 1 + max([i for i, layer in enumerate(self.layers) if layer.keeps()], default=-1)

    @property
    def has_state(self) -> bool:
        """Whether the cache holds a state a sequence for some layer."""
        return any(record.per == "block" for records in self.keeps() for record in records)

    @property
    def is_causal(self) -> bool:
        """Whether no token of a sequence changes what comes before it."""
        mixers = [mixer for layer in self.layers for mixer in layer.mixers]
        return all(not isinstance(x, AttentionConfig) or x.is_causal for x in mixers)

    def scratch(self, step: StepSizes) -> Scratch:
        """Return what a step allocates for all layers."""
        layers = [layer.scratch(step) for layer in self.layers]
        shared = max(layer.shared for layer in layers)
        scratch = Scratch(shared=shared, kept=sum(layer.kept for layer in layers))
        if self.draft_head is None:
            return scratch
        return scratch + self.draft_head.scratch(step, self.hidden_size, self.vocab_size)

    @classmethod
    def coerce(
        cls,
        config: "ModelConfig | Mapping[str, Any] | str | os.PathLike[str]",
        *,
        images: bool = False,
    ) -> Self:
        """From a ModelConfig (as it is), a Hugging Face config dict, or a folder that holds a
        config.json. images: as of from_hf.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls.from_hf(config, images=images)
        if isinstance(config, str | os.PathLike):
            read = cls.from_hf(read_json(Path(config) / "config.json"), images=images)
            return dataclasses.replace(read, pooling=read_pooling(Path(config)))
        raise ConfigError(
            f"config={config!r}: pass a ModelConfig, a Hugging Face config dict or a "
            "checkpoint folder"
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, images: bool = False) -> Self:
        """From the dict of a Hugging Face config.json; transformers fills in the family's defaults.
        images: with the tower that makes embeddings of images; otherwise of the text part alone.

        Raises ConfigError for any architecture or option outside the families, by name.
        """
        return cls(**read_hf(raw, images=images))

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that `from_hf` reads back to an equal ModelConfig.
        UnsupportedError for a head.
        """
        if self.draft_head is not None:
            raise UnsupportedError(f"the config.json of an {self.draft_head.title} is not written")
        return write_hf(self)


SWITCHES = tuple(f.name for f in dataclasses.fields(Alike) if f.name not in OPTIONS)
NEEDED = tuple(
    field.name for field in dataclasses.fields(Alike) if field.default is dataclasses.MISSING
)
