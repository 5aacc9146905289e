"""Seed-OSS."""

from jpaged.models.families.family import Family
from jpaged.models.families.switches import Switches

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    description=Switches(
        keys={
            "attention_bias": ("qkv_bias",),
            "attention_out_bias": ("out_bias",),
            "mlp_bias": ("mlp_bias",),
        }
    ),
)
