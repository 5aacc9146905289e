"""Family: what tells one family of models from another."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol


class Description(Protocol):
    """How a family's config.json describes a model. `Switches` is that of layers that are alike; a
    family of other layers has functions that give `layers`.
    """

    def read(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Arguments of ModelConfig, beside those that hf_config reads of every family. hf: a
        config.json with the family's defaults filled in. ConfigError for what is not supported.
        """
        ...

    def write(self, config: Any) -> dict[str, Any]:
        """Return what `read` reads back. config: the ModelConfig; ConfigError where nothing says
        it.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """How a file holds the experts of a layer in one tensor (checkpoint/stacked.py).

    alternate: rows of gate and up alternate; otherwise all of gate come first. transposed: plain
    tensors are [X, inputs, outputs]; otherwise [X, outputs, inputs]. node: what gate_up_proj and
    down_proj are of, in a layer.
    """

    alternate: bool
    transposed: bool
    node: str = "mlp.experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face `model_type`.

    text_of: `model_type` and architecture of models of text and images whose text part this is: in
    their `text_config`, which says this family's model_type where parts of several families occur,
    or with its keys beside those of images. names: where a Hugging Face file of this family holds a
    part, by our name of it, where that is not what the layer says (ParamSpec.source); parts of one
    tensor under one name follow each other in it. stacked_experts: a file holds the experts of a
    layer in one tensor. unread: a regular expression of how names of tensors begin that no part of
    the model takes, as layers that guess further tokens; {L} stands for the number of layers.
    """

    model_type: str
    architecture: str
    description: Description
    text_of: tuple[str, str] | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stacked_experts: StackedExperts | None = None
    unread: str | None = None


LAYER, HF_LAYER = "layers.{i}.", "model.layers.{i}."


def in_layers(**names: str) -> dict[str, str]:
    """`names` of parts in every layer, by keywords that have __ for a dot."""
    return {LAYER + ours.replace("__", "."): HF_LAYER + theirs for ours, theirs in names.items()}
