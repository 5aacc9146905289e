"""Gemma 2 and 3, the text models."""

from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import BIASES, Switches
from jpaged.models.vision.siglip import SiglipVisionConfig

ALWAYS = {
    "post_norms": True,
    "norm_offset": True,
    "norm_in_f32": True,
    "scaled_embedding": True,
}
NUMBERS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
NAMES = in_layers(post_norm__scale="pre_feedforward_layernorm.weight")

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    description=Switches(
        always=ALWAYS,
        keys=BIASES,
        numbers=NUMBERS,
        windows="by layer",
        activation="hidden_activation",
    ),
    names=NAMES,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    description=Switches(
        always=ALWAYS | {"qk_norm": True},
        keys=BIASES,
        numbers=("query_pre_attn_scalar", "final_logit_softcapping"),  # it caps no scores
        windows="by layer",
        rope_by_kind=True,
        activation="hidden_activation",
        attention={"sees_images": True},
    ),
    text_of=("gemma3", "Gemma3ForConditionalGeneration"),
    vision=SiglipVisionConfig.read,
    names=NAMES,
)
