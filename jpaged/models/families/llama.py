"""Llama 2 and 3."""

from jpaged.models.families.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={"attention_bias": ("qkv_bias", "out_bias")},
)
