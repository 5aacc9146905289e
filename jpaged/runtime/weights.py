"""The caller's params -> the serving tree: any pytree form in, cast and placed once a weight
version.
"""

import itertools
import logging
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.param_spec import MeshAxis
from jpaged.models.params import (
    TENSOR_AXES,
    Params,
    check_leaf,
    nest,
    param_shapes,
    param_specs,
    param_table,
)
from jpaged.models.quantized import Form, QuantizedWeight, is_quantized
from jpaged.models.served import Change, served_config, served_form
from jpaged.models.trees import is_module, to_tree
from jpaged.runtime.mesh import Placement, serving_mesh
from jpaged.runtime.quantize import Quantize, check_kept
from jpaged.runtime.reshard import Reshard, is_served

log = logging.getLogger("jpaged")
UNMULTIPLIED = ("bias']", "scale']")  # ends of names of what is no linear weight, whatever its axes
FOREIGN = "if another project's model has these names, jpaged.params_from makes Params of it"


def as_params(params: Any, config: Any = None) -> Params:
    """Params over the caller's own leaves, from any accepted form; nothing is copied.

    params: what load_params returns, an nnx Module or State, a linen {"params": ...} dict or a
    plain dict in the canonical names. config: ModelConfig, Hugging Face dict or folder; needed for
    raw trees. Raises ConfigError naming the first parameter that does not fit.
    """
    source = params.source if isinstance(params, Params) else None
    if config is not None:
        model = ModelConfig.coerce(config)
    elif isinstance(getattr(params, "config", None), ModelConfig):  # Params, and our own nnx module
        model = params.config
    else:
        kind = type(params).__name__
        raise ConfigError(
            f"params of type {kind} need config= (ModelConfig, Hugging Face dict or folder)"
        )
    if source is None and isinstance(config, str | Path):
        source = Path(config)
    if is_module(params):
        params = to_tree(params)
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"params of type {type(params).__name__}: pass Params, an nnx Module or "
            "State, or a dict"
        )
    if set(params) == {"params"}:
        params = params["params"]
    tree = to_tree(params)
    _check(tree, param_shapes(model), "")
    return Params(tree, model, source)


def placement(params: Params, config: EngineConfig, mesh: Mesh | None) -> Placement:
    """Where to serve: `mesh`, else data_parallel_size times tensor_parallel_size devices (of the
    params' own mesh, if they have one), else that mesh, else the params' device.
    """
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    if mesh is None:
        theirs = _own_mesh(leaves)
        devices = () if theirs is None else theirs.devices.flat
        sizes = (config.tensor_parallel_size, config.data_parallel_size)
        asks_for_none = all(size is None for size in sizes)
        mesh = theirs if asks_for_none else serving_mesh(config, None, list(devices))
    if mesh is None or mesh.size == 1:
        own = leaves[0].devices() if leaves else jax.devices()
        device = next(iter(own if mesh is None else mesh.devices.flat))
        where = Placement(mesh=None, axis=None, device=device)
        _check_sizes(config, where)
        return where
    axis = config.tensor_axis
    check_combination(Facts(config=config, mesh_axes=mesh.axis_names))
    if axis == "auto":
        axis = _kv_axis(params, mesh) or next(
            (name for name in TENSOR_AXES if name in mesh.axis_names), None
        )
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if not own:
        raise ConfigError(
            f"process {jax.process_index()} has no device on the mesh {mesh.axis_names}: every "
            "process that calls must share the model"
        )
    where = Placement(mesh=mesh, axis=axis or None, device=own[0])
    _check_sizes(config, where)
    try:
        served_config(params.config, where.axis_size)
    except ConfigError as e:
        error = ConfigError(f"mesh axis {axis!r}: {e}")
        error.rule = e.rule
        raise error from e
    return where


def _own_mesh(leaves: Iterable[jax.Array]) -> Mesh | None:
    """The first mesh of several devices that a leaf lies on."""
    shardings = (x.sharding for x in leaves if x.sharding.num_devices > 1)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _check_sizes(config: EngineConfig, where: Placement) -> None:
    check_combination(Facts(config=config, devices=where.axis_size, replicas=where.replicas))


