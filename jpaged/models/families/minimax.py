"""MiniMax-M2."""

from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.mistral import MIXTRAL_NAMES, MIXTRAL_SIZES
from jpaged.models.families.switches import ExpertKeys, Switches

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    description=Switches(
        always={"qk_norm_whole": True, "norm_topk_prob": True},
        only={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
        },
        partial_rotary=True,
        experts=ExpertKeys(sizes=MIXTRAL_SIZES, router={"score": "sigmoid", "has_bias": True}),
    ),
    names=in_layers(**MIXTRAL_NAMES, mlp__choosing_bias="block_sparse_moe.e_score_correction_bias"),
)
