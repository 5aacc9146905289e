"""Families whose layers have Mamba-2 beside attention: Granite 4, Nemotron-H and Nemotron 3, and
Falcon-H1.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import (
    HF_LAYER,
    LAYER,
    Family,
    StackedExperts,
    in_layers,
)
from jpaged.models.families.hybrid import FULL, LINEAR, NO_ROPE
from jpaged.models.families.switches import ExpertKeys, Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.norm import NormConfig
from jpaged.models.layers.parallel_mixer import ParallelMixerConfig
from jpaged.models.layers.router import RouterConfig

SIZES = {  # of MambaConfig, in most config.json
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state_dim": "mamba_d_state",
    "num_groups": "mamba_n_groups",
    "conv_width": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
UNLIMITED = (0.0, float("inf"))


def check_time_steps(limit: Sequence[float] | None) -> None:
    """ConfigError for time steps that are clamped: neither chunks nor steps do that."""
    if limit is not None and tuple(limit) != UNLIMITED:
        raise ConfigError(f"time_step_limit={limit} is not supported ({UNLIMITED} is)")


def check_kinds(kinds: Sequence[str]) -> None:
    """ConfigError unless these are kinds of layers, of which one is attention."""
    if unknown := set(kinds) - {LINEAR, FULL}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    if FULL not in kinds:
        raise ConfigError(f"layer_types={kinds}: none is {FULL!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Granite4:
    """Layers of attention or of Mamba-2, named in `layer_types`, whose feed-forward part is an MLP,
    or that MLP as the shared expert of a mixture: a `Family.description`.

    switches: of the layers of attention, and of all else that layers have.
    """

    switches: Switches

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        kinds = hf["layer_types"]
        check_kinds(kinds)
        check_time_steps(hf["time_step_limit"])
        has_rope = hf["position_embedding_type"] == "rope"
        sizes = {
            "intermediate_size": hf["shared_intermediate_size"],
            "expert_size": hf["intermediate_size"],
            "rope_parameters": hf["rope_parameters"] if has_rope else NO_ROPE,
        }
        arguments = self.switches.read(hf | sizes)
        layers = arguments["layers"]
        eps = layers[0].norm.eps
        mamba = MambaConfig(**{ours: hf[key] for ours, key in SIZES.items()}, norm_eps=eps)
        attention = layers[0].mixer
        if not has_rope:
            attention = dataclasses.replace(attention, rope=None)
        of_kind = {LINEAR: mamba, FULL: attention}
        arguments["layers"] = tuple(
            dataclasses.replace(layer, mixer=of_kind[kind])
            for layer, kind in zip(layers, kinds, strict=True)
        )
        return arguments

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        full = next((x.mixer for x in config.layers if isinstance(x.mixer, AttentionConfig)), None)
        if full is None:
            raise ConfigError(f"{config.family}: no layer of attention")
        alike = tuple(dataclasses.replace(layer, mixer=full) for layer in config.layers)
        raw = self.switches.write(dataclasses.replace(config, layers=alike))
        mlp, expert = raw["intermediate_size"], raw.pop("expert_size")
        shared = config.layers[0].ffn.shared_expert_size if raw["num_local_experts"] else mlp
        raw |= {"shared_intermediate_size": shared, "intermediate_size": expert or mlp}
        raw["position_embedding_type"] = "nope" if full.rope is None else "rope"
        mamba = the_only(MambaConfig, (x.mixer for x in config.layers), config.family)
        # Of a model without it, transformers wants sizes that fit nonetheless.
        raw |= {"mamba_n_heads": 1} if mamba is None else _write(mamba, config.hidden_size)
        raw["layer_types"] = [
            LINEAR if isinstance(layer.mixer, MambaConfig) else FULL for layer in config.layers
        ]
        return raw


def _write(mamba: MambaConfig, hidden_size: int) -> dict[str, Any]:
    """Return what SIZES reads back. ConfigError where no config.json of Granite says it."""
    expand, rest = divmod(mamba.num_heads * mamba.head_dim, hidden_size)
    if rest:
        width = f"{mamba.num_heads} heads of {mamba.head_dim}"
        raise ConfigError(f"{width} of Mamba-2 are no multiple of hidden_size={hidden_size}")
    return {key: getattr(mamba, ours) for ours, key in SIZES.items()} | {"mamba_expand": expand}


def the_only[Part](kind: type[Part], parts: Iterable[object], family: str) -> Part | None:
    """Return the one part of a kind that layers have, or None; ConfigError where they differ."""
    distinct = {part for part in parts if isinstance(part, kind)}
    if len(distinct) > 1:
        raise ConfigError(f"{family}: layers whose {kind.__name__} differs: no config.json says so")
    return next(iter(distinct), None)


MULTIPLIERS = (
    *("embedding_multiplier", "attention_multiplier"),
    *("residual_multiplier", "logits_scaling"),
)
SHARED_IN, SHARED_OUT = "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"
GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    description=Granite4(
        switches=Switches(
            always={"norm_topk_prob": True},
            keys={"attention_bias": ("qkv_bias", "out_bias")},
            numbers=MULTIPLIERS,
            experts=ExpertKeys(
                sizes={
                    "num_experts": "num_local_experts",
                    "experts_per_token": "num_experts_per_tok",
                    "expert_size": "expert_size",
                    "shared_expert_size": "shared_intermediate_size",
                },
                experts={"shared_gate": False},
            ),
        )
    ),
    stacked_experts=StackedExperts(
        alternate=False,
        transposed=False,
        node="block_sparse_moe",
        gate_up="input_linear.weight",
        down="output_linear.weight",
    ),
    names=in_layers(
        mlp__gate=SHARED_IN,
        mlp__up=SHARED_IN,
        mlp__down=SHARED_OUT,
        mlp__router="block_sparse_moe.router.layer.weight",
        mlp__shared__gate=SHARED_IN,
        mlp__shared__up=SHARED_IN,
        mlp__shared__down=SHARED_OUT,
    ),
)


NEMOTRON_SIZES = {  # of MambaConfig, in a config.json
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_dim": "ssm_state_size",
    "num_groups": "n_groups",
    "conv_width": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}
ATTENTION_SIZES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
EXPERT_SIZES = {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "moe_shared_expert_intermediate_size",
}
ROUTER = {
    "num_groups": "n_group",
    "chosen_groups": "topk_group",
    "normalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
MLP, MOE = "mlp", "moe"
ONLY = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False}


class NemotronH:
    """Layers that are one part each, named in `layers_block_type` (older files have a pattern of
    letters): Mamba-2, attention that rotates nothing, an MLP or experts: a `Family.description`.
    """

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        for key, value in ONLY.items():
            if hf[key] != value:
                raise ConfigError(f"{key}={hf[key]!r} is not supported ({value!r} is)")
        kinds = hf["layers_block_type"]
        if unknown := set(kinds) - {LINEAR, FULL, MLP, MOE}:
            raise ConfigError(f"layers_block_type {sorted(unknown)} are not supported")
        if FULL not in kinds:
            raise ConfigError(f"layers_block_type={kinds}: none is {FULL!r}")
        check_time_steps(hf["time_step_limit"])
        norm = NormConfig(eps=hf["layer_norm_epsilon"], in_f32=True)
        attention = {ours: hf[key] for ours, key in ATTENTION_SIZES.items()}
        mamba = {ours: hf[key] for ours, key in NEMOTRON_SIZES.items()}
        parts: dict[str, dict[str, Any]] = {
            LINEAR: {"mixer": MambaConfig(**mamba, norm_eps=norm.eps)},
            FULL: {"mixer": AttentionConfig(**attention, norm=norm)},
            MLP: {"ffn": MLPConfig(intermediate_size=hf["intermediate_size"], activation="relu2")},
            MOE: {"ffn": self._experts(hf) if MOE in kinds else None},
        }
        nothing: dict[str, Any] = {"mixer": None, "ffn": None, "norm": norm}
        return {"layers": tuple(LayerConfig(**(nothing | parts[kind])) for kind in kinds)}

    def _experts(self, hf: Mapping[str, Any]) -> ExpertsConfig:
        router = {ours: hf[key] for ours, key in ROUTER.items()}
        return ExpertsConfig(
            **{ours: hf[key] for ours, key in EXPERT_SIZES.items()},
            shared_gate=False,
            router=RouterConfig(score="sigmoid", has_bias=True, eps=1e-20, **router),
            activation="relu2",
            latent_size=hf["moe_latent_size"] or 0,
        )

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        parts = [(layer.mixer, layer.ffn) for layer in config.layers]
        if any((mixer is None) == (ffn is None) for mixer, ffn in parts):
            raise ConfigError(f"{config.family}: layers of a mixer or of a feed-forward part alone")
        every = [mixer or ffn for mixer, ffn in parts]
        names = {MambaConfig: LINEAR, AttentionConfig: FULL, MLPConfig: MLP, ExpertsConfig: MOE}
        if other := {type(part) for part in every} - names.keys():
            raise ConfigError(f"{config.family}: layers of {sorted(x.__name__ for x in other)}")
        raw: dict[str, Any] = {"layers_block_type": [names[type(part)] for part in every]}
        raw |= ONLY | {"layer_norm_epsilon": config.norm.eps}
        tables: dict[type, Mapping[str, str]] = {
            MambaConfig: NEMOTRON_SIZES,
            AttentionConfig: ATTENTION_SIZES,
            MLPConfig: {"intermediate_size": "intermediate_size"},
            ExpertsConfig: EXPERT_SIZES,
        }
        for kind, table in tables.items():
            part: Any = the_only(kind, every, config.family)
            if part is not None:
                raw |= {key: getattr(part, ours) for ours, key in table.items()}
            if isinstance(part, ExpertsConfig):
                raw |= {key: getattr(part.router, ours) for ours, key in ROUTER.items()}
                raw["moe_latent_size"] = part.latent_size or None
        return raw


def mamba_names(node: str) -> dict[str, str]:
    """Return `Family.names` of all parts of Mamba-2, where files have it under this node."""
    every = MambaConfig(num_heads=1, head_dim=1, state_dim=1, bias=True)
    parts = [part for spec in every.params() for part in spec.parts]
    return {
        LAYER + part.name: HF_LAYER + part.hf_name.replace("mamba.", f"{node}.", 1)
        for part in parts
    }


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    description=NemotronH(),
    prefix="backbone.",
    unread=r"mtp\.",  # layers that guess further tokens
    names={
        "embed.weight": "model.embeddings.weight",
        "norm.scale": "model.norm_f.weight",
        **mamba_names("mixer"),
        **in_layers(
            input_norm__scale="norm.weight",
            post_norm__scale="norm.weight",
            **{f"attention__{x}": f"mixer.{x}_proj.weight" for x in "qkv"},
            attention__out="mixer.o_proj.weight",
            mlp__up="mixer.up_proj.weight",
            mlp__down="mixer.down_proj.weight",
            mlp__router="mixer.gate.weight",
            mlp__choosing_bias="mixer.gate.e_score_correction_bias",
            mlp__latent_in="mixer.fc1_latent_proj.weight",
            mlp__latent_out="mixer.fc2_latent_proj.weight",
            mlp__experts__up="mixer.experts.{x}.up_proj.weight",
            mlp__experts__down="mixer.experts.{x}.down_proj.weight",
            mlp__shared__up="mixer.shared_experts.up_proj.weight",
            mlp__shared__down="mixer.shared_experts.down_proj.weight",
        ),
    },
)


FALCON_MULTIPLIERS = {  # of ParallelMixerConfig, in a config.json
    "attention_in_multiplier": "attention_in_multiplier",
    "attention_out_multiplier": "attention_out_multiplier",
    "mamba_in_multiplier": "ssm_in_multiplier",
    "mamba_out_multiplier": "ssm_out_multiplier",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconH1:
    """Layers of attention and Mamba-2 side by side, with multipliers: a `Family.description`.

    switches: of attention and the MLP.
    """

    switches: Switches

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        check_time_steps(hf["time_step_limit"])
        if hf["projectors_bias"] != hf["mamba_proj_bias"]:
            bias = f"mamba_proj_bias={hf['mamba_proj_bias']}"
            raise ConfigError(f"projectors_bias={hf['projectors_bias']}: must be {bias}")
        arguments = self.switches.read(hf)
        (layer, *_) = arguments["layers"]
        if len(hf["ssm_multipliers"]) != 5:
            raise ConfigError(f"ssm_multipliers={hf['ssm_multipliers']}: must be five numbers")
        norm = "before" if hf["mamba_norm_before_gate"] else "after"
        mamba = MambaConfig(
            **{ours: hf[key] for ours, key in SIZES.items()},
            norm=norm if hf["mamba_rms_norm"] else None,
            norm_eps=layer.norm.eps,
            multipliers=tuple(hf["ssm_multipliers"]),
        )
        # Keys that are multiplied before they are rotated multiply all scores.
        scale = layer.mixer.scale * hf["key_multiplier"]
        mixer = ParallelMixerConfig(
            attention=dataclasses.replace(layer.mixer, multiplier=scale),
            mamba=mamba,
            **{ours: hf[key] for ours, key in FALCON_MULTIPLIERS.items()},
        )
        gate, down = hf["mlp_multipliers"]
        ffn = dataclasses.replace(layer.ffn, gate_multiplier=gate, multiplier=down)
        layer = dataclasses.replace(layer, mixer=mixer, ffn=ffn)
        arguments["layers"] = (layer,) * hf["num_hidden_layers"]
        return arguments | {"logits_scaling": 1 / hf["lm_head_multiplier"]}

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        layer = the_only(LayerConfig, config.layers, config.family)
        if layer is None or not isinstance(layer.mixer, ParallelMixerConfig):
            raise ConfigError(f"{config.family}: layers of attention and Mamba-2 side by side")
        mixer, mamba, ffn = layer.mixer, layer.mixer.mamba, layer.ffn
        if not isinstance(ffn, MLPConfig):
            raise ConfigError(f"{config.family}: layers with an MLP")
        attention = dataclasses.replace(mixer.attention, multiplier=None)
        plain = dataclasses.replace(ffn, gate_multiplier=1.0, multiplier=1.0)
        alike = dataclasses.replace(layer, mixer=attention, ffn=plain)
        layers = (alike,) * config.num_layers
        raw = self.switches.write(dataclasses.replace(config, layers=layers))
        raw |= {key: getattr(mamba, ours) for ours, key in SIZES.items()}
        raw |= {key: getattr(mixer, ours) for ours, key in FALCON_MULTIPLIERS.items()}
        return raw | {
            "projectors_bias": mamba.bias,
            "mamba_d_ssm": mamba.num_heads * mamba.head_dim,
            "mamba_rms_norm": mamba.norm is not None,
            "mamba_norm_before_gate": mamba.norm == "before",
            "ssm_multipliers": list(mamba.multipliers),
            "key_multiplier": _inverse(
                lambda x: attention.scale * x,
                mixer.attention.scale,
                mixer.attention.scale / attention.scale,
            ),
            "mlp_multipliers": [ffn.gate_multiplier, ffn.multiplier],
            "lm_head_multiplier": _inverse(
                lambda x: 1 / x, config.logits_scaling, 1 / config.logits_scaling
            ),
        }


def _inverse(of: Callable[[float], float], value: float, guess: float) -> float:
    """Return the number at a guess or beside it of which a function is this value, to the bit.
    ConfigError where there is none, since factors round.
    """
    for number in (guess, math.nextafter(guess, math.inf), math.nextafter(guess, 0.0)):
        if of(number) == value:
            return number
    raise ConfigError(f"a multiplier of about {guess}: no number says {value} exactly")


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    description=FalconH1(
        switches=Switches(
            keys={"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)},
            numbers=("embedding_multiplier",),
        )
    ),
    names={
        "norm.scale": "model.final_layernorm.weight",
        **in_layers(
            post_norm__scale="pre_ff_layernorm.weight",
            **{f"mlp__{x}": f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")},
            **{f"mlp__{x}_bias": f"feed_forward.{x}_proj.bias" for x in ("gate", "up", "down")},
        ),
    },
)
