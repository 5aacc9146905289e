"""Granite 3, dense."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import BIASES, Switches

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    description=Switches(
        keys=BIASES | {"mlp_bias": ("mlp_bias",)},
        numbers=(
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ),
    ),
)
