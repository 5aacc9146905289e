"""Params: the tree that holds a model's parameters, and the views of the specs that its layers
declare: shapes, mesh specs and initial weights.

A parameter is declared once, by its layer's `params` (models/layers) or the model's
(ModelConfig.params). Shapes, mesh specs, file names, other projects' trees, initial weights and the
memory bound are all read from there.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.families import FAMILIES
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.param_spec import MeshAxis, Parameter, ParamSpec, Part

if TYPE_CHECKING:
    from flax import nnx

TENSOR_AXES = ("tp", "tensor", "model")  # names that a mesh's tensor-parallel axis usually has
DONATED = "were the params donated to a training step?"


# Layers that have between them every parameter that a layer can have.
EVERYTHING = (
    LayerConfig(
        mixer=AttentionConfig(
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            sinks=True,
            qkv_bias=True,
            out_bias=True,
            qk_norm="head",
        ),
        ffn=MLPConfig(intermediate_size=1, bias=True),
        norms="both",
    ),
    LayerConfig(
        mixer=None,
        ffn=ExpertsConfig(
            num_experts=1, experts_per_token=1, expert_size=1, shared_expert_size=1, bias=True
        ),
    ),
)


def param_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """A model's parameters by name ("layers.0.attention.qkv"), in the order of the forward pass."""
    names = FAMILIES[config.family].names
    specs = (spec.stored_as(names) for spec in config.params())
    return {spec.at(spec.name): spec for spec in specs}


def all_parts() -> dict[str, Part]:
    """Every part that some model is stored as, by its name with {i}."""
    norm = {"vocab_size": 1, "hidden_size": 1, "max_position_embeddings": 1, "family": "llama"}
    model = ModelConfig(**norm, layers=EVERYTHING)
    return {part.name: part for spec in model.params() for part in spec.parts}


def parameters(config: ModelConfig, tree: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of a canonical tree by name."""
    found: dict[str, Parameter] = {}
    for name, spec in param_table(config).items():
        node: Any = tree
        for key in name.split("."):
            node = node[key]
        found[name] = Parameter(spec, node)
    return found


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
    return nest({name: spec.shape for name, spec in param_table(config).items()})


def param_specs(config: ModelConfig, axis: MeshAxis | None, size: int = 1) -> dict[str, Any]:
    """Nested dict of PartitionSpecs: KV heads, FFN and vocabulary over `axis` of `size` devices,
    each where it divides (see ParamSpec.partition).
    """
    table = param_table(config)
    return nest({name: spec.partition(axis, size) for name, spec in table.items()})


def initial_tree(config: ModelConfig, rngs: "nnx.Rngs", dtype: DTypeLike) -> dict[str, Any]:
    """The canonical tree as training starts from it."""

    def initial(spec: ParamSpec) -> Array:
        shape = spec.shape
        if spec.init in ("zeros", "ones"):
            return jnp.full(shape, float(spec.init == "ones"), dtype)
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


@dataclasses.dataclass(frozen=True)
class _Static:
    """What jax keeps beside the leaves. The source takes no part in equality or hash: it must never
    split a treedef.
    """

    config: ModelConfig
    keys: tuple[str, ...]
    source: Path | None = dataclasses.field(compare=False)


class Params(Mapping[str, Any]):
    """The canonical parameter tree (see ModelConfig.params) with its ModelConfig, usable wherever
    jax takes a pytree.

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
