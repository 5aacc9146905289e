"""What tells one family of models from another: switches, and no code."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The switches of one Hugging Face `model_type`, all of them in terms of ModelConfig's fields.

    always: fields that the family fixes, whatever its config.json says. keys: what it reads from
    its config.json beside the sizes, each with the fields that it sets; a key that the family's
    own transformers code does not read is ignored here too. windows: of its layers; "by layer" is
    `layer_types`, "every layer" one `sliding_window`.
    """

    model_type: str
    architecture: str
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    windows: Literal["none", "by layer", "every layer"] = "none"
