"""GPT-OSS."""

from jpaged.models.families.family import Family, StackedExperts, in_layers
from jpaged.models.families.switches import BIASES, ExpertKeys, Switches

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    description=Switches(
        always={
            "attention_sinks": True,
            "norm_in_f32": True,
            "activation": "clamped",
            "expert_bias": True,
            "norm_topk_prob": True,
        },
        keys=BIASES,
        windows="by layer",
        experts=ExpertKeys(
            sizes={
                "num_experts": "num_local_experts",
                "experts_per_token": "num_experts_per_tok",
                "expert_size": "intermediate_size",
            },
        ),
    ),
    names=in_layers(mlp__router="mlp.router.weight"),
    stacked_experts=StackedExperts(alternate=True, transposed=True),
)
