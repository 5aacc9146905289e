"""GPT-OSS."""

from jpaged.models.families.family import BIASES, ExpertKeys, Family, in_layers

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
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
        are_stacked=True,
    ),
    names=in_layers(mlp__router="mlp.router.weight"),
)
