"""LiveWeights follows the weights of an nnx module of tunix, in jpaged's form."""

import contextlib
import weakref
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.checkpoint.lora_maps import lora_from
from jpaged.checkpoint.name_maps import NameMap, find_leaves, params_from
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.lora import Adapter
from jpaged.models.params import Params


class _Made[T]:
    """A value that was made from arrays, valid as long as the arrays are the same objects."""

    def __init__(self) -> None:
        self.value: T | None = None
        self._made_from: list[weakref.ref[jax.Array]] = []

    def is_of(self, arrays: list[jax.Array]) -> bool:
        refs = self._made_from
        same = len(refs) == len(arrays) and all(
            ref() is x for ref, x in zip(refs, arrays, strict=True)
        )
        return self.value is not None and same

    def keep(self, value: T, arrays: list[jax.Array]) -> T:
        self.value, self._made_from = value, [weakref.ref(x) for x in arrays]
        return value


class LiveWeights:
    """The weights of an nnx module in jpaged's form. `module` is the actor itself if it lies on the
    mesh that serves; otherwise a copy on that mesh, so that tunix sees that it must synchronise.
    """

    def __init__(
        self,
        actor: nnx.Module,
        mesh: Mesh | None,
        family: str | NameMap,
        config: ModelConfig,
        lora_scale: float | None,
        merge_lora: bool,
    ):
        self.module = actor
        self._mesh, self._family, self._config, self._lora_scale = mesh, family, config, lora_scale
        self._merge_lora = merge_lora
        self._is_own = mesh is not None and not all(_lies_on(x, mesh) for x in self._arrays())
        if self._is_own:
            graph, state = nnx.split(actor)
            self.module = nnx.merge(graph, _placed(state, mesh))
        self._params, self._lora = _Made[Params](), _Made[Adapter]()

    def update(self, params: nnx.State) -> None:
        """Take new weights. Raises ConfigError if they hold a part that the module lacks."""
        known = {path for path, _ in nnx.to_flat_state(nnx.state(self.module))}
        if extra := [path for path, _ in nnx.to_flat_state(params) if path not in known]:
            name = ".".join(map(str, extra[0]))
            raise ConfigError(f"update_params: the new weights hold {name}, which the model lacks")
        nnx.update(self.module, params)

    def current(self) -> tuple[Params, Adapter | None]:
        """Return the weights, and the LoRA parts if there are any. Each is made again when one of
        its arrays is a new object.
        """
        if self._is_own:
            nnx.update(self.module, _placed(nnx.state(self.module, nnx.Param), self._mesh))
        base: dict[str, Any] = dict(find_leaves(self.module))
        lora = {path: x for path, x in base.items() if path.endswith(("_lora_a", "_lora_b"))}
        if lora and self._lora_scale is None:
            raise ConfigError(f"the actor holds {min(lora)}: pass lora_scale= (alpha / rank)")
        if self._merge_lora:
            lora = {}
        base = {path: x for path, x in base.items() if path not in lora}
        settings: Any = {"config": self._config}
        if not self._params.is_of(arrays := list(base.values())):
            self._params.value = None  # free the last version's copies first
            made = params_from(base, self._family, **settings, lora_scale=self._lora_scale)
            self._params.keep(made, arrays)
        params = self._params.value
        assert params is not None
        if lora and not self._lora.is_of(arrays := list(lora.values())):
            assert self._lora_scale is not None
            made = lora_from(lora, self._family, **settings, scale=self._lora_scale)
            self._lora.keep(made, arrays)
        return params, self._lora.value if lora else None

    def _arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(nnx.state(self.module, nnx.Param))


def _lies_on(x: jax.Array, mesh: Mesh) -> bool:
    if isinstance(x.sharding, NamedSharding):
        return x.sharding.mesh == mesh
    return x.sharding.device_set == set(mesh.devices.flat)


def _placed(state: Any, mesh: Mesh | None) -> Any:
    """Return a state with its arrays on a mesh, split as they are now if that mesh has the axes,
    else replicated.
    """
    assert mesh is not None

    def place(x: jax.Array) -> jax.Array:
        if not isinstance(x, jax.Array) or _lies_on(x, mesh):
            return x
        sharding = NamedSharding(mesh, PartitionSpec())
        if isinstance(x.sharding, NamedSharding) and x.sharding.mesh.axis_names == mesh.axis_names:
            split = NamedSharding(mesh, x.sharding.spec)
            with contextlib.suppress(ValueError):  # its axes do not divide the array
                split.shard_shape(x.shape)
                sharding = split
        return jax.device_put(x, sharding)

    return jax.tree.map(place, state)
