"""SmolLM 3."""

from jpaged.models.families.family import BIASES, Family

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=BIASES | {"mlp_bias": ("mlp_bias",)},
    windows="by layer",
    no_rope="no_rope_layers",
)
