"""Mistral, Ministral 3 and Mixtral."""

from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import ExpertKeys, Switches

WITH_IMAGES = ("mistral3", "Mistral3ForConditionalGeneration")
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    description=Switches(windows="every layer"),
    text_of=WITH_IMAGES,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    description=Switches(windows="every layer", query_scaling=True),
    text_of=WITH_IMAGES,
)

MIXTRAL_SIZES = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "intermediate_size",
}
MIXTRAL_NAMES = {
    "mlp__router": "block_sparse_moe.gate.weight",
    "mlp__experts__gate": "block_sparse_moe.experts.{x}.w1.weight",
    "mlp__experts__up": "block_sparse_moe.experts.{x}.w3.weight",
    "mlp__experts__down": "block_sparse_moe.experts.{x}.w2.weight",
}
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    description=Switches(
        always={"norm_topk_prob": True},
        windows="every layer",
        experts=ExpertKeys(sizes=MIXTRAL_SIZES),
    ),
    names=in_layers(**MIXTRAL_NAMES),
)
