"""Phi-3, 3.5 and 4, the text models."""

from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.switches import Switches

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    description=Switches(windows="every layer", partial_rotary=True),
    names=in_layers(
        attention__q=QKV, attention__k=QKV, attention__v=QKV, mlp__gate=GATE_UP, mlp__up=GATE_UP
    ),
)
