"""Families of latent attention: DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash and Mistral Small 4;
and, with an indexer, DeepSeek V3.2 and GLM-5.
"""

import dataclasses
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, StackedExperts, in_layers
from jpaged.models.families.glm import (
    EXPERTS,
    LAST_LAYER,
    LAST_LAYER_MTP,
    NORMALIZED,
    SHARED_NAMES,
)
from jpaged.models.families.mistral import WITH_IMAGES
from jpaged.models.families.switches import ExpertKeys, FirstDenseLayers, Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.indexer import IndexerConfig
from jpaged.models.layers.latent import LatentConfig

SIZES = {  # of LatentConfig, in a config.json
    "num_heads": "num_attention_heads",
    "latent_dim": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "content_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
    "query_latent_dim": "q_lora_rank",
}
INDEXER_SIZES = {"num_heads": "index_n_heads", "key_dim": "index_head_dim"}  # of IndexerConfig
DENSE, SPARSE = "dense", "sparse"  # in mlp_layer_types
FULL, SHARED = "full", "shared"  # in indexer_types


class TypedDenseLayers:
    """`mlp_layer_types` names the kind of each layer: see DenseLayers."""

    def read(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """See DenseLayers."""
        kinds = _kinds(hf, "mlp_layer_types", (DENSE, SPARSE))
        return tuple(i for i, kind in enumerate(kinds) if kind == DENSE)

    def write(self, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
        """See DenseLayers."""
        return {"mlp_layer_types": [DENSE if i in layers else SPARSE for i in range(num_layers)]}


def _kinds(hf: dict[str, Any], key: str, known: tuple[str, ...]) -> list[str]:
    """Return what a config.json says under a key, one of the known for each layer."""
    kinds = hf[key]
    if unknown := set(kinds) - set(known):
        raise ConfigError(f"{key} {sorted(unknown)} are not supported")
    if len(kinds) != hf["num_hidden_layers"]:
        raise ConfigError(f"{len(kinds)} {key} for num_hidden_layers={hf['num_hidden_layers']}")
    return kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfLatents:
    """A family whose layers have latent attention: its `Family.description`.

    switches: of all else that layers have. interleaved_index: of a family with indexers, whether
    files hold the rotated pairs of index keys side by side, as they hold those of attention there;
    None: it has no indexers. shared_index: `indexer_types` says which layers have none of their
    own.
    """

    switches: Switches
    interleaved_index: bool | None = None
    shared_index: bool = False

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
        # With an indexer there is no such switch.
        interleaved = self.interleaved_index is not None or bool(hf["rope_interleave"])
        latent = LatentConfig(
            **{ours: hf[theirs] for ours, theirs in SIZES.items()},
            rope=dataclasses.replace(arguments["layers"][0].mixer.rope, interleaved=interleaved),
            mscale=float(mscale) if rope["rope_type"] == "yarn" else 0.0,
            bias=bool(hf["attention_bias"]),
        )
        mixers = [latent] * len(arguments["layers"])
        if self.interleaved_index is not None:
            mixers = self._indexed(latent, hf, self.interleaved_index)
        arguments["layers"] = tuple(
            dataclasses.replace(layer, mixer=mixer)
            for layer, mixer in zip(arguments["layers"], mixers, strict=True)
        )
        return arguments

    def _indexed(
        self, latent: LatentConfig, hf: dict[str, Any], interleaved: bool
    ) -> list[LatentConfig]:
        """Return the mixer of each layer, with an indexer or with another's choice."""
        sizes = {ours: hf[theirs] for ours, theirs in INDEXER_SIZES.items()}
        indexer = IndexerConfig(**sizes, interleaved=interleaved)
        full = dataclasses.replace(latent, chosen=hf["index_topk"], indexer=indexer)
        shared = dataclasses.replace(full, indexer=None)
        kinds = [FULL] * hf["num_hidden_layers"]
        if self.shared_index:
            kinds = _kinds(hf, "indexer_types", (FULL, SHARED))
        return [full if kind == FULL else shared for kind in kinds]

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        of_layers = [layer.mixer for layer in config.layers]
        mixer = of_layers[0]
        if not isinstance(mixer, LatentConfig) or set(of_layers) - {mixer, self._shared(mixer)}:
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
        raw["attention_bias"] = mixer.bias
        raw |= self._write_index(mixer, of_layers)
        if mixer.mscale:
            raw["rope_parameters"]["mscale_all_dim"] = mixer.mscale
        return raw

    def _shared(self, mixer: LatentConfig) -> LatentConfig:
        """Return what other layers than the first can have in its place."""
        return dataclasses.replace(mixer, indexer=None) if self.shared_index else mixer

    def _write_index(self, mixer: LatentConfig, of_layers: list[Any]) -> dict[str, Any]:
        """Return what `_indexed` reads back, or the switch of families without indexers."""
        assert mixer.rope is not None
        if self.interleaved_index is None:
            if mixer.chosen is not None:
                raise ConfigError("an indexer is not of this family")
            return {"rope_interleave": mixer.rope.interleaved}
        indexer = mixer.indexer
        if indexer is None or not mixer.rope.interleaved:
            raise ConfigError("layers of this family have an indexer and interleaved rope")
        if indexer.interleaved != self.interleaved_index:
            needed = self.interleaved_index
            raise ConfigError(f"interleaved={indexer.interleaved} of an indexer: must be {needed}")
        raw = {theirs: getattr(indexer, ours) for ours, theirs in INDEXER_SIZES.items()}
        raw["index_topk"] = mixer.chosen
        if self.shared_index:
            raw["indexer_types"] = [FULL if x.indexer else SHARED for x in of_layers]
        return raw


ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
SIGMOID_ROUTED = Switches(
    keys=NORMALIZED,
    only=ONLY,
    experts=ExpertKeys(**EXPERTS, dense_layers=TypedDenseLayers()),
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    text_of=("kimi_k25", "Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    also=("kimi_k2",),
    description=OfLatents(
        switches=Switches(
            keys=NORMALIZED,
            only=ONLY,
            experts=ExpertKeys(**EXPERTS, dense_layers=FirstDenseLayers()),
        )
    ),
    names=in_layers(**SHARED_NAMES),
    unread=LAST_LAYER,
    mtp=LAST_LAYER_MTP,
)
DEEPSEEK_V32 = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    description=OfLatents(switches=SIGMOID_ROUTED, interleaved_index=False),
    names=in_layers(**SHARED_NAMES),
    unread=LAST_LAYER,
    mtp=LAST_LAYER_MTP,
)
GLM_MOE_DSA = Family(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    description=OfLatents(switches=SIGMOID_ROUTED, interleaved_index=True, shared_index=True),
    names=in_layers(**SHARED_NAMES),
    unread=LAST_LAYER,
    mtp=LAST_LAYER_MTP,
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
    mtp=LAST_LAYER_MTP,
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
