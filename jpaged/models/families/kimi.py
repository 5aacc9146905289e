"""Families of Kimi Delta Attention beside latent attention: Kimi Linear and Ling 3."""

import dataclasses
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.glm import EXPERTS, SHARED_NAMES
from jpaged.models.families.hybrid import FULL, LINEAR, read_kinds
from jpaged.models.families.latent import OfLatents, TypedDenseLayers
from jpaged.models.families.switches import ExpertKeys, Switches
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.latent import LatentConfig
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
        kinds = read_kinds(hf)
        arguments = self.latents.read(hf | {"rope_parameters": ROPE, "rope_interleave": False})
        layers, width = arguments["layers"], hf["linear_head_dim"]
        delta = KimiDeltaConfig(
            num_key_heads=hf["linear_num_heads"],
            num_value_heads=hf["linear_num_heads"],
            key_dim=width,
            value_dim=width,
            conv_width=hf["linear_conv_kernel_dim"],
            gate_rank=width,
            norm_eps=layers[0].norm.eps,
        )
        latent = dataclasses.replace(layers[0].mixer, rope=None)
        mixers = {LINEAR: delta, FULL: latent}
        arguments["layers"] = tuple(
            dataclasses.replace(layer, mixer=mixers[kind])
            for layer, kind in zip(layers, kinds, strict=True)
        )
        return arguments

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