def is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


class ServingWeights:
    """The serving tree of one engine, remade when any leaf of the caller's params is another
    object.

    Leaves are jax arrays, which are immutable: the same objects mean the same weights. They are
    held by weakref, so the caller's weights are never kept alive by it; numpy, dead and donated
    leaves always mean a new version.
    """

    def __init__(self, where: Placement, dtype: str | None, quantization: Form | None = None):
        self.where = where
        self.quantization: Form | None = quantization
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.version = 0
        # Bytes of leaves that were cast, padded or moved, and the seconds until they were there.
        self.moved_bytes, self.moved_seconds = 0, 0.0
        self._reshard, self._quantize = Reshard(), Quantize(where)
        # Of every leaf as served: the steps are compiled for them.
        self._dtypes: list[Any] | None = None
        self._forms: list[Any] | None = None
        self._refs: list[weakref.ref[jax.Array] | None] = []
        # Leaves that are copies of ours; None where the caller's own serves.
        self._derived: list[jax.Array | QuantizedWeight | None] = []

    def update(self, params: Params) -> bool:
        """Take these params; True when they are a new version. Read `tree` next."""
        leaves = _weights(params)
        held = [x.values if is_quantized(x) else x for x in leaves]
        same = len(held) == len(self._refs) and all(
            r and r() is x for r, x in zip(self._refs, held, strict=True)
        )
        if same and self._derived:
            return False
        self.check_dtypes(params)
        self.release()  # the last version's copies go before the next ones are made
        self._derived = self._prepare(params, leaves)
        if same:  # they had been released
            return False
        self.version += 1
        self._refs = [weakref.ref(x) if isinstance(x, jax.Array) else None for x in held]
        return True

    def tree(self, params: Params) -> Any:
        """The serving tree for params that were last passed to `update`: plain dicts of jax
        arrays.
        """
        leaves = _weights(params)
        served = [
            ours if ours is not None else theirs
            for ours, theirs in zip(self._derived, leaves, strict=True)
        ]
        structure = jax.tree.structure(params, is_leaf=is_quantized)
        return dict(jax.tree.unflatten(structure, served))

    def report(self) -> dict[str, Any]:
        """The version, and what its copies and those before it cost."""
        return {
            "weight_version": self.version,
            "weight_bytes_moved": self.moved_bytes,
            "weight_move_s": self.moved_seconds,
        }

    def release(self) -> None:
        """Free the derived copies; the next update makes them again."""
        self._derived = []

    def check_dtypes(self, params: Params) -> None:
        """Refuse linear weights of several dtypes, and any change of dtype: compiled steps take
        neither.
        """
        leaves = jax.tree.leaves_with_path(params, is_leaf=is_quantized)
        dtypes = [self.dtype or jnp.dtype(leaf.dtype) for _, leaf in leaves]
        is_linear = [
            leaf.ndim > 1 and not str(path[-1]).endswith(UNMULTIPLIED) for path, leaf in leaves
        ]
        if len(linear := set(itertools.compress(dtypes, is_linear))) > 1:
            raise ConfigError(
                f"linear weights in {_names(linear)}: pass dtype= to serve them in one"
            )
        if self._dtypes not in (None, dtypes):
            built = f"this engine was built for {_names(self._dtypes or [])}"
            raise ConfigError(f"params in {_names(dtypes)}; {built}: pass dtype= to it")
        forms = [_lies(leaf) if self.quantization is None else None for _, leaf in leaves]
        if self._forms not in (None, forms):
            raise ConfigError(
                "params whose weights lie in other forms than those that this engine was built "
                "for: pass quantization= to it, or load them with dequantize=True"
            )
        self._dtypes, self._forms = dtypes, forms

    def _prepare(
        self, params: Params, leaves: list[Any]
    ) -> list[jax.Array | QuantizedWeight | None]:
        """Cast, pad, place and quantise what needs it; whatever already fits is served as it is."""
        model, devices = params.config, self.where.axis_size
        served = served_config(model, devices)
        specs = jax.tree.leaves(nest(param_table(model)))
        served_specs = jax.tree.leaves(nest(param_table(served)))
        splits = jax.tree.leaves(param_specs(served, self.where.axis, devices))
        jobs: list[tuple[Any, Change, Any] | None] = []
        forms: list[Form | None] = []
        for leaf, spec, ours, split in zip(leaves, specs, served_specs, splits, strict=True):
            change = Change.of(spec, ours, self.dtype or leaf.dtype)
            job = (leaf, change, self.where.sharding(split))
            form = served_form(ours, served, self.quantization, devices)
            if is_quantized(leaf):
                check_kept(spec, leaf, change, form if self.quantization else leaf.form)
                form = None
            jobs.append(None if is_quantized(leaf) or is_served(*job) else job)
            forms.append(form)
        moving = [x for x, job, form in zip(leaves, jobs, forms, strict=True) if job or form]
        jax.block_until_ready(moving)  # what a trainer still computes is not time of ours
        began = time.perf_counter()
        derived: list[jax.Array | QuantizedWeight | None] = []
        for leaf, job, form, spec, split in zip(leaves, jobs, forms, specs, splits, strict=True):
            ready: Any = None if job is None else self._reshard(*job)
            if is_quantized(leaf):
                ready = self._quantize.kept(leaf, self.dtype or leaf.dtype, split)
            if form is not None:
                ready = self._quantize(leaf if ready is None else ready, form, spec, split)
            derived.append(ready)
        made = [x if ours is None else ours for ours, x in zip(derived, leaves, strict=True)]
        self._quantize.check(specs, made)
        if moving:
            jax.block_until_ready(derived)
            seconds, moved = time.perf_counter() - began, sum(leaf.nbytes for leaf in moving)
            self.moved_seconds += seconds
            self.moved_bytes += moved
            log.info("made %.1f MB of weights ready to serve in %.2f s", moved / 1e6, seconds)
        return derived


