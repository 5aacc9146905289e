"""Hunyuan, dense."""

from typing import Any

from jpaged.checks import positive
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import BIASES, Switches


class HunyuanSwitches(Switches):
    """An `alpha` stretches the base of the rotation (NTK-aware scaling, with a fixed factor)."""

    def switches(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Switches."""
        switches = super().switches(hf)
        rope, dim = hf["rope_parameters"], hf["head_dim"]
        if rope["rope_type"] == "dynamic" and rope.get("alpha"):
            positive(alpha=rope["alpha"])
            switches["rope_theta"] *= rope["alpha"] ** (dim / (dim - 2))
        return switches


HUNYUAN_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    description=HunyuanSwitches(
        always={"qk_norm": True},
        attention={"qk_norm_after_rope": True},
        keys=BIASES,
        only={"use_qk_norm": True, "use_cla": False},
    ),
    names=in_layers(
        attention__q_norm__scale="self_attn.query_layernorm.weight",
        attention__k_norm__scale="self_attn.key_layernorm.weight",
    ),
)
