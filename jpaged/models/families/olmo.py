"""OLMo 2 and 3."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import BIASES, Switches

ALWAYS = {
    "pre_norms": False,
    "post_norms": True,
    "norm_in_f32": True,
    "qk_norm_whole": True,
}
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    description=Switches(always=ALWAYS, keys=BIASES),
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    description=Switches(always=ALWAYS, keys=BIASES, windows="by layer", rope_by_kind=True),
)
