"""Llama 2 and 3."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import BIASES, Switches

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    description=Switches(keys=BIASES | {"mlp_bias": ("mlp_bias",)}),
)
