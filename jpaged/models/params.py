"""Params, the tree that holds a model's parameters; and what follows from the specs that its layers
declare: shapes, PartitionSpecs and initial weights.

A parameter is declared once, by `params` of its layer (models/layers) or of the model
(ModelConfig.params). Shapes, PartitionSpecs, file names, other projects' trees, initial weights and
the memory bound are all computed from that declaration.
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
from jpaged.models.layers.conv import ConvConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.indexer import IndexerConfig
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.norm import PLAIN_NORM
from jpaged.models.layers.parallel_ffn import ParallelFFNConfig
from jpaged.models.layers.per_layer import PerLayerConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.models.param_spec import MeshAxis, Parameter, ParamSpec, Part
from jpaged.models.vision.tower import PREFIX

if TYPE_CHECKING:
    from flax import nnx

TENSOR_AXES = ("tp", "tensor", "model")  # names that a mesh's tensor-parallel axis usually has
DONATED = "were the params donated to a training step?"


# Together these layers have every parameter that a layer can have, but for per-layer embeddings,
# which all layers of a model have or none.
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
        has_scalar=True,
    ),
    # Before experts that take x, whose parts have the same names.
    LayerConfig(
        mixer=None,
        ffn=ExpertsConfig(num_experts=1, experts_per_token=1, expert_size=1, latent_size=1),
    ),
    LayerConfig(
        mixer=DeltaConfig(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1),
        ffn=ExpertsConfig(
            num_experts=1,
            experts_per_token=1,
            expert_size=1,
            shared_expert_size=1,
            bias=True,
            router=RouterConfig(has_bias=True),
        ),
    ),
    *(
        LayerConfig(
            mixer=KimiDeltaConfig(
                num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, gate_rank=rank
            ),
            ffn=None,
        )
        for rank in (None, 1)
    ),
    LayerConfig(mixer=ConvConfig(channels=1, bias=True), ffn=None),
    LayerConfig(mixer=MambaConfig(num_heads=1, head_dim=1, state_dim=1, bias=True), ffn=None),
    LayerConfig(
        mixer=LatentConfig(
            num_heads=1,
            latent_dim=1,
            rope_dim=2,
            content_dim=1,
            value_dim=1,
            query_latent_dim=1,
            bias=True,
            gate=True,
            chosen=1,
            indexer=IndexerConfig(num_heads=1, key_dim=2),
        ),
        ffn=None,
    ),
    LayerConfig(
        mixer=None,
        ffn=ParallelFFNConfig(
            mlp=MLPConfig(intermediate_size=1),
            experts=ExpertsConfig(
                num_experts=1,
                experts_per_token=1,
                expert_size=1,
                router=RouterConfig(norm=PLAIN_NORM, has_expert_scales=True),
            ),
        ),
    ),
)


def param_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """Return a model's parameters by name ("layers.0.attention.qkv"), in the order of the forward
    pass.
    """
    family = FAMILIES[config.family]
    specs = (
        spec
        if spec.name.startswith(PREFIX)
        else spec.stored_as(family.names).in_nodes(family.nodes)
        for spec in config.params()
    )
    return {spec.at(spec.name): spec for spec in specs}


def all_parts() -> dict[str, Part]:
    """Return every part that a parameter of some model is stored as, by its name with {i}."""
    norm = {"vocab_size": 1, "hidden_size": 1, "max_position_embeddings": 1, "family": "llama"}
    layers = (dataclasses.replace(x, per_layer=PerLayerConfig(size=1)) for x in EVERYTHING)
    model = ModelConfig(**norm, layers=layers)
    return {part.name: part for spec in model.params() for part in spec.parts}


def parameters(config: ModelConfig, tree: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of a canonical tree by name."""
    by_name: dict[str, Parameter] = {}
    for name, spec in param_table(config).items():
        node: Any = tree
        for key in name.split("."):
            node = node[key]
        by_name[name] = Parameter(spec, node)
    return by_name


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict of {"layers.0.attention.qkv": leaf, ...}."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """Return a nested dict of shapes, one tuple a parameter; layers have the keys "0", "1", ..."""
    return nest({name: spec.shape for name, spec in param_table(config).items()})


def param_specs(
    config: ModelConfig,
    axis: MeshAxis | None,
    size: int = 1,
    data_axes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a nested dict of PartitionSpecs, which split KV heads, FFN and vocabulary over `axis`
    of `size` devices where they divide (see ParamSpec.partition). data_axes: those that replicas
    lie along, over which a served model may split experts.
    """
    table = param_table(config)
    return nest({name: spec.partition(axis, size, data_axes) for name, spec in table.items()})


def initial_tree(config: ModelConfig, rngs: "nnx.Rngs", dtype: DTypeLike) -> dict[str, Any]:
    """Return the canonical tree with the values that training starts from."""

    def initial(spec: ParamSpec) -> Array:
        shape, kept = spec.shape, jnp.float32 if spec.in_f32 else dtype
        if spec.init == "bounds":  # so wide that they bound nothing
            signs = jnp.where(jnp.arange(math.prod(shape)) % 2, 1, -1).reshape(shape)
            return signs.astype(kept) * jnp.asarray(jnp.finfo(kept).max, kept)
        if spec.init in ("zeros", "ones"):
            return jnp.full(shape, float(spec.init == "ones"), kept)
        scale = 0.02 if spec.init == "normal" else 0.02 * (2 * config.num_layers) ** -0.5
        return jax.random.normal(rngs.params(), shape, kept) * jnp.asarray(scale, kept)

    return nest({name: initial(spec) for name, spec in param_table(config).items()})


def random_params(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> "Params":
    """Return Params of untrained weights on jax's default device, to measure what a model costs."""
    from flax import nnx  # its import takes time, and serving has no use for it

    return Params(initial_tree(config, nnx.Rngs(seed), dtype), config)


def check_leaf(name: str, leaf: Any, caller: str) -> None:
    """ConfigError unless a leaf is a live floating-point array. name: of the leaf, for messages."""
    if isinstance(leaf, Tracer):
        raise ConfigError(
            f"{name} is a tracer: {caller} is host Python and cannot run under jit, grad or vmap"
        )
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ConfigError(f"{name} is a {type(leaf).__name__}, not an array")
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ConfigError(f"{name} is of dtype {leaf.dtype}: weights are floating point")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigError(f"{name} is a deleted array: {DONATED}")


def choose_tensor_axis(mesh: Mesh) -> str:
    """Return the axis of a mesh that splits KV heads when the caller names none: one with a usual
    name, else the last.
    """
    return next((name for name in TENSOR_AXES if name in mesh.axis_names), mesh.axis_names[-1])


@dataclasses.dataclass(frozen=True)
class _Static:
    """What jax keeps beside the leaves. Equality and hash ignore the source, so that Params from
    two folders have the same treedef.
    """

    config: ModelConfig
    keys: tuple[str, ...]
    source: Path | None = dataclasses.field(compare=False)


class Params(Mapping[str, Any]):
    """The canonical parameter tree (see ModelConfig.params) with its ModelConfig, usable wherever
    jax takes a pytree.

    It flattens like the plain dict that it wraps: same leaves, order and key paths. Nothing is
    checked here, so that jax, optax and Orbax may put any object in the place of an array. Two
    Params have the same treedef if their configs are equal, wherever they came from. source: the
    folder that they were read from (with a tokenizer and a generation_config), which is only a
    hint: a tree map keeps that of the first tree, and a jitted function returns that of the call
    that traced it.
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
        """The checkpoint folder that these weights came from; None if it is not known."""
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
