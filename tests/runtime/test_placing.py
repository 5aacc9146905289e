"""From a trainer's shards to those that are served: on the devices, by functions compiled once."""

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

import jpaged
from jpaged import Params
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import param_specs, param_table
from jpaged.models.quantized import partition, quantized
from jpaged.models.served import served_config
from jpaged.models.weight import Weight
from jpaged.runtime.mesh import Placement
from jpaged.runtime.placing import Placer
from jpaged.runtime.weights import ServingWeights
from tests.tiny import by_name, compiles, config, engine, make_params

DEVICES = np.array(jax.devices())
TRAINER = Mesh(DEVICES.reshape(4, 2), ("fsdp", "tp"))
MODEL = config(hidden_size=64, num_heads=8, num_kv_heads=4, qkv_bias=True)


def keeps_a_host_copy(leaf: jax.Array) -> bool:
    """Whether an array has been fetched whole (a private field of jax)."""
    assert hasattr(leaf, "_npy_value")
    return leaf._npy_value is not None  # pyright: ignore[reportAttributeAccessIssue]


def fsdp(x: Any, split: PartitionSpec) -> jax.Array:
    """As a trainer holds it: split by tp, and the largest free dimension by fsdp."""
    names = [*split, *[None] * (x.ndim - len(split))]
    free = [i for i, name in enumerate(names) if name is None and x.shape[i] % 4 == 0]
    if free:
        names[max(free, key=lambda i: x.shape[i])] = "fsdp"
    return jax.device_put(x, NamedSharding(TRAINER, PartitionSpec(*names)))


def trained(seed: int = 0) -> Params:
    leaves, treedef = jax.tree.flatten(make_params(seed, MODEL))
    splits = jax.tree.leaves(param_specs(MODEL, "tp", 2))
    return treedef.unflatten([fsdp(x, s) for x, s in zip(leaves, splits, strict=True)])


def place(mesh: Mesh, axis: Any) -> Placement:
    return Placement(mesh=mesh, axis=axis, device=mesh.devices.flat[0])


PLACES = {
    "the trainer's mesh": place(TRAINER, "tp"),
    "both axes as one": place(TRAINER, ("fsdp", "tp")),
    "another mesh of the same devices": place(Mesh(DEVICES.reshape(2, 4), ("data", "tp")), "tp"),
    "the same devices in another order": place(Mesh(DEVICES[::-1], ("tp",)), "tp"),
    "half of the devices": place(Mesh(DEVICES[4:], ("tp",)), "tp"),
    "one device": Placement(mesh=None, axis=None, device=DEVICES[5]),
}


@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
def test_no_leaf_passes_through_the_host(where: Placement) -> None:
    params = trained()
    expected = jax.device_get(make_params(0, MODEL))
    weights = ServingWeights(where, None)
    with jax.transfer_guard_device_to_host("disallow"):
        assert weights.update(params)
        jax.block_until_ready(weights.modules(params))
    assert not any(keeps_a_host_copy(leaf) for leaf in jax.tree.leaves(params))
    assert weights.moved_bytes > 0 and weights.moved_seconds > 0
    table = param_table(MODEL)
    served = param_table(served_config(MODEL, where.axis_size))
    for name, x in by_name(served_config(MODEL, where.axis_size), weights.modules(params)).items():
        change = Weight(spec=table[name], source=x, served=served[name]).change
        np.testing.assert_array_equal(x, change(flat_tree(expected)[name]), err_msg=name)
        assert x.sharding.device_set == devices_of(where)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
