"""Families of Kimi Delta Attention beside latent attention: Kimi Linear and Ling 3."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.glm import EXPERTS, LAST_LAYER, SHARED_NAMES
from jpaged.models.families.hybrid import FULL, LINEAR, read_kinds
from jpaged.models.families.latent import OfLatents, TypedDenseLayers
from jpaged.models.families.switches import ExpertKeys, Switches
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.rope import RopeConfig

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinear:
    """Kimi Linear's description: layers of latent attention, which rotate nothing, and of Kimi
    Delta Attention, named in `layer_types`.

    latents: of layers of latent attention that rotate, and of all else that layers have.
    """

    latents: OfLatents

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        arguments = self.latents.read(hf | {"rope_parameters": ROPE, "rope_interleave": False})
        layers, width = arguments["layers"], hf["linear_head_dim"]
        delta = KimiDeltaConfig(**_sizes(hf), gate_rank=width, norm_eps=layers[0].norm.eps)
        latent = dataclasses.replace(layers[0].mixer, rope=None)
        return arguments | {"layers": _mixed(layers, hf, delta, latent)}

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        delta, latent = _mixers(config)
        rope = RopeConfig(dim=latent.rope_dim)
        raw = self.latents.write(_of(config, dataclasses.replace(latent, rope=rope)))
        for key in ("rope_parameters", "rope_interleave"):
            del raw[key]
        raw |= {
            "linear_num_heads": delta.num_key_heads,
            "linear_head_dim": delta.key_dim,
            "linear_conv_kernel_dim": delta.conv_width,
        }
        return raw | {"layer_types": _kinds(config)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ling:
    """Ling 3's description: layers of latent attention with a gate a head, and of Kimi Delta
    Attention, whose decays may have a bound. What experts activate may have a limit in each layer,
    which transformers does not read.

    latents: of layers of latent attention without gates, and of all else that layers have.
    """

    latents: OfLatents

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        shared, routed = hf.get("moe_shared_expert_intermediate_size"), hf["moe_intermediate_size"]
        if shared not in (None, routed):
            raise ConfigError(
                f"moe_shared_expert_intermediate_size={shared}: must be "
                f"moe_intermediate_size={routed}"
            )
        rope = dict(hf["rope_parameters"])
        fraction = rope.pop("partial_rotary_factor", None)  # of a head of the other layers
        if fraction and int(fraction * hf["linear_head_dim"]) != hf["qk_rope_head_dim"]:
            sizes = f"head_dim={hf['linear_head_dim']}, qk_rope_head_dim={hf['qk_rope_head_dim']}"
            raise ConfigError(f"partial_rotary_factor={fraction}: {sizes}")
        of_latents = {"q_lora_rank": hf.get("q_lora_rank"), "rope_interleave": True}
        arguments = self.latents.read(hf | of_latents | {"rope_parameters": rope})
        layers = arguments["layers"]
        delta = KimiDeltaConfig(
            **_sizes(hf),
            lowest_decay=hf["kda_lower_bound"] if hf["kda_safe_gate"] else None,
            norm_eps=layers[0].norm.eps,
        )
        latent = dataclasses.replace(layers[0].mixer, gate=True)
        layers = _mixed(layers, hf, delta, latent)
        limits = [_limits(hf, key) for key in LIMITS]
        layers = map(_limited, layers, *limits)
        return arguments | {"layers": tuple(layers)}

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        delta, latent = _mixers(config)
        if delta.num_key_heads != latent.num_heads:
            heads = f"{delta.num_key_heads} and {latent.num_heads}"
            raise ConfigError(f"{config.family}: {heads} heads: all layers have as many")
        alike = tuple(_limited(layer, None, None) for layer in config.layers)
        plain = _of(dataclasses.replace(config, layers=alike), latent)
        raw = self.latents.write(_of(plain, dataclasses.replace(latent, gate=False)))
        for key in ("rope_interleave", "q_lora_rank"):
            if raw[key] is None or key == "rope_interleave":
                del raw[key]
        ffns = [layer.ffn for layer in config.layers]
        for key, ours in zip(LIMITS, ("limit", "shared_limit"), strict=True):
            limits = [getattr(ffn, ours) or 0.0 if _is_sparse(ffn) else 0.0 for ffn in ffns]
            raw |= {key: limits} if any(limits) else {}
        raw |= {
            "head_dim": delta.key_dim,
            "short_conv_kernel_size": delta.conv_width,
            "kda_safe_gate": delta.lowest_decay is not None,
        }
        if delta.lowest_decay is not None:
            raw["kda_lower_bound"] = delta.lowest_decay
        return raw | {"layer_types": _kinds(config)}


def _sizes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of KimiDeltaConfig that transformers has for both families."""
    heads, width = hf["linear_num_heads"], hf["linear_head_dim"]
    sizes = {"num_key_heads": heads, "num_value_heads": heads, "key_dim": width}
    return sizes | {"value_dim": width, "conv_width": hf["linear_conv_kernel_dim"]}


