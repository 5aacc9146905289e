"""EXAONE 4."""

from typing import Any

from jpaged.models.families.family import Family
from jpaged.models.families.switches import Switches


class Exaone4Switches(Switches):
    """Where some layers have a window, those without one rotate nothing."""

    def switches(self, hf: dict[str, Any]) -> dict[str, Any]:
        """See Switches."""
        wide = [i for i, kind in enumerate(hf["layer_types"]) if kind == "full_attention"]
        is_hybrid = hf["sliding_window"] is not None
        return super().switches(hf) | {"no_rope_layers": tuple(wide) if is_hybrid else ()}

    def write(self, config: Any) -> dict[str, Any]:
        """See Description."""
        raw = super().write(config)
        # A window that no layer has still says that layers rotate nothing.
        unused = config.max_position_embeddings if config.switches.no_rope_layers else None
        return {"sliding_window": unused} | raw


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    description=Exaone4Switches(
        always={"pre_norms": False, "post_norms": True, "qk_norm": True}, windows="by layer"
    ),
)
