"""Family: what tells one family of models from another."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jpaged.models.vision.tower import VisionConfig


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
    tensors are [X, inputs, outputs]; otherwise [X, outputs, inputs]. node: what both tensors are
    of, in a layer; gate_up, down: their names in it.
    """

    alternate: bool
    transposed: bool
    node: str = "mlp.experts"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPFiles:
    """How a file of a family names the tensors of its MTP head (models/mtp.py).

    layer: how names of its layer's tensors begin. embed_norm, hidden_norm, fc, norm: the others;
    {L} in any stands for the number of the model's layers. shared: parts of names of tensors that
    are the model's own, written once more.
    """

    layer: str
    embed_norm: str
    hidden_norm: str
    fc: str
    norm: str
    shared: tuple[str, ...] = ()

    def ours(self, name: str, num_layers: int) -> str | None:
        """Return the name of a file's tensor in a head, whose layer is that of a model of one; None
        where it is the model's.
        """
        if any(part in name for part in self.shared):
            return None
        for kind in ("embed_norm", "hidden_norm", "fc", "norm"):
            base = self._at(getattr(self, kind), num_layers).removesuffix("weight")
            if name.startswith(base):  # the weight, or in 8 bits its scales
                ours = "model.norm." if kind == "norm" else f"{kind}."
                return ours + name.removeprefix(base)
        return name.replace(self._at(self.layer, num_layers), "model.layers.0.", 1)

    def _at(self, name: str, num_layers: int) -> str:
        return name.replace("{L}", str(num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face `model_type`.

    text_of: `model_type` and architectures of models of text and images whose text part this is: in
    their `text_config`, which says this family's model_type where parts of several families occur,
    or with its keys beside those of images. also: other model_types whose config.json says the
    same; named_also: other architectures. floats: keys whose numbers a config.json may have without
    a point, which transformers refuses. names: where a Hugging Face file of this family holds a
    part, by our name of it, where that is not what the layer says (ParamSpec.source); parts of one
    tensor under one name follow each other in it. prefix: names in its files may begin with it in
    place of model. (as they all do in ParamSpec). nodes: what its files call nodes of layers, in
    all names. stacked_experts: a file holds the experts of a layer in one tensor. unread: a regular
    expression of how names of tensors begin that no part of the model takes, as layers that guess
    further tokens; {L} stands for the number of layers. mtp: how these are read as a head of the
    model; None where they are not. vision: reads the tower from the config.json of the model of
    text and images, with defaults filled in, and the text model's hidden_size; None where none is
    read.
    """

    model_type: str
    architecture: str
    description: Description
    text_of: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    named_also: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    nodes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stacked_experts: StackedExperts | None = None
    unread: str | None = None
    mtp: MTPFiles | None = None
    vision: Callable[[dict[str, Any], int], VisionConfig] | None = None


LAYER, HF_LAYER = "layers.{i}.", "model.layers.{i}."


def in_layers(**names: str) -> dict[str, str]:
    """`names` of parts in every layer, by keywords that have __ for a dot."""
    return {LAYER + ours.replace("__", "."): HF_LAYER + theirs for ours, theirs in names.items()}
