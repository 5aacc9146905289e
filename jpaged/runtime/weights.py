"""From the caller's params to the modules that steps take: takes any pytree, casts and places it
once a weight version.
"""

import functools
import logging
import time
import weakref
from collections import OrderedDict
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
from jpaged.models.head_modules import bind_any
from jpaged.models.param_spec import MeshAxis, ParamSpec, tokens_of
from jpaged.models.params import (
    DONATED,
    TENSOR_AXES,
    Params,
    check_leaf,
    nest,
    param_shapes,
    param_table,
)
from jpaged.models.quantized import QuantizedWeight, is_quantized
from jpaged.models.served import served_form
from jpaged.models.trees import is_module, to_tree
from jpaged.models.weight import Weight
from jpaged.runtime.mesh import Placement, serving_mesh
from jpaged.runtime.placing import Placer

log = logging.getLogger("jpaged")
FOREIGN = "if another project's model has these names, jpaged.params_from makes Params of it"


def as_params(params: Any, config: Any = None) -> Params:
    """Return Params over the caller's leaves, from any tree that is accepted; nothing is copied.

    params: what load_params returns, an nnx Module or State, a linen {"params": ...} dict or a
    plain dict in the canonical names. config: ModelConfig, Hugging Face dict or folder; needed for
    raw trees. Raises ConfigError naming the first parameter that does not fit.

    Names, shapes and dtypes are checked once: Params of a structure and of arrays like those that
    were found to fit, and that are alive, fit too.
    """
    # A config of equal value may have other ids that end a text: ModelConfig does not compare them.
    if type(params) is not Params or (config is not None and config is not params.config):
        return _checked(params, config)
    leaves, structure = jax.tree.flatten(params)
    form = (
        structure,
        tuple([(type(x), getattr(x, "shape", 0), getattr(x, "dtype", 0)) for x in leaves]),
    )
    if form not in _FITTING or [x for x in leaves if isinstance(x, jax.Array) and x.is_deleted()]:
        params = _checked(params, None)
        _FITTING[form] = None
        if len(_FITTING) > MOST_FORMS:
            _FITTING.popitem(last=False)
        return params
    return jax.tree.unflatten(structure, leaves)  # not the caller's dicts, which may change


MOST_FORMS = 8
_FITTING: OrderedDict[Any, None] = OrderedDict()  # structures and forms of leaves; no arrays


def _checked(params: Any, config: Any) -> Params:
    """Return Params as `as_params` does; every name and every leaf is looked at."""
    source = params.source if isinstance(params, Params) else None
    if config is not None:
        model = ModelConfig.coerce(config, images=_has_tower(params))
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


def _has_tower(params: Any) -> bool:
    """Return whether a tree has a vision tower."""
    if isinstance(params, Mapping):
        return "vision" in params.get("params", params)
    return getattr(params, "vision", None) is not None


def place_params(params: Params, config: EngineConfig, mesh: Mesh | None) -> Placement:
    """Return where to serve: `mesh`, else data_parallel_size times tensor_parallel_size devices (of
    the params' mesh, if they have one), else that mesh, else the params' device.
    """
    if mesh is not None and not hasattr(mesh, "axis_names"):
        raise ConfigError(f"mesh of type {type(mesh).__name__}: pass a jax.sharding.Mesh")
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    if mesh is None:
        theirs = _own_mesh(leaves)
        devices = () if theirs is None else theirs.devices.flat
        sizes = (config.tensor_parallel_size, config.data_parallel_size)
        asks_for_none = all(size is None for size in sizes)
        mesh = theirs if asks_for_none else serving_mesh(config, None, list(devices))
    if mesh is None or mesh.size == 1:
        devices = leaves[0].devices() if leaves else jax.devices()
        device = next(iter(devices if mesh is None else mesh.devices.flat))
        place = Placement(mesh=None, axis=None, device=device)
        place.check(config, params.config)
        return place
    axis = config.tensor_axis
    check_combination(Facts(config=config, mesh_axes=mesh.axis_names))
    if axis == "auto":
        axis = _head_axis(params, mesh) or next(
            (name for name in TENSOR_AXES if name in mesh.axis_names), None
        )
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if not devices:
        raise ConfigError(
            f"process {jax.process_index()} has no device on the mesh {mesh.axis_names}: every "
            "process that calls must share the model"
        )
    place = Placement(
        mesh=mesh,
        axis=axis or None,
        device=devices[0],
        expert_parallel=config.expert_parallel,
    )
    place.check(config, params.config)
    try:
        place.served(params.config)
    except ConfigError as e:
        if e.rule == "experts_divide":  # over all axes
            raise
        error = ConfigError(f"mesh axis {axis!r}: {e}")
        error.rule = e.rule
        raise error from e
    return place