def _mixed(
    layers: tuple[LayerConfig, ...],
    hf: Mapping[str, Any],
    delta: KimiDeltaConfig,
    latent: LatentConfig,
) -> tuple[LayerConfig, ...]:
    """Return the layers with the mixers that `layer_types` names."""
    mixers = {LINEAR: delta, FULL: latent}
    return tuple(
        dataclasses.replace(layer, mixer=mixers[kind])
        for layer, kind in zip(layers, read_kinds(hf), strict=True)
    )


LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _limits(hf: Mapping[str, Any], key: str) -> list[float | None]:
    """Return the limits that a config.json lists under a key, None where it has 0 or nothing. Those
    of layers that guess further tokens may follow.
    """
    count, listed = hf["num_hidden_layers"], hf.get(key)
    if listed is None:
        return [None] * count
    if len(listed) < count:
        raise ConfigError(f"{len(listed)} numbers in {key} for num_hidden_layers={count}")
    return [limit or None for limit in listed[:count]]


def _is_sparse(ffn: Any) -> bool:
    return isinstance(ffn, ExpertsConfig)


def _limited(layer: LayerConfig, limit: float | None, shared_limit: float | None) -> LayerConfig:
    """Return a layer whose experts have these limits; as it is where it has none."""
    if not isinstance(layer.ffn, ExpertsConfig):
        return layer
    ffn = dataclasses.replace(layer.ffn, limit=limit, shared_limit=shared_limit)
    return dataclasses.replace(layer, ffn=ffn)


def _mixers(config: Any) -> tuple[KimiDeltaConfig, LatentConfig]:
    """Return the two mixers of a ModelConfig; ConfigError where it has others."""
    mixers = {layer.mixer for layer in config.layers}
    delta = [mixer for mixer in mixers if isinstance(mixer, KimiDeltaConfig)]
    latent = [mixer for mixer in mixers if isinstance(mixer, LatentConfig)]
    if len(mixers) != 2 or len(delta) != len(latent):
        raise ConfigError(
            f"{config.family}: layers of one latent attention and one Kimi Delta Attention"
        )
    return delta[0], latent[0]


def _of(config: Any, latent: LatentConfig) -> Any:
    """Return a ModelConfig with latent attention in all layers."""
    layers = tuple(dataclasses.replace(layer, mixer=latent) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def _kinds(config: Any) -> list[str]:
    """Return `layer_types`."""
    return [LINEAR if isinstance(x.mixer, KimiDeltaConfig) else FULL for x in config.layers]


SIZES = EXPERTS["sizes"] | {"num_experts": "num_experts"}
MIXTURE = ExpertKeys(**(EXPERTS | {"sizes": SIZES}), dense_layers=TypedDenseLayers())
RENORMALIZED = {"moe_renormalize": ("norm_topk_prob",)}
SPARSE = "block_sparse_moe."
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    description=KimiLinear(
        latents=OfLatents(
            switches=Switches(
                keys=RENORMALIZED,
                only={
                    "mla_use_nope": True,
                    "moe_router_activation_func": "sigmoid",
                    "moe_layer_freq": 1,
                },
                experts=MIXTURE,
            )
        )
    ),
    names=in_layers(
        mlp__router=f"{SPARSE}gate.weight",
        mlp__choosing_bias=f"{SPARSE}gate.e_score_correction_bias",
        mlp__experts__gate=f"{SPARSE}experts.{{x}}.w1.weight",
        mlp__experts__up=f"{SPARSE}experts.{{x}}.w3.weight",
        mlp__experts__down=f"{SPARSE}experts.{{x}}.w2.weight",
        **{ours: SPARSE + theirs.removeprefix("mlp.") for ours, theirs in SHARED_NAMES.items()},
    ),
)
BAILING_HYBRID = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    named_also=("BailingMoeV3ForCausalLM",),
    floats=("kda_lower_bound",),
    description=Ling(
        latents=OfLatents(
            switches=Switches(
                keys=RENORMALIZED,
                only={
                    **{"scoring_func": "sigmoid", "score_function": "sigmoid"},
                    **{"topk_method": "noaux_tc", "moe_router_enable_expert_bias": True},
                    **{"no_kda_lora": True, "use_kda_lora": False, "use_mla_nope": False},
                    "gated_attention_proj_granularity_type": "head_wise",
                },
                experts=MIXTURE,
            )
        )
    ),
    names=in_layers(
        latent__out="self_attn.dense.weight",
        mlp__choosing_bias="mlp.gate.expert_bias",
        **SHARED_NAMES,
    )
    | {"embed.weight": "model.word_embeddings.weight"},
    nodes={"self_attn": "attention"},
    unread=LAST_LAYER,
)
