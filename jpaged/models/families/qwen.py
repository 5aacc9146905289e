"""Qwen 2 and 3, dense."""

from jpaged.models.families.family import BIASES, Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    always={"qkv_bias": True},
    windows="by layer",
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    always={"qk_norm": True},
    keys=BIASES,
    windows="by layer",
)