def _weights(params: Any) -> list[Any]:
    """The leaves, a weight in 8 or 4 bits being one."""
    return jax.tree.leaves(params, is_leaf=is_quantized)


def _lies(leaf: Any) -> Any:
    """What steps are compiled for of a weight in 8 or 4 bits; None of a plain one."""
    if not is_quantized(leaf):
        return None
    return leaf.form, leaf.scales.shape, leaf.zeros is not None


def _names(dtypes: Iterable[Any]) -> str:
    return " and ".join(sorted({str(dtype) for dtype in dtypes}))


def _kv_axis(params: Params, mesh: Mesh) -> MeshAxis | None:
    """The mesh axis, or axes, that the KV heads of the first layer are split over."""
    sharding = getattr(params["layers"]["0"]["attention"]["qkv"], "sharding", None)
    spec = (
        sharding.spec
        if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == mesh.axis_names
        else ()
    )
    axes = spec[0] if spec else None
    return axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes or None


def _check(tree: Any, shapes: Any, path: str) -> None:
    """Every name and shape as the config says, and every leaf a live floating-point array."""
    if not isinstance(tree, dict):
        raise ConfigError(
            f"params{path}: expected a dict of {sorted(shapes)}, found {type(tree).__name__}; "
            f"{FOREIGN}"
        )
    if missing := sorted(shapes.keys() - tree.keys()):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(f"params{path} lack {missing[0]!r}{more}; {FOREIGN}")
    if extra := sorted(tree.keys() - shapes.keys()):
        raise ConfigError(
            f"params{path} hold {extra[0]!r}, which this config does not have; {FOREIGN}"
        )
    for name, shape in shapes.items():
        leaf, where = tree[name], f"{path}[{name!r}]"
        if isinstance(shape, dict):
            _check(leaf, shape, where)
            continue
        check_leaf(f"params{where}", leaf.scales if is_quantized(leaf) else leaf, "generate")
        if leaf.shape != shape:
            raise ConfigError(f"params{where} is of shape {leaf.shape}, the config says {shape}")
