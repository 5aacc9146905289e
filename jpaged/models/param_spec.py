"""ParamSpec, a model's declaration of one parameter; and Parameter, a declaration with its array.

Linear weights keep Hugging Face's order of axes, [out, in], so that loading transposes nothing and
bf16 decode on CPU reads them along their rows.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

type MeshAxis = str | tuple[str, ...]  # one axis of a mesh, or several as if they were one
type Init = Literal["normal", "residual", "zeros", "ones", "bounds"]


class Part(NamedTuple):
    """One of the tensors that a fused tensor of ours is stored as.

    name: "q" of "layers.{i}.attention.qkv" is the part "layers.{i}.attention.q". axes: of the part
    within our tensor; the parts are concatenated along the one axis on which they differ.
    interleaved: how many rows of each head (the last of its output axes) a Hugging Face file holds
    in pairs, from row `first` on: its rows first + 2i and first + 2i + 1 are our rows first + i and
    first + interleaved/2 + i.
    """

    name: str
    axes: str
    hf_name: str
    interleaved: int = 0
    first: int = 0


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter of a model, or of a layer where its name has an {i}.

    axes: letters whose sizes are in `sizes`, or sums of letters and numbers. A linear weight has
    its outputs first and, after a comma, its inputs; a spelling without a comma is of a parameter
    that no product takes: all its axes are one in a file, or as many as bars part them into.
    source: its name in a Hugging Face file, in which all outputs are one axis and all inputs
    another, and {x} is the number of an expert; or the parts that it is stored as. init: "normal"
    has a standard deviation of 0.02, "residual" that divided by the root of the number of residual
    additions, "bounds" alternates between the least and the largest number. split: the letter of
    the axis that a tensor-parallel mesh axis splits; None: every device holds the whole.
    over_replicas: replicas split it, too. in_f32: it is kept in f32, whatever the dtype of the
    model.
    is_quantized: whether quantization= may store it in 8 or 4 bits, if it is a linear weight; None:
    if a mesh splits it, which leaves routers and gates plain. is_always_plain: no Linear multiplies
    by it, so that files which hold it in 8 or 4 bits are read as what they stand for.
    layer: the number that replaces {i}. sizes: (letter, size) pairs. `placed` sets the last two.
    """

    name: str
    axes: str
    source: str | tuple[Part, ...]
    init: Init = "normal"
    split: str | None = None
    in_f32: bool = False
    is_quantized: bool | None = None
    is_always_plain: bool = False
    over_replicas: bool = False
    layer: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def placed(self, sizes: Mapping[str, int], layer: int | None = None) -> "ParamSpec":
        """Return the parameter in a model with these sizes. layer: puts the parameter, and its
        source, into the layer of this number.
        """
        name, source = self.name, self.source
        if layer is not None:
            name = IN_LAYER + name
            if isinstance(source, str):
                source = HF_LAYER + source
            else:
                source = tuple(part._replace(hf_name=HF_LAYER + part.hf_name) for part in source)
        placed = {"layer": layer, "sizes": tuple(sizes.items())}
        return dataclasses.replace(self, name=name, source=source, **placed)

    @property
    def short_name(self) -> str:
        """Its name within a layer, or in full where it is in none."""
        return self.name.removeprefix(IN_LAYER)

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The axes of its outputs and those of its inputs."""
        outputs, _, inputs = self.axes.partition(",")
        return tokens_of(outputs), tokens_of(inputs)

    @property
    def is_multiplied(self) -> bool:
        """Whether it is a linear weight."""
        return bool(self.sides[1])

    @property
    def may_be_quantized(self) -> bool:
        """Whether it is a linear weight that may be in 8 or 4 bits."""
        wanted = self.split is not None if self.is_quantized is None else self.is_quantized
        return self.is_multiplied and wanted and not self.is_always_plain

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that it is stored as, under full names with {i}; one if it is stored whole."""
        if isinstance(self.source, str):
            return (Part(self.name, self.axes, self.source),)
        node = self.name[: self.name.rfind(".") + 1]
        return tuple(part._replace(name=node + part.name) for part in self.source)

    def stored_as(self, names: Mapping[str, str]) -> "ParamSpec":
        """Return the same parameter with a family's names of some of its parts, or stored whole
        where the family has a name for that.
        """
        if isinstance(self.source, str) or self.name in names:
            return dataclasses.replace(self, source=names.get(self.name, self.source))
        node = self.name[: self.name.rfind(".") + 1]
        parts = (
            part._replace(hf_name=names.get(node + part.name, part.hf_name)) for part in self.source
        )
        return dataclasses.replace(self, source=tuple(parts))

    def in_nodes(self, nodes: Mapping[str, str]) -> "ParamSpec":
        """Return the same parameter with a family's names of nodes in the names of its files."""

        def renamed(hf_name: str) -> str:
            return ".".join(nodes.get(node, node) for node in hf_name.split("."))

        source = self.source
        if isinstance(source, str):
            return dataclasses.replace(self, source=renamed(source))
        parts = tuple(part._replace(hf_name=renamed(part.hf_name)) for part in source)
        return dataclasses.replace(self, source=parts)

    @property
    def concat_axis(self) -> int:
        """The axis along which its parts are concatenated (0 if there is one part)."""
        ours, theirs = tokens_of(self.axes), tokens_of(self.parts[0].axes)
        return next((i for i, token in enumerate(ours) if token != theirs[i]), 0)

    @property
    def places(self) -> list[tuple[Part, tuple[slice, ...]]]:
        """Every part with the index of our tensor that it fills."""
        places, start = [], 0
        for part in self.parts:
            end = start + self.shape_of(part.axes)[self.concat_axis]
            places.append((part, (slice(None),) * self.concat_axis + (slice(start, end),)))
            start = end
        return places

    def at(self, template: str) -> str:
        """Return a name with this layer's number in place of {i}."""
        return template.replace("{i}", str(self.layer))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the canonical tensor."""
        return self.shape_of(self.axes)

    def shape_of(self, axes: str) -> tuple[int, ...]:
        """Return the sizes of axes that are spelled as in `axes`."""
        sizes = dict(self.sizes)
        return tuple(
            sum(int(term) if term.isdecimal() else sizes[term] for term in token.split("+"))
            for token in tokens_of(axes)
        )

    def row_order(self, part: Part) -> np.ndarray | None:
        """Return the number that each row of a part has in a Hugging Face file, where rows are all
        outputs in C order; None where the file has them in our order.
        """
        if not part.interleaved:
            return None
        outputs = self.shape_of(part.axes.partition(",")[0])
        head, end = np.arange(outputs[-1]), part.first + part.interleaved
        pairs = head[part.first : end].reshape(-1, 2)
        head = np.concatenate([head[: part.first], pairs[:, 0], pairs[:, 1], head[end:]])
        firsts = np.arange(0, math.prod(outputs), outputs[-1])
        return (firsts[:, None] + head).reshape(-1)

    def split_letter(self, devices: int) -> str | None:
        """Return the axis that a mesh axis of this many devices splits, None if it cannot."""
        letter = self.split
        return letter if letter and self.shape_of(letter)[0] % devices == 0 else None

    def partition(
        self, axis: MeshAxis | None, devices: int, data_axes: tuple[str, ...] = ()
    ) -> PartitionSpec:
        """Return how it is split on a mesh. data_axes: those that replicas lie along.

        If heads or vocabulary do not divide, E is split instead if it divides: weights can be kept
        in that way, though no step takes them. An FFN or expert that does not divide stays whole.
        """
        letter, tokens = self.split, tokens_of(self.axes)
        if letter is None:
            return PartitionSpec()
        if self.over_replicas:
            return PartitionSpec(*[None] * tokens.index(letter), (*data_axes, *axes_of(axis)))
        divides = self.split_letter(devices) is not None
        if not divides and letter in ("K", "V") and "E" in tokens:
            letter, divides = "E", self.shape_of("E")[0] % devices == 0
        return PartitionSpec(*[None] * tokens.index(letter), axis if divides else None)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A declaration with its array.

    value: the array, or what stands for one: a QuantizedWeight, tracer, shape or PartitionSpec.
    """

    spec: ParamSpec
    value: Any


type Parameters = Mapping[str, Parameter]  # by name within a layer: "attention.qkv"

IN_LAYER, HF_LAYER = "layers.{i}.", "model.layers.{i}."


def tokens_of(axes: str) -> list[str]:
    """Return the axes of a spelling one by one."""
    return axes.replace(",", " ").replace("|", " ").split()


def axes_of(axis: MeshAxis | None) -> tuple[str, ...]:
    """Return the names of a mesh axis, of several as one, or of none."""
    return (axis,) if isinstance(axis, str) else axis or ()


def share(size: int, devices: int) -> int:
    """Return the size of one device's share of an axis, which stays whole if it does not divide."""
    return size if size % devices else size // devices
