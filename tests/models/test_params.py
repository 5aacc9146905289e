"""Params where jax, optax and Orbax take a pytree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jpaged.models.config import ModelConfig
from jpaged.models.params import Params, param_shapes

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=32,
    qk_norm=True,
)


def make(seed: int = 0, source: Path | None = Path("/a"), config: ModelConfig = CONFIG) -> Params:
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    tree = jax.tree.map(
        lambda s: rng.standard_normal(s).astype(np.float32), param_shapes(config), is_leaf=is_shape
    )
    return Params(jax.device_put(tree), config, source)


def test_a_read_only_mapping() -> None:
    params = make()
    assert isinstance(params, Mapping)
    assert list(params) == ["embed", "layers", "lm_head", "norm"] and len(params) == 4
    assert params["norm"]["scale"].shape == (8,) and params.get("other") is None
    assert (params.config, params.source) == (CONFIG, Path("/a"))
    with pytest.raises(TypeError):
        params["norm"] = {}  # pyright: ignore[reportIndexIssue]
    with pytest.raises(AttributeError):
        params.config = CONFIG  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        params.other = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_equality_is_identity() -> None:
    params = make()
    assert params == params and params != make()
    assert len({params, make()}) == 2


def test_flattens_as_the_plain_dict_does() -> None:
    params = make()
    plain = {key: params[key] for key in reversed(list(params))}
    ours, theirs = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (params, plain))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert all(a is b for a, (_, b) in zip(jax.tree.leaves(params), ours, strict=True))


def test_treedef_knows_the_config_and_not_the_source() -> None:
    a, b = make(0, Path("/a")), make(1, Path("/b"))
    other_eos = make(config=ModelConfig(**{**vars(CONFIG), "eos_token_ids": (7,)}))
    for same in (b, make(2, None), other_eos):
        assert jax.tree.structure(a) == jax.tree.structure(same)
        assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(same))
    assert jax.tree.structure(a) != jax.tree.structure(
        make(config=ModelConfig(**{**vars(CONFIG), "rope_theta": 5.0}))
    )
    mean = jax.tree.map(lambda x, y: (x + y) / 2, a, b)
    np.testing.assert_allclose(mean["norm"]["scale"], (a["norm"]["scale"] + b["norm"]["scale"]) / 2)
    assert (mean.config, mean.source) == (CONFIG, Path("/a"))


@pytest.mark.parametrize("leaf", [None, object(), 3, "x", jax.ShapeDtypeStruct((2,), jnp.float32)])
def test_any_leaf(leaf: Any) -> None:
    params = jax.tree.map(lambda _: leaf, make())
    assert isinstance(params, Params) and params["norm"]["scale"] is leaf
    assert repr(params).startswith("Params(qwen3, ")
    leaves, treedef = jax.tree.flatten(params)
    assert isinstance(treedef.unflatten(leaves), Params)


def test_repr() -> None:
    params = make()
    count = sum(x.size for x in jax.tree.leaves(params))
    assert repr(params) == f"Params(qwen3, {count:,} parameters, float32)"
    mixed = Params(dict(params) | {"norm": {"scale": jnp.ones(8, jnp.bfloat16)}}, CONFIG)
    assert repr(mixed) == f"Params(qwen3, {count:,} parameters, bfloat16+float32)"
    assert repr(jax.eval_shape(lambda p: p, params)) == repr(params)


def test_jax_transformations() -> None:
    params = make()

    def loss(p: Params) -> jax.Array:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(p)) + p["norm"]["scale"][0]  # pyright: ignore[reportReturnType]

    grads = jax.jit(jax.grad(loss))(params)
    assert isinstance(grads, Params) and grads.config == CONFIG
    np.testing.assert_allclose(grads["embed"]["weight"], 2 * params["embed"]["weight"], rtol=1e-6)
    for result in (
        jax.eval_shape(lambda p: p, params),
        jax.device_get(params),
        jax.jit(lambda p: p)(params),
    ):
        assert isinstance(result, Params) and result.source == Path("/a")
    named = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    assert named["layers"]["1"]["attention"]["qkv"] == "['layers']['1']['attention']['qkv']"


def test_a_second_folder_does_not_trace_again() -> None:
    traces = []

    @jax.jit
    def step(p: Params) -> Params:
        traces.append(1)
        return jax.tree.map(lambda x: 2 * x, p)

    step(make(0, Path("/a")))
    step(make(1, Path("/b")))
    assert len(traces) == 1


@pytest.mark.train
def test_optax() -> None:
    params = make()
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(p: Params, state: Any) -> tuple[Params, Any]:
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, p), state, p)
        return optax.apply_updates(p, updates), state  # pyright: ignore[reportReturnType]

    after, state = step(params, jax.jit(optimizer.init)(params))
    after, state = step(after, state)
    assert isinstance(after, Params) and isinstance(optax.tree.get(state, "mu"), Params)
    jax.tree.map(np.testing.assert_array_less, jax.device_get(after), jax.device_get(params))


def test_orbax_round_trip(tmp_path: Path) -> None:
    params = make()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        for target in (params, abstract):
            back = checkpointer.restore(tmp_path / "params", target)
            assert isinstance(back, Params) and back.config == CONFIG
            jax.tree.map(np.testing.assert_array_equal, back, params)