def _own_mesh(leaves: Iterable[jax.Array]) -> Mesh | None:
    """Return the first mesh of several devices that a leaf lies on."""
    shardings = (x.sharding for x in leaves if x.sharding.num_devices > 1)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def is_deleted(leaf: Any) -> bool:
    """Return whether a leaf is a jax array that was deleted or donated."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


class ServingWeights:
    """The weights that one engine serves, made anew when any leaf of the caller's params is another
    object.

    Leaves are jax arrays, which are immutable: the same objects mean the same weights. They are
    held by weakref, so that this keeps none of the caller's weights alive. numpy arrays, and
    arrays that are dead or donated, always mean a new version. interleaved: what is made in int8
    and int4 lies so (see choices.interleaves).
    """

    def __init__(
        self,
        placement: Placement,
        dtype: str | None,
        quantization: str | None = None,
        *,
        interleaved: bool = False,
    ):
        self.placement = placement
        self.quantization = quantization
        self.interleaved = interleaved
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.version = 0
        # Bytes of leaves that were cast, padded or moved, and the seconds until they were there.
        self.moved_bytes, self.moved_seconds = 0, 0.0
        self._placer = Placer(placement.sharding)
        # What the steps are compiled for, of every leaf as it is served.
        self._dtypes: list[str] | None = None
        self._structures: list[Any] | None = None
        # Whether each leaf lies interleaved since the first version: compiled steps take no other
        # order. What a caller holds in rows then stays so, since a copy would be there beside it.
        self._orders: list[bool] | None = None
        self._refs: list[weakref.ref[jax.Array] | None] = []
        self._form: Any = None  # the structure of the params that these are the leaves of
        # The modules' leaves, for each our copy or the number of the caller's array that serves,
        # and the modules' structure; None once the copies are released.
        self._bound: tuple[list[jax.Array | int], Any] | None = None

    def update(self, params: Params) -> bool:
        """Take these params, whose modules `modules` then returns; return whether they are a new
        version.
        """
        arrays, form = jax.tree.flatten(params)  # of a weight in 8 or 4 bits its scales too
        served = [None if ref is None else ref() for ref in self._refs]  # None is no leaf
        same = len(arrays) == len(served) and not [
            x for x, y in zip(arrays, served, strict=True) if x is not y
        ]
        if same and self._bound is not None:
            return False
        self.check_dtypes(params)
        self.release()  # the last version's copies go before the next ones are made
        self._bound = self._bind(params, self._prepare(self._weights(params)))
        self._form = form
        if same:  # they had been released
            return False
        self.version += 1
        self._refs = [weakref.ref(x) if isinstance(x, jax.Array) else None for x in arrays]
        return True

    def again(self, params: Params) -> Any:
        """Return the modules for params that are those last passed to `update`: a tree of the same
        structure and of the same arrays, all alive. Return None for any others.
        """
        arrays, form = jax.tree.flatten(params)
        if self._bound is None or form != self._form:
            return None
        for array, ref in zip(arrays, self._refs, strict=True):
            if ref is None or array is not ref() or array.is_deleted():
                return None
        leaves, structure = self._bound
        return jax.tree.unflatten(
            structure, [arrays[x] if isinstance(x, int) else x for x in leaves]
        )

    def modules(self, params: Params) -> Any:
        """Return the modules (a Forward, or the Head of a draft) that serve the params last passed
        to `update`.
        """
        assert self._bound is not None, "update comes first"
        leaves, structure = self._bound
        arrays = jax.tree.leaves(params)
        return jax.tree.unflatten(
            structure, [arrays[x] if isinstance(x, int) else x for x in leaves]
        )

    def _bind(
        self, params: Params, derived: list[jax.Array | QuantizedWeight | None]
    ) -> tuple[list[jax.Array | int], Any]:
        """Bind the served model to our copies, and to the numbers of the caller's arrays where
        those serve: the caller's are not to be kept alive here. Return leaves and structure.
        """
        arrays = jax.tree.structure(params)
        numbers = _leaves(jax.tree.unflatten(arrays, range(arrays.num_leaves)))
        chosen = [
            number if ours is None else ours for number, ours in zip(numbers, derived, strict=True)
        ]
        structure = jax.tree.structure(params, is_leaf=is_quantized)
        served = self.placement.served(params.config)
        return jax.tree.flatten(bind_any(served, jax.tree.unflatten(structure, chosen)))

    def report(self) -> dict[str, Any]:
        """Return the version, and what its copies and those of earlier versions cost."""
        return {
            "weight_version": self.version,
            "weight_bytes_moved": self.moved_bytes,
            "weight_move_s": self.moved_seconds,
        }

    def release(self) -> None:
        """Free the copies; the next update makes them again."""
        self._bound = None

    def check_dtypes(self, params: Params) -> None:
        """Refuse linear weights of several dtypes, and any change of dtype or form: compiled steps
        take neither.
        """
        leaves, specs = _leaves(params), _specs(params.config)
        dtypes = [self.dtype or jnp.dtype(leaf.dtype) for leaf in leaves]
        names = [str(dtype) for dtype in dtypes]
        structures = [
            leaf.structure if is_quantized(leaf) and self.quantization is None else None
            for leaf in leaves
        ]
        if (names, structures) == (self._dtypes, self._structures):
            return
        pairs = zip(names, specs, strict=True)
        facts = Facts(
            linear_dtypes={name for name, spec in pairs if spec.is_multiplied},
            dtypes=names,
            built_dtypes=self._dtypes,
            keeps_forms=self._structures in (None, structures),
        )
        check_combination(facts)
        self._dtypes, self._structures = names, structures

    def _weights(self, params: Params) -> list[Weight]:
        """Return each leaf with what it is to become. ConfigError for one that cannot be served."""
        model, devices = params.config, self.placement.axis_size
        served = self.placement.served(model)
        splits, leaves = jax.tree.leaves(self.placement.specs(served)), _leaves(params)
        orders = [self.interleaved] * len(leaves) if self._orders is None else self._orders
        weights = [
            Weight(
                spec=spec,
                source=leaf,
                served=ours,
                dtype=self.dtype,
                form=served_form(ours, served, self.quantization, devices, interleaved=order),
                split=split,
                interleaved=order,
                keeps_order=self._orders is None,
            )
            for leaf, spec, ours, split, order in zip(
                leaves, _specs(model), _specs(served), splits, orders, strict=True
            )
        ]
        for weight in weights:
            weight.check()
        return weights

    def _prepare(self, weights: list[Weight]) -> list[jax.Array | QuantizedWeight | None]:
        """Return our copy of every weight, None for one that is served as it is."""
        moving = [weight.source for weight in weights if not self._placer.is_placed(weight)]
        jax.block_until_ready(moving)  # what a trainer still computes is not time of ours
        began = time.perf_counter()
        placed = [self._placer(weight) for weight in weights]
        self._placer.check_finite(weights, placed)
        self._orders = [isinstance(x, QuantizedWeight) and x.form.interleaved for x in placed]
        derived = [
            None if ours is weight.source else ours
            for ours, weight in zip(placed, weights, strict=True)
        ]
        if moving:
            jax.block_until_ready(derived)
            seconds, moved = time.perf_counter() - began, sum(leaf.nbytes for leaf in moving)
            self.moved_seconds += seconds
            self.moved_bytes += moved
            log.info("made %.1f MB of weights ready to serve in %.2f s", moved / 1e6, seconds)
        return derived


def _leaves(params: Any) -> list[Any]:
    """Return the leaves of params; a weight in 8 or 4 bits is one."""
    return jax.tree.leaves(params, is_leaf=is_quantized)


@functools.lru_cache(maxsize=8)
def _specs(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters of a model in the order of its leaves; kept, since every weight version
    asks for them.
    """
    return tuple(jax.tree.leaves(nest(param_table(model))))


