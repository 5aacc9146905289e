"""Qwen 2 and 3, dense and mixtures of experts, and the text parts of Qwen2.5-VL and Qwen3-VL: their
rope turns by three axes, on all of which a token of text has one position.
"""

from jpaged.models.families.family import Family, StackedExperts
from jpaged.models.families.switches import BIASES, ExpertKeys, ListedDenseLayers, Switches
from jpaged.models.vision.qwen import Qwen3VisionConfig, Qwen25VisionConfig

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
            dense_layers=ListedDenseLayers(),
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
        experts=ExpertKeys(sizes=SIZES, dense_layers=ListedDenseLayers()),
    ),
)

AXES = (24, 20, 20)
QWEN2_5_VL_TEXT = Family(
    model_type="qwen2_5_vl_text",
    architecture="Qwen2_5_VLTextModel",
    description=Switches(always={"qkv_bias": True}, windows="by layer", axes=(16, 24, 24)),
    text_of=("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    vision=Qwen25VisionConfig.read,
)
QWEN3_VL_TEXT = Family(
    model_type="qwen3_vl_text",
    architecture="Qwen3VLTextModel",
    description=Switches(always={"qk_norm": True}, keys=BIASES, axes=AXES, alternating=True),
    text_of=("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    vision=Qwen3VisionConfig.read,
)
QWEN3_VL_MOE_TEXT = Family(
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeTextModel",
    description=Switches(
        always={"qk_norm": True, "norm_topk_prob": True},
        keys=BIASES,
        axes=AXES,
        alternating=True,
        experts=ExpertKeys(sizes=SIZES, dense_layers=ListedDenseLayers()),
    ),
    text_of=("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    vision=Qwen3VisionConfig.read,
    stacked_experts=StackedExperts(alternate=False, transposed=True),
)
