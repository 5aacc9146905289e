"""The parameters of a model: the table that declares them, its views, and the tree that holds them.

A parameter is one entry of TABLE. Shapes, mesh specs, file names, other projects' trees, initial
weights and the memory bound are all read from there.

Linear weights keep Hugging Face's [out, in] order, so loading transposes nothing and bf16 decode on
CPU reads them along their rows. Query, key and value of one KV head lie together ([K, G+2, D, E]):
a split over KV heads is contiguous, and the fused projection already yields the pool's K, V pairs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.families import FAMILIES

if TYPE_CHECKING:
    from flax import nnx

TENSOR_AXES = ("tp", "tensor", "model")  # names that a mesh's tensor-parallel axis usually has
DONATED = "were the params donated to a training step?"
# The letter of the axis that a mesh splits.
SPLIT = {"kv_heads": "K", "ffn": "F", "expert": "I", "shared_expert": "R", "vocab": "V"}

type MeshAxis = str | tuple[str, ...]  # one axis of a mesh, or several as if they were one


class Part(NamedTuple):
    """One of the tensors that a fused one of ours is stored as.

    name: "q" of "layers.{i}.attention.qkv" is the part "layers.{i}.attention.q". axes: as they lie
    in our tensor, in which the parts follow each other on the axis that differs.
    """

    name: str
    axes: str
    hf_name: str


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter of every model, or of every layer where its name has an {i}.

    axes: letters whose sizes `axis_sizes` gives, or sums of them and numbers. Of a linear weight
    the outputs come first, then after a comma the inputs. source: its name in a Hugging Face file,
    where outputs and inputs are one axis each, and {x} is the number of an expert; or the parts
    that it is stored as. init: "normal" is of deviation 0.02, "residual" the same divided by the
    root of how many of them add up. when: the switch of ModelConfig, of a model or of a layer, that
    is on where it exists; None is every model. sharding: what a tensor-parallel mesh axis splits of
    it; None is whole on every device. layer: set by `param_table` alone.
    """

    name: str
    axes: str
    source: str | tuple[Part, ...]
    init: Literal["normal", "residual", "zeros", "ones"] = "normal"
    when: str | None = None
    sharding: Literal["kv_heads", "ffn", "expert", "shared_expert", "vocab"] | None = None
    layer: int | None = None

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Its axes: outputs, inputs."""
        outputs, _, inputs = self.axes.partition(",")
        return outputs.split(), inputs.split()

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it is stored as, in full names with {i}; one part where it is stored whole."""
        if isinstance(self.source, str):
            return (Part(self.name, self.axes, self.source),)
        node = self.name[: self.name.rfind(".") + 1]
        return tuple(part._replace(name=node + part.name) for part in self.source)

    def is_in(self, config: ModelConfig, layer: int | None) -> bool:
        """Whether a model has it, in a layer."""
        if self.when is None:
            return True
        switch = getattr(config, self.when)
        return bool(switch(layer) if callable(switch) else switch)

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
        """The axis that its parts follow each other on (0 where there is one part)."""
        ours, theirs = _tokens(self.axes), _tokens(self.parts[0].axes)
        return next((i for i, token in enumerate(ours) if token != theirs[i]), 0)

    def places(self, config: ModelConfig) -> list[tuple[Part, tuple[slice, ...]]]:
        """Each part, and the index of our tensor that it fills."""
        places, start = [], 0
        for part in self.parts:
            end = start + axes_shape(part.axes, config)[self.joined]
            places.append((part, (slice(None),) * self.joined + (slice(start, end),)))
            start = end
        return places

    def at(self, template: str) -> str:
        """A name with this layer's number in it."""
        return template.replace("{i}", str(self.layer))

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Of the canonical tensor."""
        return axes_shape(self.axes, config)

    def split_letter(self, config: ModelConfig, devices: int) -> str | None:
        """The axis that a mesh axis of so many devices splits; None where it does not divide."""
        letter = SPLIT.get(self.sharding or "")
        return letter if letter and axis_sizes(config)[letter] % devices == 0 else None

    def partition(self, config: ModelConfig, axis: MeshAxis | None, devices: int) -> PartitionSpec:
        """How it lies on a mesh. Where heads or vocabulary do not divide it is split by E, if that
        does: to be kept, since no step takes it so. An FFN or expert that does not stays whole.
        """
        if self.sharding is None:
            return PartitionSpec()
        tokens, letter = _tokens(self.axes), SPLIT[self.sharding]
        divides = self.split_letter(config, devices) is not None
        if not divides and letter in ("K", "V") and "E" in tokens:
            letter, divides = "E", config.hidden_size % devices == 0
        return PartitionSpec(*[None] * tokens.index(letter), axis if divides else None)


def _in_each_layer(*specs: ParamSpec) -> Iterator[ParamSpec]:
    """Specs whose names, ours and Hugging Face's, are those within a layer."""
    ours, theirs = "layers.{i}.", "model.layers.{i}."
    for spec in specs:
        source = spec.source
        if isinstance(source, str):
            source = theirs + source
        else:
            source = tuple(part._replace(hf_name=theirs + part.hf_name) for part in source)
        yield dataclasses.replace(spec, name=ours + spec.name, source=source)


