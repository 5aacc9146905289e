"""Mistral, dense."""

from jpaged.models.families.family import Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    windows="every layer",
)
