"""ParamSpec: what a model declares of one parameter; and Parameter, one with its array.

Linear weights keep Hugging Face's [out, in] order, so loading transposes nothing and bf16 decode on
CPU reads them along their rows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

type MeshAxis = str | tuple[str, ...]  # one axis of a mesh, or several as if they were one
type Init = Literal["normal", "residual", "zeros", "ones"]


class Part(NamedTuple):
    """One of the tensors that a fused tensor of ours is stored as.

    name: "q" of "layers.{i}.attention.qkv" is the part "layers.{i}.attention.q". axes: of the part
    within our tensor; the parts are concatenated along the one axis on which they differ.
    """

    name: str
    axes: str
    hf_name: str


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter of a model, or of a layer where its name has an {i}.

    axes: letters whose sizes `sizes` gives, or sums of them and numbers. A linear weight has its
    outputs first, then after a comma its inputs; what has no comma is multiplied by nothing.
    source: its name in a Hugging Face file, where outputs and inputs are one axis each, and {x} is
    the number of an expert; or the parts that it is stored as. init: "normal" has deviation 0.02,
    "residual" the same divided by the root of how many of them add up. split: the letter of the
    axis that a tensor-parallel mesh axis splits; None is whole on every device. layer: the number
    that stands for {i}. sizes: (letter, size) pairs. Both are set by `placed`.
    """

    name: str
    axes: str
    source: str | tuple[Part, ...]
    init: Init = "normal"
    split: str | None = None
    layer: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def placed(self, sizes: Mapping[str, int], layer: int | None = None) -> "ParamSpec":
        """The parameter in a model with these sizes; `layer` also puts both names into a layer."""
        name, source = self.name, self.source
        if layer is not None:
            name = f"layers.{{i}}.{name}"
            if isinstance(source, str):
                source = HF_LAYER + source
            else:
                source = tuple(part._replace(hf_name=HF_LAYER + part.hf_name) for part in source)
        placed = {"layer": layer, "sizes": tuple(sizes.items())}
        return dataclasses.replace(self, name=name, source=source, **placed)

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Its axes: outputs, inputs."""
        outputs, _, inputs = self.axes.partition(",")
        return outputs.split(), inputs.split()

    @property
    def is_multiplied(self) -> bool:
        """Whether it is a linear weight."""
        return bool(self.sides[1])

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it is stored as, in full names with {i}; one part where it is stored whole."""
        if isinstance(self.source, str):
            return (Part(self.name, self.axes, self.source),)
        node = self.name[: self.name.rfind(".") + 1]
        return tuple(part._replace(name=node + part.name) for part in self.source)

    def stored_as(self, names: Mapping[str, str]) -> "ParamSpec":
        """The same, under a family's own names of some parts."""
        if isinstance(self.source, str):
            return dataclasses.replace(self, source=names.get(self.name, self.source))
        node = self.name[: self.name.rfind(".") + 1]
        parts = (
            part._replace(hf_name=names.get(node + part.name, part.hf_name)) for part in self.source
        )
        return dataclasses.replace(self, source=tuple(parts))

    @property
    def joined(self) -> int:
        """The axis along which its parts are concatenated (0 where there is one part)."""
        ours, theirs = tokens_of(self.axes), tokens_of(self.parts[0].axes)
        return next((i for i, token in enumerate(ours) if token != theirs[i]), 0)

    @property
    def places(self) -> list[tuple[Part, tuple[slice, ...]]]:
        """Each part, and the index of our tensor that it fills."""
        places, start = [], 0
        for part in self.parts:
            end = start + self.shape_of(part.axes)[self.joined]
            places.append((part, (slice(None),) * self.joined + (slice(start, end),)))
            start = end
        return places

    def at(self, template: str) -> str:
        """A name with this layer's number in it."""
        return template.replace("{i}", str(self.layer))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the canonical tensor."""
        return self.shape_of(self.axes)

    def shape_of(self, axes: str) -> tuple[int, ...]:
        """The sizes of axes that are spelled as in `axes`."""
        sizes = dict(self.sizes)
        return tuple(
            sum(int(term) if term.isdecimal() else sizes[term] for term in token.split("+"))
            for token in tokens_of(axes)
        )

    def split_letter(self, devices: int) -> str | None:
        """The axis that a mesh axis of so many devices splits; None where it does not divide."""
        letter = self.split
        return letter if letter and self.shape_of(letter)[0] % devices == 0 else None

    def partition(self, axis: MeshAxis | None, devices: int) -> PartitionSpec:
        """How it lies on a mesh. Where heads or vocabulary do not divide it is split by E, if that
        does: to be kept, since no step takes it so. An FFN or expert that does not stays whole.
        """
        letter, tokens = self.split, tokens_of(self.axes)
        if letter is None:
            return PartitionSpec()
        divides = self.split_letter(devices) is not None
        if not divides and letter in ("K", "V") and "E" in tokens:
            letter, divides = "E", self.shape_of("E")[0] % devices == 0
        return PartitionSpec(*[None] * tokens.index(letter), axis if divides else None)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter at hand. value: its array, or what stands for one (a QuantizedWeight, a tracer, a
    shape). adapters: its tables {"a": ..., "b": ...} of AdapterRows, or None.
    """

    spec: ParamSpec
    value: Any
    adapters: Mapping[str, Any] | None = None


type Parameters = Mapping[str, Parameter]  # by name within a layer: "attention.qkv"

HF_LAYER = "model.layers.{i}."


def tokens_of(axes: str) -> list[str]:
    """The axes of a spelling, one by one."""
    return axes.replace(",", " ").split()


def share(size: int, devices: int) -> int:
    """What each of so many devices has of an axis: all of one that does not divide."""
    return size if size % devices else size // devices