QKV = (
    Part("q", "K G D, E", "self_attn.q_proj.weight"),
    Part("k", "K 1 D, E", "self_attn.k_proj.weight"),
    Part("v", "K 1 D, E", "self_attn.v_proj.weight"),
)
HEAD_QKV = tuple(part._replace(axes=part.axes.replace("E", "E+E")) for part in QKV)
QKV_BIAS = (
    Part("q_bias", "K G D", "self_attn.q_proj.bias"),
    Part("k_bias", "K 1 D", "self_attn.k_proj.bias"),
    Part("v_bias", "K 1 D", "self_attn.v_proj.bias"),
)
GATE_UP = (
    Part("gate", "1 F, E", "mlp.gate_proj.weight"),
    Part("up", "1 F, E", "mlp.up_proj.weight"),
)
EXPERT_BIASES = (
    Part("gate_bias", "X 1 I", "mlp.experts.gate_proj_bias"),
    Part("up_bias", "X 1 I", "mlp.experts.up_proj_bias"),
)
EXPERTS = (
    Part("gate", "X 1 I, E", "mlp.experts.{x}.gate_proj.weight"),
    Part("up", "X 1 I, E", "mlp.experts.{x}.up_proj.weight"),
)
SHARED = (
    Part("gate", "1 R, E", "mlp.shared_expert.gate_proj.weight"),
    Part("up", "1 R, E", "mlp.shared_expert.up_proj.weight"),
)
GATE_UP_BIAS = (
    Part("gate_bias", "1 F", "mlp.gate_proj.bias"),
    Part("up_bias", "1 F", "mlp.up_proj.bias"),
)


