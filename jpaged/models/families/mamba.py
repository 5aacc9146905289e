"""Families whose layers are partly attention and partly Mamba-2: Granite 4."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, StackedExperts, in_layers
from jpaged.models.families.hybrid import FULL, LINEAR, NO_ROPE
from jpaged.models.families.switches import ExpertKeys, Switches
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.mamba import MambaConfig

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


def check_kinds(kinds: Sequence[str], num_layers: int) -> None:
    """ConfigError unless a kind is said for each layer, of which one is attention."""
    if unknown := set(kinds) - {LINEAR, FULL}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported")
    if FULL not in kinds:
        raise ConfigError(f"layer_types={kinds}: none is {FULL!r}")
    if len(kinds) != num_layers:
        raise ConfigError(f"{len(kinds)} layer_types for num_hidden_layers={num_layers}")


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
        check_kinds(kinds, hf["num_hidden_layers"])
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
        mambas = {x.mixer for x in config.layers if isinstance(x.mixer, MambaConfig)}
        if len(mambas) > 1:
            raise ConfigError(f"{config.family}: layers of Mamba-2 that differ")
        for mamba in mambas:
            raw |= write_mamba(mamba, config.hidden_size)
        raw["layer_types"] = [
            LINEAR if isinstance(layer.mixer, MambaConfig) else FULL for layer in config.layers
        ]
        return raw


def write_mamba(mamba: MambaConfig, hidden_size: int) -> Mapping[str, Any]:
    """Return what is read back by SIZES. ConfigError where no config.json says it."""
    expand, rest = divmod(mamba.num_heads * mamba.head_dim, hidden_size)
    if rest:
        width = f"{mamba.num_heads} heads of {mamba.head_dim}"
        raise ConfigError(f"{width} of Mamba-2 are no multiple of hidden_size={hidden_size}")
    return {key: getattr(mamba, ours) for ours, key in SIZES.items()} | {"mamba_expand": expand}


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
