"""Llama 2 and 3."""

from jpaged.models.families.family import BIASES, Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=BIASES | {"mlp_bias": ("mlp_bias",)},
)
