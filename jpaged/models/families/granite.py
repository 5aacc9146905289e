"""Granite 3, dense."""

from jpaged.models.families.family import BIASES, Family

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys=BIASES | {"mlp_bias": ("mlp_bias",)},
    numbers=(
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
)