def test_no_quantised_weight_passes_through_the_host(where: Placement, form: str) -> None:
    """One that a trainer's mesh holds in 8 or 4 bits goes on in them, by collectives."""
    spec = ParamSpec("mlp.down", "E, F", "down", split="F").placed({"E": 64, "F": 256}, 0)
    plain = jax.random.normal(jax.random.key(0), spec.shape)
    made = quantized(plain, form, 1)
    specs = partition(made, PartitionSpec("fsdp", "tp"))
    held = jax.device_put(made, jax.tree.map(lambda s: NamedSharding(TRAINER, s), specs))
    assert held.scales.sharding.spec[0] == "fsdp", "so that it moves"
    split = spec.partition(where.axis, where.axis_size)
    placer, weight = Placer(where.sharding), Weight(spec=spec, source=held, split=split)
    with jax.transfer_guard_device_to_host("disallow"):
        placed = jax.block_until_ready(placer(weight))
    assert not any(map(keeps_a_host_copy, jax.tree.leaves(held)))
    assert placed.form == made.form and placed.sharding == where.sharding(split)
    np.testing.assert_array_equal(placed.whole(), made.whole())
    again = dataclasses.replace(weight, source=placed)
    assert placer.is_placed(again) and placer(again) is placed


def devices_of(where: Placement) -> set[Any]:
    return set(where.mesh.devices.flat) if isinstance(where.mesh, Mesh) else {where.device}


def test_the_control_a_put_keeps_copies() -> None:
    """What the test above looks for is there where jax moves the same leaves."""
    params = trained()
    target = NamedSharding(TRAINER, PartitionSpec("tp"))
    leaf = params["layers"]["0"]["attention"]["qkv"]
    jax.block_until_ready(jax.device_put(leaf, target))
    assert keeps_a_host_copy(leaf)
    if jax.__version_info__ < (0, 12):  # whose guard says nothing of a put's own transfers
        return
    leaf = params["layers"]["1"]["attention"]["qkv"]
    with (
        jax.transfer_guard_device_to_host("disallow"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed device-to-host transfer"),
    ):
        jax.device_put(leaf, target)


def test_the_next_version_compiles_nothing() -> None:
    weights = ServingWeights(PLACES["both axes as one"], "bfloat16")
    first, second = trained(0), trained(1)
    weights.update(first)
    moved = weights.moved_bytes
    with compiles() as names:
        weights.update(second)
    assert names == [] and weights.version == 2
    assert weights.moved_bytes == 2 * moved == 2 * sum(x.nbytes for x in jax.tree.leaves(first))


def test_the_last_copies_go_before_the_next_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an LLM, whose runner holds the serving tree too; and they are back where that fails."""
    first, second = trained(0), trained(1)
    llm = jpaged.LLM(first, **vars(engine(num_blocks=16)))
    assert llm.stats()["weight_bytes_moved"] > 0 and llm.stats()["weight_move_s"] > 0
    bound = llm.session.served.weights._bound
    assert bound is not None
    made = [weakref.ref(x) for x in bound[0] if not isinstance(x, int)]
    del bound
    prepare, seen = ServingWeights._prepare, []

    def fail(self: ServingWeights, *args: Any) -> Any:
        seen.append([ref() is None for ref in made])
        if len(seen) == 1:
            raise MemoryError("no room")
        return prepare(self, *args)

    monkeypatch.setattr(ServingWeights, "_prepare", fail)
    with pytest.raises(MemoryError, match="no room"):
        llm.update_params(second)
    assert made and all(seen[0]), "gone before the next were made"
    assert llm.weight_version == 1
    served = llm.session.runner.params
    assert served is not None
    np.testing.assert_array_equal(served.norm.scale, first["norm"]["scale"])
    llm.update_params(second)
    assert llm.weight_version == 2


def test_a_numpy_leaf_is_changed_on_the_host() -> None:
    tables = param_table(MODEL), param_table(served_config(MODEL, 4))
    spec, served = (table["embed.weight"] for table in tables)
    x = np.ones((MODEL.vocab_size, MODEL.hidden_size), np.float32)
    target = NamedSharding(Mesh(DEVICES[:4], ("tp",)), PartitionSpec("tp"))
    weight = Weight(spec=spec, source=x, served=served, dtype=jnp.bfloat16)
    out: Any = Placer(lambda _: target)(weight)
    assert out.shape == (512, 64) and out.dtype == jnp.bfloat16
    assert isinstance(out.sharding, Sharding) and out.sharding.is_equivalent_to(target, 2)
    assert float(out.astype(jnp.float32).sum()) == x.sum()


def flat_tree(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
