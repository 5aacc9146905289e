"""InternLM 3."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import BIASES, Switches

INTERNLM3 = Family(
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    description=Switches(keys=BIASES | {"mlp_bias": ("mlp_bias",)}),
)