TABLE = (
    ParamSpec("fc.weight", "E, A", "fc.weight", "normal", "is_head"),
    ParamSpec("embed.weight", "V, E", "model.embed_tokens.weight", "normal", "has_embed", "vocab"),
    *_in_each_layer(
        ParamSpec("input_norm.scale", "E", "input_layernorm.weight", "ones", "pre_norms"),
        ParamSpec("hidden_norm.scale", "E", "hidden_norm.weight", "ones", "is_head"),
        ParamSpec("attention.qkv", "K G+2 D, E+E", HEAD_QKV, "normal", "is_head", "kv_heads"),
        ParamSpec("attention.qkv", "K G+2 D, E", QKV, "normal", "is_model", "kv_heads"),
        ParamSpec("attention.qkv_bias", "K G+2 D", QKV_BIAS, "zeros", "qkv_bias", "kv_heads"),
        ParamSpec(
            "attention.q_norm.scale",
            "K G D",
            "self_attn.q_norm.weight",
            "ones",
            "qk_norm_whole",
            "kv_heads",
        ),
        ParamSpec(
            "attention.k_norm.scale",
            "K D",
            "self_attn.k_norm.weight",
            "ones",
            "qk_norm_whole",
            "kv_heads",
        ),
        ParamSpec("attention.q_norm.scale", "D", "self_attn.q_norm.weight", "ones", "qk_norm"),
        ParamSpec("attention.k_norm.scale", "D", "self_attn.k_norm.weight", "ones", "qk_norm"),
        ParamSpec(
            "attention.out", "E, K G D", "self_attn.o_proj.weight", "residual", None, "kv_heads"
        ),
        ParamSpec(
            "attention.sinks", "K G", "self_attn.sinks", "zeros", "attention_sinks", "kv_heads"
        ),
        ParamSpec("attention.out_bias", "E", "self_attn.o_proj.bias", "zeros", "out_bias"),
        ParamSpec(
            "attention_post_norm.scale",
            "E",
            "post_attention_layernorm.weight",
            "ones",
            "post_norms",
        ),
        ParamSpec("post_norm.scale", "E", "post_attention_layernorm.weight", "ones", "pre_norms"),
        ParamSpec("mlp.gate_up", "2 F, E", GATE_UP, "normal", "has_mlp", "ffn"),
        ParamSpec("mlp.gate_up_bias", "2 F", GATE_UP_BIAS, "zeros", "has_mlp_bias", "ffn"),
        ParamSpec("mlp.down", "E, F", "mlp.down_proj.weight", "residual", "has_mlp", "ffn"),
        ParamSpec("mlp.down_bias", "E", "mlp.down_proj.bias", "zeros", "has_mlp_bias"),
        ParamSpec("mlp.router", "X, E", "mlp.gate.weight", "normal", "has_experts"),
        ParamSpec("mlp.router_bias", "X", "mlp.router.bias", "zeros", "has_expert_bias"),
        ParamSpec(
            "mlp.experts.gate_up_bias",
            "X 2 I",
            EXPERT_BIASES,
            "zeros",
            "has_expert_bias",
            "expert",
        ),
        ParamSpec(
            "mlp.experts.down_bias",
            "X E",
            "mlp.experts.down_proj_bias",
            "zeros",
            "has_expert_bias",
        ),
        ParamSpec("mlp.experts.gate_up", "X 2 I, E", EXPERTS, "normal", "has_experts", "expert"),
        ParamSpec(
            "mlp.experts.down",
            "X E, I",
            "mlp.experts.{x}.down_proj.weight",
            "residual",
            "has_experts",
            "expert",
        ),
        ParamSpec(
            "mlp.shared.gate_up", "2 R, E", SHARED, "normal", "has_shared_expert", "shared_expert"
        ),
        ParamSpec(
            "mlp.shared.down",
            "E, R",
            "mlp.shared_expert.down_proj.weight",
            "residual",
            "has_shared_expert",
            "shared_expert",
        ),
        ParamSpec(
            "mlp.shared_gate",
            "1, E",
            "mlp.shared_expert_gate.weight",
            "normal",
            "has_shared_expert",
        ),
        ParamSpec(
            "mlp_post_norm.scale", "E", "post_feedforward_layernorm.weight", "ones", "post_norms"
        ),
    ),
    ParamSpec("norm.scale", "E", "model.norm.weight", "ones"),
    ParamSpec("lm_head.weight", "W, E", "lm_head.weight", "normal", "has_draft_lm_head"),
    ParamSpec("lm_head.weight", "V, E", "lm_head.weight", "normal", "has_lm_head", "vocab"),
)


def param_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """A model's parameters by name ("layers.0.attention.qkv"), in the order of the forward pass."""
    table, names = {}, FAMILIES[config.family].names
    named = (spec.stored_as(names) for spec in TABLE)
    for in_layers, group in itertools.groupby(named, key=lambda spec: "{i}" in spec.name):
        specs = list(group)
        for layer in range(config.num_layers) if in_layers else [None]:
            placed = [
                dataclasses.replace(spec, layer=layer)
                for spec in specs
                if spec.is_in(config, layer)
            ]
            table |= {spec.at(spec.name): spec for spec in placed}
    return table


