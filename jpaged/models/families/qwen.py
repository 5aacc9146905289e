"""Qwen 2 and 3, dense and mixtures of experts."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import BIASES, ExpertKeys, Switches

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    description=Switches(always={"qkv_bias": True}, windows="by layer"),
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    description=Switches(always={"qk_norm": True}, keys=BIASES, windows="by layer"),
)

SIZES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
}
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    description=Switches(
        keys={"qkv_bias": ("qkv_bias",), "norm_topk_prob": ("norm_topk_prob",)},
        windows="by layer",
        experts=ExpertKeys(
            sizes=SIZES | {"shared_expert_size": "shared_expert_intermediate_size"},
            has_dense_layers=True,
        ),
    ),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    description=Switches(
        always={"qk_norm": True},
        keys=BIASES | {"norm_topk_prob": ("norm_topk_prob",)},
        windows="every layer",
        experts=ExpertKeys(sizes=SIZES, has_dense_layers=True),
    ),
)
