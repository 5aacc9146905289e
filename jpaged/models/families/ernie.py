"""ERNIE 4.5, dense and mixtures of experts."""

from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.families.family import Family, in_layers
from jpaged.models.families.glm import SHARED_NAMES
from jpaged.models.families.switches import ExpertKeys, Switches

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    description=Switches(
        rope={"interleaved": True}, keys={"use_bias": ("qkv_bias", "out_bias", "mlp_bias")}
    ),
)


class ErnieDenseLayers:
    """Every `interval`-th layer from `start` to `end` has experts."""

    def read(self, hf: dict[str, Any]) -> tuple[int, ...]:
        """See DenseLayers."""
        start, end = hf["moe_layer_start_index"], hf["moe_layer_end_index"]
        step, layers = hf["moe_layer_interval"], range(hf["num_hidden_layers"])
        return tuple(i for i in layers if (i + 1) % step or not start <= i <= end)

    def write(self, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
        """See DenseLayers."""
        with_experts = sorted(set(range(num_layers)) - set(layers)) or [num_layers]
        for step in range(1, num_layers + 1):
            raw: dict[str, Any] = {
                "moe_layer_start_index": with_experts[0],
                "moe_layer_end_index": with_experts[-1],
                "moe_layer_interval": step,
            }
            if self.read(raw | {"num_hidden_layers": num_layers}) == layers:
                return raw
        raise ConfigError(f"dense_layers={layers}: no moe_layer_interval says that")


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    description=Switches(
        always={"norm_topk_prob": True},
        rope={"interleaved": True},
        only={"use_bias": False},
        experts=ExpertKeys(
            sizes={
                "num_experts": "moe_num_experts",
                "experts_per_token": "moe_k",
                "expert_size": "moe_intermediate_size",
            },
            num_shared="moe_num_shared_experts",
            dense_layers=ErnieDenseLayers(),
            router={"has_bias": True},
            router_keys={"least_sum": "moe_norm_min"},
            experts={"shared_gate": False},
        ),
    ),
    names=in_layers(**SHARED_NAMES, mlp__choosing_bias="mlp.moe_statics.e_score_correction_bias"),
    unread=r"model\.mtp_",  # layers that guess further tokens
)
