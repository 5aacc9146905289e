"""What the caller's params may be, when they count as new, and that they are never kept alive."""

import dataclasses
import gc
import weakref
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jpaged
from jpaged import ConfigError, Params, SamplingParams
from jpaged.models.decoder import Decoder
from jpaged.models.forward import bind
from jpaged.models.quantized import quantized
from jpaged.runtime import weights as runtime_weights
from jpaged.runtime.mesh import Placement
from jpaged.runtime.weights import ServingWeights, as_params, place_params
from tests.tiny import CONFIG, ENGINE, config, engine, make_params, make_prompts

ONE_DEVICE = Placement(mesh=None, axis=None, device=jax.devices()[0])


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def same_objects(a: Any, b: Any) -> bool:
    return len(leaves(a)) == len(leaves(b)) and all(
        x is y for x, y in zip(leaves(a), leaves(b), strict=True)
    )


# Forms


def as_layer_list(params: Params) -> dict[str, Any]:
    return {**params, "layers": [params["layers"][str(i)] for i in range(CONFIG.num_layers)]}


FORMS = {
    "Params": lambda p: p,
    "nnx Module": lambda p: Decoder(CONFIG, tree=dict(p)),
    "nnx State": lambda p: nnx.state(Decoder(CONFIG, tree=dict(p))),
    "nnx Param State": lambda p: nnx.state(Decoder(CONFIG, tree=dict(p)), nnx.Param),
    "linen": lambda p: {"params": dict(p)},
    "dict": lambda p: dict(p),
    "dict with int layers": lambda p: {
        **p,
        "layers": {int(i): layer for i, layer in p["layers"].items()},
    },
    "list of layers": as_layer_list,
    "tuple of layers": lambda p: {**p, "layers": tuple(as_layer_list(p)["layers"])},
    "boxed leaves": lambda p: jax.tree.map(nnx.Param, dict(p)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_leaves(form: Any) -> None:
    params = make_params()
    found = as_params(form(params), CONFIG)
    assert isinstance(found, Params) and found.config == CONFIG
    assert jax.tree.structure(found) == jax.tree.structure(params) and same_objects(found, params)


def test_where_the_config_comes_from() -> None:
    params = make_params()
    assert as_params(params).config is CONFIG
    assert as_params(Decoder(CONFIG, tree=dict(params))).config == CONFIG, "our own module knows it"
    assert as_params(dict(params), CONFIG.to_hf()).config == CONFIG
    with pytest.raises(ConfigError, match=r"params of type dict need config= "):
        as_params(dict(params))
    with pytest.raises(ConfigError, match=r"params of type State need config="):
        as_params(nnx.state(Decoder(CONFIG, tree=dict(params))))
    with pytest.raises(ConfigError, match=r"params of type list: pass Params"):
        as_params(leaves(params), CONFIG)


def broken(change: Any) -> dict[str, Any]:
    tree = jax.tree.map(lambda x: x, dict(make_params()))
    change(tree)
    return tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm"), r"params lack 'norm'.*jpaged.params_from"),
        (lambda t: t["layers"].pop("1"), r"params\['layers'\] lack '1'"),
        (
            lambda t: t["layers"]["0"].clear(),
            r"params\['layers'\]\['0'\] lack 'attention' and 3 more",
        ),
        (
            lambda t: t["layers"]["1"]["mlp"].update(gate=1),
            r"params\['layers'\]\['1'\]\['mlp'\] hold 'gate'",
        ),
        (
            lambda t: t["layers"]["0"]["attention"].update(out=jnp.ones((4, 2))),
            r"params\['layers'\]\['0'\]\['attention'\]\['out'\] is of shape \(4, 2\), the "
            r"config says \(32, 2, 2, 16\)",
        ),
        (
            lambda t: t["embed"].update(weight=[1.0]),
            r"params\['embed'\]\['weight'\] is a dict, not an array",
        ),
        (
            lambda t: t["embed"].update(weight=None),
            r"params\['embed'\]\['weight'\] is a NoneType, not an array",
        ),
        (
            lambda t: t.update(norm=jnp.ones(32)),
            r"params\['norm'\]: expected a dict of \['scale'\], found",
        ),
        (
            lambda t: t["norm"].update(scale=jax.ShapeDtypeStruct((32,), jnp.float32)),
            r"params\['norm'\]\['scale'\] is a ShapeDtypeStruct, not an array",
        ),
        (
            lambda t: t["lm_head"].update(weight=jnp.ones((97, 32), jnp.int8)),
            r"params\['lm_head'\]\['weight'\] is of dtype int8: weights are floating point",
        ),
    ],
)
def test_errors_name_the_path(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_params(broken(change), CONFIG)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_tracers_are_refused(transform: Any) -> None:
    params = make_params()
    if transform is jax.vmap:
        params = jax.tree.map(lambda x: x[None], params)

    def reward(p: Params) -> Any:
        return float(jpaged.generate(p, [1, 2], engine_config=ENGINE)[0].outputs[0].token_ids[0])

    with pytest.raises(ConfigError, match=r"is a tracer: generate is host Python"):
        transform(reward)(params)


# Versions


def test_same_objects_are_the_same_version() -> None:
    params = make_params()
    weights = ServingWeights(ONE_DEVICE, None)
    assert weights.update(params) and weights.version == 1
    assert not weights.update(params)
    assert not weights.update(jax.tree.map(lambda x: x, params)), (
        "the leaves count, not the tree around them"
    )
    assert weights.version == 1
    assert same_objects(weights.modules(params), bind(params.config, params)), (
        "what fits is served as it is"
    )
    assert weights.update(jax.tree.map(jnp.copy, params)) and weights.version == 2
    assert weights.update(params), "and back: only the last version is known"


def test_one_new_leaf_is_a_new_version() -> None:
    params = make_params()
    weights = ServingWeights(ONE_DEVICE, None)
    weights.update(params)
    tree = jax.tree.map(lambda x: x, dict(params))
    tree["norm"]["scale"] = jnp.copy(tree["norm"]["scale"])
    assert weights.update(Params(tree, CONFIG))


def test_new_scales_of_a_quantised_weight_are_a_new_version() -> None:
    """Its values may be the old ones."""
    tree: Any = jax.tree.map(lambda x: x, dict(make_params()))
    mlp = tree["layers"]["0"]["mlp"]
    mlp["down"] = quantized(mlp["down"], "int8", 1)
    weights = ServingWeights(ONE_DEVICE, None)
    assert weights.update(Params(tree, CONFIG)) and not weights.update(Params(tree, CONFIG))
    mlp["down"] = dataclasses.replace(mlp["down"], scales=2 * mlp["down"].scales)
    assert weights.update(Params(tree, CONFIG)) and weights.version == 2


@pytest.mark.parametrize("kind", ["nnx Module", "nnx State", "boxed leaves", "linen"])
def test_variables_around_the_arrays_do_not_count(kind: str) -> None:
    params = make_params()
    weights = ServingWeights(ONE_DEVICE, None)
    weights.update(as_params(FORMS[kind](params), CONFIG))
    assert not weights.update(as_params(FORMS[kind](params), CONFIG))


def test_a_module_trained_in_place_is_new() -> None:
    model = Decoder(CONFIG, tree=dict(make_params()))
    weights = ServingWeights(ONE_DEVICE, None)
    weights.update(as_params(model))
    assert not weights.update(as_params(model))
    model.norm.scale[...] = 2 * model.norm.scale[...]
    assert weights.update(as_params(model))


def test_numpy_is_always_new() -> None:
    params = jax.tree.map(np.array, make_params())
    weights = ServingWeights(ONE_DEVICE, None)
    for version in (1, 2, 3):
        assert weights.update(params) and weights.version == version
    params["norm"]["scale"][:] = 5.0  # arrays that change in place are why
    weights.update(params)
    assert np.asarray(weights.modules(params).norm.scale).max() == 5.0


def test_dead_leaves_are_new() -> None:
    """An array at a dead array's address is another array."""
    weights = ServingWeights(ONE_DEVICE, None)
    params = make_params()
    weights.update(params)
    del params
    gc.collect()
    assert weights.update(make_params())


def test_donated_params_are_a_clear_error() -> None:
    params = make_params()
    step = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    fresh = step(params)
    for call in (jpaged.generate, jpaged.score):
        with pytest.raises(
            ConfigError,
            match=r"params\['embed'\]\['weight'\] is a deleted array: were the params donated",
        ):
            call(params, [[1, 2, 3]], engine_config=ENGINE)
    assert as_params(fresh).config == CONFIG


def test_a_quantised_weight_is_whole() -> None:
    tree: Any = jax.tree.map(lambda x: x, dict(make_params()))
    mlp = tree["layers"]["1"]["mlp"]
    mlp["down"] = quantized(mlp["down"], "int8", 1)
    assert as_params(tree, CONFIG)["layers"]["1"]["mlp"]["down"] is mlp["down"]
    mlp["down"].values.delete()
    with pytest.raises(ConfigError, match=r"\['down'\] has a deleted array: were the params don"):
        as_params(tree, CONFIG)


# The check of a tree


def test_a_tree_is_checked_once_for_leaves_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights are taken as they are, without another look at names and shapes; whatever
    differs in form is looked at.
    """
    looks = []
    check = runtime_weights._checked
    monkeypatch.setattr(runtime_weights, "_FITTING", OrderedDict())
    monkeypatch.setattr(runtime_weights, "_checked", lambda *args: looks.append(1) or check(*args))
    first, second = make_params(0), make_params(1)
    for params in (first, second, first):
        own = as_params(params, CONFIG)
        assert same_objects(own, params) and own is not params and own.source == params.source
    assert len(looks) == 1
    for _ in range(2):
        as_params(jax.tree.map(np.array, first))
    assert len(looks) == 2, "numpy arrays are another form"
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), first)
    as_params(half)
    as_params(dict(first), CONFIG)
    assert len(looks) == 4, "another dtype, and a tree that is no Params"

    ends = dataclasses.replace(CONFIG, eos_token_ids=(5,))
    assert as_params(first, ends).config.eos_token_ids == (5,), "a config of equal value counts"
    looks.clear()

    misshapen = as_params(first)
    misshapen["norm"]["scale"] = jnp.zeros(3)
    assert first["norm"]["scale"].shape != (3,), "the caller's dicts are not shared"
    with pytest.raises(ConfigError, match=r"\['scale'\] is of shape \(3,\)"):
        as_params(misshapen)
    wrong = jax.tree.map(lambda x: x.astype(jnp.int32), first)
    for _ in range(2):
        with pytest.raises(ConfigError, match="floating point"):
            as_params(wrong)
    with pytest.raises(ConfigError, match="tracer"):
        jax.jit(lambda params: as_params(params)["norm"]["scale"])(first)
    second["norm"]["scale"].delete()
    with pytest.raises(ConfigError, match=r"\['norm'\]\['scale'\].*deleted"):
        as_params(second)


# Casts


def test_a_cast_happens_once_a_version() -> None:
    params = make_params()
    weights = ServingWeights(ONE_DEVICE, "bfloat16")
    weights.update(params)
    served = weights.modules(params)
    assert {str(leaf.dtype) for leaf in leaves(served)} == {"bfloat16"}
    weights.update(params)
    assert same_objects(weights.modules(params), served)
    np.testing.assert_array_equal(served.norm.scale, params["norm"]["scale"].astype(jnp.bfloat16))


def test_a_cast_leaves_alone_what_has_the_dtype() -> None:
    tree = dict(jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params()))
    tree["norm"] = {"scale": tree["norm"]["scale"].astype(jnp.float32)}
    params = Params(tree, CONFIG)
    weights = ServingWeights(ONE_DEVICE, "bfloat16")
    weights.update(params)
    served = weights.modules(params)
    assert served.embed.weight is params["embed"]["weight"]
    assert served.norm.scale.dtype == jnp.bfloat16


def test_numpy_is_cast_on_the_host() -> None:
    params = jax.device_get(make_params())
    weights = ServingWeights(ONE_DEVICE, "bfloat16")
    weights.update(params)
    assert {str(leaf.dtype) for leaf in leaves(weights.modules(params))} == {"bfloat16"}


def cast_some(params: Params, pick: Any, dtype: Any) -> Params:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(dtype) if pick(jax.tree_util.keystr(path)) else x, params
    )


def test_dtypes_that_cannot_be_served() -> None:
    """Linear weights share one dtype; norms and biases may have another; none may change under
    compiled steps.
    """
    params = make_params(0, config(qkv_bias=True), jnp.bfloat16)
    weights = ServingWeights(ONE_DEVICE, None)
    mixed = cast_some(params, lambda name: "norm" in name or "bias" in name, jnp.float32)
    weights.update(mixed)
    with pytest.raises(ConfigError, match=r"linear weights in bfloat16 and float32: pass dtype="):
        weights.update(cast_some(params, lambda name: "down" in name, jnp.float32))
    with pytest.raises(
        ConfigError, match=r"params in bfloat16; this engine was built for bfloat16 and float32"
    ):
        weights.update(params)
    assert weights.version == 1 and not weights.update(mixed), "what was refused changed nothing"
    one = ServingWeights(ONE_DEVICE, "float16")
    one.update(mixed)
    assert one.update(params) and {str(leaf.dtype) for leaf in leaves(one.modules(params))} == {
        "float16"
    }


def test_sinks_are_no_linear_weight() -> None:
    """Which have two axes, and may be in f32 like norms and biases."""
    model = config(family="gpt_oss", qk_norm=False, attention_sinks=True)
    params = make_params(0, model, jnp.bfloat16)
    mixed = cast_some(params, lambda name: "sinks" in name, jnp.float32)
    assert mixed["layers"]["0"]["attention"]["sinks"].ndim == 2
    weights = ServingWeights(ONE_DEVICE, None)
    assert weights.update(mixed) and same_objects(weights.modules(mixed), bind(mixed.config, mixed))


def test_the_last_copies_go_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never two versions of the serving weights at once."""
    params, other = make_params(), make_params(1)
    weights = ServingWeights(ONE_DEVICE, "bfloat16")
    weights.update(params)
    alive = [weakref.ref(leaf) for leaf in leaves(weights.modules(params))]
    prepare = ServingWeights._prepare

    def checked(self: ServingWeights, *args: Any) -> Any:
        assert not any(ref() is not None for ref in alive)
        return prepare(self, *args)

    monkeypatch.setattr(ServingWeights, "_prepare", checked)
    assert weights.update(other)


# Lifetime


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_callers_arrays_are_not_kept_alive(dtype: str | None) -> None:
    params = make_params()
    settings = engine(dtype=dtype)
    sampling = SamplingParams(temperature=0, max_tokens=1)  # one step to compile
    first = jpaged.generate(params, make_prompts(6), sampling, engine_config=settings)
    alive = [weakref.ref(leaf) for leaf in leaves(params)]
    assert all(ref() is not None for ref in alive)
    del params
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    again = jpaged.generate(make_params(), make_prompts(6), sampling, engine_config=settings)
    assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
    assert again[0].weight_version == first[0].weight_version + 1


# Where to serve


def mesh(*shape: int, names: tuple[str, ...] = ("fsdp", "tp")) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def test_placement_follows_the_params() -> None:
    params = make_params()
    assert place_params(params, ENGINE, None) == ONE_DEVICE
    elsewhere = jax.device_put(params, jax.devices()[3])
    assert place_params(elsewhere, ENGINE, None).device == jax.devices()[3]
    assert place_params(jax.device_get(params), ENGINE, None).device == jax.devices()[0]
    grid = mesh(2, 2)
    on_grid = jax.device_put(params, NamedSharding(grid, PartitionSpec()))
    found = place_params(on_grid, ENGINE, None)
    assert (found.mesh, found.axis, found.axis_size) == (grid, "tp", 2)
    assert place_params(params, ENGINE, mesh(1, 1)).mesh is None, "one device needs no mesh"


def test_the_axis_is_the_one_that_kv_heads_use() -> None:
    grid = mesh(2, 2, names=("a", "b"))
    params = make_params()

    def shard(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(grid, spec))

    tree = jax.tree.map(lambda x: shard(x, PartitionSpec()), dict(params))
    assert place_params(Params(tree, CONFIG), ENGINE, None).axis is None, (
        "no usual name, no use of it: replicated"
    )
    attention = tree["layers"]["0"]["attention"]
    attention["qkv"] = shard(attention["qkv"], PartitionSpec("b"))
    assert place_params(Params(tree, CONFIG), ENGINE, None).axis == "b"
    named = engine(tensor_axis="a")
    assert place_params(Params(tree, CONFIG), named, None).axis == "a"
    none = engine(tensor_axis=None)
    assert place_params(Params(tree, CONFIG), none, None).axis is None
    with pytest.raises(
        ConfigError, match=r"tensor_axis='c': 'c' is not an axis of the mesh \('a', 'b'\)"
    ):
        place_params(params, engine(tensor_axis="c"), grid)
    with pytest.raises(
        ConfigError, match=r"mesh axis 'tp': num_heads=4 and num_kv_heads=2 do not split over 8"
    ):
        place_params(params, ENGINE, mesh(1, 8))
    row = mesh(1, 2)
    both = NamedSharding(row, PartitionSpec(("fsdp", "tp")))
    attention["qkv"] = jax.device_put(params["layers"]["0"]["attention"]["qkv"], both)
    found = place_params(Params(tree, CONFIG), ENGINE, row)
    assert (found.axis, found.axis_size) == (("fsdp", "tp"), 2), "two axes as if they were one"