def _head_axis(params: Params, mesh: Mesh) -> MeshAxis | None:
    """Return the mesh axis, or axes, that the heads of the first layer are split over."""
    specs = params.config.layer_params()
    first, letter = next(((x, x.split) for x in specs if x.split is not None), (None, ""))
    if first is None:
        return None
    leaf: Any = params
    for key in first.at(first.name).split("."):
        leaf = leaf[key]
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != mesh.axis_names:
        return None
    axes = dict(enumerate(sharding.spec)).get(tokens_of(first.axes).index(letter))
    return axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes or None


def _check(tree: Any, shapes: Any, path: str) -> None:
    """ConfigError unless all names and shapes are the config's and all leaves are live arrays of
    floating-point numbers.
    """
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
        leaf, key = tree[name], f"{path}[{name!r}]"
        if isinstance(shape, dict):
            _check(leaf, shape, key)
            continue
        check_leaf(f"params{key}", leaf.scales if is_quantized(leaf) else leaf, "generate")
        if any(map(is_deleted, jax.tree.leaves(leaf))):  # values or zeros of a quantised weight
            raise ConfigError(f"params{key} has a deleted array: {DONATED}")
        if leaf.shape != shape:
            raise ConfigError(f"params{key} is of shape {leaf.shape}, the config says {shape}")
