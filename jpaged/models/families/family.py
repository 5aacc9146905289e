"""What tells one family of models from another: switches, and no code."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """What a config.json calls the sizes of a mixture of experts, by our names.

    has_dense_layers: some layers may have an MLP instead (`mlp_only_layers`,
    `decoder_sparse_step`). are_stacked: a file holds those of a layer in one tensor
    (checkpoint/stacked.py).
    """

    sizes: Mapping[str, str]
    has_dense_layers: bool = False
    are_stacked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The switches of one Hugging Face `model_type`, all of them in terms of ModelConfig's fields.

    always: fields that the family fixes, whatever its config.json says. keys: switches that it
    reads from its config.json, each with the fields that it sets; numbers: what it reads under the
    name that the field has here. A key that the family's own transformers code does not read is
    ignored here too. windows: of its layers; "by layer" is `layer_types`, "every layer" one
    `sliding_window`. rope_by_kind: layers with a window have rope parameters of their own.
    partial_rotary: part of a head may be rotated. no_rope: the key that lists a 0 for each layer
    without rope. activation: the key of the MLP's. experts: of a mixture.
    text_of: `model_type` and architecture of models of text and images whose text part, in their
    `text_config`, this is. names: where a Hugging Face file of this family holds a part, by our
    name of it, where that is not what the table says; parts of one tensor under one name follow
    each other in it.
    """

    model_type: str
    architecture: str
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    windows: Literal["none", "by layer", "every layer"] = "none"
    rope_by_kind: bool = False
    partial_rotary: bool = False
    no_rope: str | None = None
    activation: str = "hidden_act"
    experts: ExpertKeys | None = None
    text_of: tuple[str, str] | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


BIASES = {"attention_bias": ("qkv_bias", "out_bias")}
LAYER, HF_LAYER = "layers.{i}.", "model.layers.{i}."


def in_layers(**names: str) -> dict[str, str]:
    """`names` of parts in every layer, by keywords that have __ for a dot."""
    return {LAYER + ours.replace("__", "."): HF_LAYER + theirs for ours, theirs in names.items()}
