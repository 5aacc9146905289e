"""GLM-4-0414, GLM-4.5 to 4.7, and Solar Open."""

from jpaged.models.families.family import Family, MTPFiles, in_layers
from jpaged.models.families.switches import ExpertKeys, FirstDenseLayers, Switches

QKV_BIAS = {"attention_bias": ("qkv_bias",)}
GATE_UP = "mlp.gate_up_proj.weight"
SHARED_NAMES = {
    "mlp__shared__gate": "mlp.shared_experts.gate_proj.weight",
    "mlp__shared__up": "mlp.shared_experts.up_proj.weight",
    "mlp__shared__down": "mlp.shared_experts.down_proj.weight",
}
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    description=Switches(
        always={"post_norms": True},
        rope={"interleaved": True},
        keys=QKV_BIAS,
        partial_rotary=True,
    ),
    names=in_layers(
        attention_post_norm__scale="post_self_attn_layernorm.weight",
        mlp_post_norm__scale="post_mlp_layernorm.weight",
        mlp__gate=GATE_UP,
        mlp__up=GATE_UP,
    ),
)

EXPERTS = {
    "sizes": {
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
    },
    "num_shared": "n_shared_experts",
    "router": {"score": "sigmoid", "has_bias": True, "eps": 1e-20},
    "router_keys": {
        "num_groups": "n_group",
        "chosen_groups": "topk_group",
        "scale": "routed_scaling_factor",
    },
    "experts": {"shared_gate": False},
}
NORMALIZED = {"norm_topk_prob": ("norm_topk_prob",)}
# The layer past the last guesses the token after next: in files of GLM and of DeepSeek.
LAST_LAYER = r"model\.layers\.{L}\."
LAST_LAYER_MTP = MTPFiles(
    layer="model.layers.{L}.",
    embed_norm="model.layers.{L}.enorm.weight",
    hidden_norm="model.layers.{L}.hnorm.weight",
    fc="model.layers.{L}.eh_proj.weight",
    norm="model.layers.{L}.shared_head.norm.weight",
    shared=(".embed_tokens.", ".shared_head.head."),
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    description=Switches(
        keys=QKV_BIAS | NORMALIZED | {"use_qk_norm": ("qk_norm",)},
        partial_rotary=True,
        experts=ExpertKeys(**EXPERTS, dense_layers=FirstDenseLayers()),
    ),
    names=in_layers(**SHARED_NAMES),
    unread=LAST_LAYER,
    mtp=LAST_LAYER_MTP,
)
SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    description=Switches(keys=QKV_BIAS | NORMALIZED, experts=ExpertKeys(**EXPERTS)),
    names=in_layers(**SHARED_NAMES),
)