def all_parts() -> dict[str, Part]:
    """Every part that some model is stored as, by its name with {i}."""
    return {part.name: part for spec in TABLE for part in spec.parts}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of each axis by its letter."""
    return {
        "V": config.vocab_size,
        "E": config.hidden_size,
        "F": config.intermediate_size,
        "K": config.num_kv_heads,
        "G": config.group_size,
        "D": config.head_dim,
        "L": config.num_layers,
        "X": config.num_experts,
        "I": config.expert_size,
        "R": config.shared_expert_size,
        **config.more_axes,
    }


def axes_shape(axes: str, config: ModelConfig) -> tuple[int, ...]:
    """The sizes of axes that are spelled as in ParamSpec."""
    sizes = axis_sizes(config)
    return tuple(
        sum(int(term) if term.isdecimal() else sizes[term] for term in token.split("+"))
        for token in _tokens(axes)
    )


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of {"layers.0.attention.qkv": leaf, ...}."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """Nested dict of shapes, one tuple a parameter; layers are keyed "0", "1", ..."""
    return nest({name: spec.shape(config) for name, spec in param_table(config).items()})


def param_specs(config: ModelConfig, axis: MeshAxis | None, size: int = 1) -> dict[str, Any]:
    """Nested dict of PartitionSpecs: KV heads, FFN and vocabulary over `axis` of `size` devices,
    each where it divides (see ParamSpec.partition).
    """
    table = param_table(config)
    return nest({name: spec.partition(config, axis, size) for name, spec in table.items()})


def initial_tree(config: ModelConfig, rngs: "nnx.Rngs", dtype: DTypeLike) -> dict[str, Any]:
    """The canonical tree as training starts from it."""

    def initial(spec: ParamSpec) -> Array:
        shape = spec.shape(config)
        if spec.init in ("zeros", "ones"):
            is_one = spec.init == "ones" and not config.norm_offset
            return jnp.full(shape, float(is_one), dtype)
        scale = 0.02 if spec.init == "normal" else 0.02 * (2 * config.num_layers) ** -0.5
        return jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(scale, dtype)

    return nest({name: initial(spec) for name, spec in param_table(config).items()})


def random_params(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> "Params":
    """Params of untrained weights on jax's default device: what a model costs, not what it says."""
    from flax import nnx  # a part of each start, and serving has no use for it

    return Params(initial_tree(config, nnx.Rngs(seed), dtype), config)


def check_leaf(where: str, leaf: Any, caller: str) -> None:
    """ConfigError unless a leaf is a live floating-point array. where: its name for the message."""
    if isinstance(leaf, Tracer):
        raise ConfigError(
            f"{where} is a tracer: {caller} is host Python and cannot run under jit, grad or vmap"
        )
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ConfigError(f"{where} is a {type(leaf).__name__}, not an array")
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ConfigError(f"{where} is of dtype {leaf.dtype}: weights are floating point")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigError(f"{where} is a deleted array: {DONATED}")


def choose_tensor_axis(mesh: Mesh) -> str:
    """The axis of a mesh to split KV heads over when nobody said: one of the usual names, else the
    last.
    """
    return next((name for name in TENSOR_AXES if name in mesh.axis_names), mesh.axis_names[-1])


def _tokens(axes: str) -> list[str]:
    return axes.replace(",", " ").split()


@dataclasses.dataclass(frozen=True)
class _Static:
    """What jax keeps beside the leaves. The source takes no part in equality or hash: it must never
    split a treedef.
    """

    config: ModelConfig
    keys: tuple[str, ...]
    source: Path | None = dataclasses.field(compare=False)


class Params(Mapping[str, Any]):
    """The canonical parameter tree (see TABLE) with its ModelConfig, usable wherever jax
    takes a pytree.

    Flattens like the plain dict that it wraps: same leaves, order and key paths. Nothing is checked
    here, so that jax, optax and Orbax may put any object where an array was. Two Params have one
    treedef if their configs are equal, wherever they came from. source: the folder they were read
    from (its tokenizer and generation_config), a hint and no more: a tree map keeps the first
    tree's, and a jitted function returns that of the call that traced it.
    """

    __slots__ = ("__weakref__", "_static", "_tree")

    def __init__(self, tree: Mapping[str, Any], config: ModelConfig, source: Path | None = None):
        self._tree = {key: tree[key] for key in sorted(tree)}
        self._static = _Static(config, tuple(self._tree), source)

    @property
    def config(self) -> ModelConfig:
        """The architecture that these weights are for."""
        return self._static.config

    @property
    def source(self) -> Path | None:
        """The checkpoint folder that these weights came from, if one is known."""
        return self._static.source

    def __getitem__(self, key: str) -> Any:
        return self._tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    __eq__ = object.__eq__  # a Mapping's would compare arrays for truth
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        leaves = [
            leaf
            for leaf in jax.tree.leaves(self._tree)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        ]
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        dtypes = "+".join(sorted({str(leaf.dtype) for leaf in leaves})) or "no arrays"
        return f"Params({self.config.family}, {count:,} parameters, {dtypes})"


def _children(params: Params) -> tuple[list[tuple[Any, Any]], _Static]:
    return [
        (jax.tree_util.DictKey(key), child) for key, child in params._tree.items()
    ], params._static


def _rebuild(static: _Static, children: Iterable[Any]) -> Params:
    params = object.__new__(Params)
    params._static = static
    params._tree = dict(zip(static.keys, children, strict=True))
    return params


jax.tree_util.register_pytree_with_keys(Params, _children, _rebuild)
