"""SmolLM 3."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import BIASES, Switches

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    description=Switches(
        keys=BIASES | {"mlp_bias": ("mlp_bias",)}, windows="by layer", no_rope="no_rope_layers"
    ),
)
