"""Families of latent attention: DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash and Mistral Small 4."""

import dataclasses
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, StackedExperts, in_layers
from jpaged.models.families.glm import EXPERTS, NORMALIZED, SHARED_NAMES
from jpaged.models.families.mistral import WITH_IMAGES
from jpaged.models.families.switches import ExpertKeys, FirstDenseLayers, Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.latent import LatentConfig

SIZES = {  # of LatentConfig, in a config.json
    "num_heads": "num_attention_heads",
    "latent_dim": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "content_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
    "query_latent_dim": "q_lora_rank",
}
DENSE, SPARSE = "dense", "sparse"  # in mlp_layer_types


class TypedDenseLayers:
    """`mlp_layer_types` names the kind of each layer: see DenseLayers."""

    def read(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """See DenseLayers."""
        kinds = hf["mlp_layer_types"]
        if unknown := set(kinds) - {DENSE, SPARSE}:
            raise ConfigError(f"mlp_layer_types {sorted(unknown)} are not supported")
        if len(kinds) != hf["num_hidden_layers"]:
            layers = f"num_hidden_layers={hf['num_hidden_layers']}"
            raise ConfigError(f"{len(kinds)} mlp_layer_types for {layers}")
        return tuple(i for i, kind in enumerate(kinds) if kind == DENSE)

    def write(self, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
        """See DenseLayers."""
        return {"mlp_layer_types": [DENSE if i in layers else SPARSE for i in range(num_layers)]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfLatents:
    """A family whose layers have latent attention: its `Family.description`.

    switches: of all else that layers have.
    """

    switches: Switches

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Description."""
        heads, rope_dim = hf["num_attention_heads"], hf["qk_rope_head_dim"]
        if hf["num_key_value_heads"] != heads:
            raise ConfigError(
                f"num_key_value_heads={hf['num_key_value_heads']}: heads of latent attention share "
                f"one latent, so that it must be num_attention_heads={heads}"
            )
        rope = dict(hf["rope_parameters"])
        # Some config classes say which part of a head is rotated: all of qk_rope_head_dim is.
        fraction, whole = rope.pop("partial_rotary_factor", None), hf["qk_nope_head_dim"] + rope_dim
        if fraction not in (None, 1.0) and int(whole * fraction) != rope_dim:
            raise ConfigError(f"partial_rotary_factor={fraction}: qk_rope_head_dim={rope_dim}")
        mscale = rope.get("mscale_all_dim") or 0.0
        if mscale and rope["rope_type"] not in ("default", "yarn"):
            raise ConfigError(f"mscale_all_dim={mscale} with rope_type={rope['rope_type']!r}")
        arguments = self.switches.read(hf | {"head_dim": rope_dim, "rope_parameters": rope})
        interleaved = bool(hf["rope_interleave"])
        latent = LatentConfig(
            **{ours: hf[theirs] for ours, theirs in SIZES.items()},
            rope=dataclasses.replace(arguments["layers"][0].mixer.rope, interleaved=interleaved),
            mscale=float(mscale) if rope["rope_type"] == "yarn" else 0.0,
            bias=bool(hf["attention_bias"]),
        )
        layers = arguments["layers"]
        arguments["layers"] = tuple(dataclasses.replace(x, mixer=latent) for x in layers)
        return arguments

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        mixers = {layer.mixer for layer in config.layers}
        if len(mixers) > 1 or not isinstance(mixer := mixers.pop(), LatentConfig):
            raise ConfigError(f"{config.family}: layers of one latent attention")
        assert mixer.rope is not None, "the config.json of these families has a rope"
        attention = AttentionConfig(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_heads,
            head_dim=mixer.rope_dim,
            rope=mixer.rope,
            norm=config.norm,
        )
        layers = tuple(dataclasses.replace(x, mixer=attention) for x in config.layers)
        raw = self.switches.write(dataclasses.replace(config, layers=layers))
        del raw["head_dim"]
        raw |= {theirs: getattr(mixer, ours) for ours, theirs in SIZES.items()}
        raw |= {"rope_interleave": mixer.rope.interleaved, "attention_bias": mixer.bias}
        if mixer.mscale:
            raw["rope_parameters"]["mscale_all_dim"] = mixer.mscale
        return raw


LAST_LAYER = r"model\.layers\.{L}\."  # it guesses the token after next
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    text_of=("kimi_k25", "Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    also=("kimi_k2",),
    description=OfLatents(
        switches=Switches(
            keys=NORMALIZED,
            only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
            experts=ExpertKeys(**EXPERTS, dense_layers=FirstDenseLayers()),
        )
    ),
    names=in_layers(**SHARED_NAMES),
    unread=LAST_LAYER,
)
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    description=OfLatents(
        switches=Switches(
            keys=NORMALIZED, experts=ExpertKeys(**EXPERTS, dense_layers=TypedDenseLayers())
        )
    ),
    names=in_layers(**SHARED_NAMES),
    unread=LAST_LAYER,
)
SOFTMAX: dict[str, Any] = EXPERTS | {"router": {"eps": 1e-20}}
MISTRAL4 = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    text_of=WITH_IMAGES,
    description=OfLatents(
        switches=Switches(
            keys=NORMALIZED,
            query_scaling=True,
            experts=ExpertKeys(**SOFTMAX, dense_layers=FirstDenseLayers()),
        )
    ),
    names=in_layers(**SHARED_NAMES),
    stacked_experts=StackedExperts(alternate=False, transposed=False),
)
