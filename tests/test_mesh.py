"""Params sharded in the caller's ways over virtual devices give the tokens of one device."""

import logging
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jpaged
from jpaged import ConfigError, Params, SamplingParams
from jpaged.kept import sessions as kept_sessions
from jpaged.models.params import param_specs
from jpaged.runtime.weights import place_params
from tests.tiny import (
    compiles,
    config,
    dense_greedy,
    dense_logprobs,
    engine,
    make_params,
    make_prompts,
    tokens_of,
)

PROMPTS = make_prompts(3, 17, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
SETTINGS = engine(num_blocks=64)
ONE_LAYER = config(num_layers=1)
# Every parameter that a split must handle, an FFN that does not divide, and two groups of layers.
BIASED = config(
    family="llama",
    qk_norm=False,
    qkv_bias=True,
    out_bias=True,
    intermediate_size=45,
    sliding_windows=(None, 7),
)


def mesh(*shape: int, names: tuple[str, ...] = ("fsdp", "tp")) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def with_fsdp(
    spec: PartitionSpec, shape: tuple[int, ...], size: int, axis: str | None
) -> PartitionSpec:
    """The spec with `axis` on the largest dimension that is free and divides, as FSDP would have
    it.
    """
    names = [*spec, *[None] * (len(shape) - len(spec))]
    free = [i for i, name in enumerate(names) if name is None and shape[i] % size == 0]
    if axis is not None and free:
        names[max(free, key=lambda i: shape[i])] = axis
    return PartitionSpec(*names)


def shard(params: Params, grid: Mesh, tensor: str | None, fsdp: str | None) -> Params:
    specs = param_specs(params.config, tensor, grid.shape[tensor] if tensor else 1)
    flat = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    leaves, treedef = jax.tree.flatten(params)
    size = grid.shape[fsdp] if fsdp else 1
    placed = [
        jax.device_put(x, NamedSharding(grid, with_fsdp(spec, x.shape, size, fsdp)))
        for x, spec in zip(leaves, flat, strict=True)
    ]
    return treedef.unflatten(placed)


def expected(params: Params) -> list[list[int]]:
    return [dense_greedy(params, prompt, 8) for prompt in PROMPTS]


def check(
    params: Params, reference: Params, grid: Mesh | None, axis: str | None, **options: Any
) -> Any:
    """Tokens and logprobs equal the dense model's on one device, and the pool is split as said."""
    settings = options.pop("settings", SETTINGS)
    outputs = jpaged.generate(params, PROMPTS, GREEDY, mesh=grid, engine_config=settings, **options)
    assert tokens_of(outputs) == expected(reference)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        dense = dense_logprobs(reference, prompt + tokens)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(
            output.outputs[0].token_logprobs, dense[range(len(tokens)), tokens], atol=1e-4
        )
    runner = kept_sessions()[-1].runner
    assert runner._state is not None and len(runner._state.kv) == len(runner.pools)
    for pool in runner._state.kv:
        spec = pool["kv"].sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
        assert tuple(spec)[2:3] == (axis,) or (axis is None and not any(spec))
    return runner


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params(0, ONE_LAYER)


@pytest.fixture(autouse=True, scope="module")
def _only_our_engines() -> Any:
    yield
    jpaged.release(compiled=True)


def test_tp_and_fsdp(caplog: pytest.LogCaptureFixture) -> None:
    """(2, 2), KV heads over tp and a free dimension over fsdp; with the mesh left to the params."""
    params = make_params()
    sharded = shard(params, mesh(2, 2), "tp", "fsdp")
    used = {name for leaf in jax.tree.leaves(sharded) for name in leaf.sharding.spec if name}
    assert used == {"fsdp", "tp"}
    with caplog.at_level(logging.INFO, "jpaged"):
        runner = check(sharded, params, None, "tp")
    assert "MB of weights ready to serve" in caplog.text
    (pool,) = runner._state.kv
    assert pool["kv"].addressable_shards[0].data.shape[2] == 2, "one KV head a device"
    assert runner.placement.mesh == mesh(2, 2)
    scored: Any = jpaged.score(sharded, PROMPTS[1], engine_config=SETTINGS)
    np.testing.assert_allclose(
        scored[0], dense_logprobs(params, PROMPTS[1])[range(16), PROMPTS[1][1:]], atol=1e-4
    )


@pytest.mark.own_steps
def test_new_params_on_a_mesh_compile_nothing() -> None:
    grid = mesh(2, 2)
    first, other = (shard(make_params(seed), grid, "tp", "fsdp") for seed in (0, 1))
    jpaged.generate(first, PROMPTS, GREEDY, engine_config=SETTINGS)
    jpaged.generate(other, PROMPTS, GREEDY, engine_config=SETTINGS)
    with compiles() as names:
        outputs = [
            jpaged.generate(p, PROMPTS, GREEDY, engine_config=SETTINGS) for p in (first, other)
        ]
    assert names == []
    assert [tokens_of(out) for out in outputs] == [expected(make_params(seed)) for seed in (0, 1)]


def test_one_row_of_devices(params: Params) -> None:
    """(1, 2): the mesh given, the params on one device; then the params split already and served as
    they are.
    """
    runner = check(params, params, mesh(1, 2), "tp")
    whole_tiles = make_params(0, config(num_layers=1, vocab_size=256))
    split = shard(whole_tiles, mesh(1, 2), "tp", None)
    llm = jpaged.LLM(split, **vars(SETTINGS))
    bound = llm.session.served.weights._bound
    assert bound is not None and all(isinstance(x, int) for x in bound[0]), "nothing to copy"
    assert llm.stats()["weight_bytes_moved"] == 0
    assert runner.placement.axis_size == 2


def test_replicated_params(params: Params) -> None:
    """(2, 2) without any split: the usual name of the axis decides."""
    whole = jax.device_put(params, NamedSharding(mesh(2, 2), PartitionSpec()))
    check(whole, params, None, "tp")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_within_a_mesh_of_the_callers(params: Params, kind: Any) -> None:
    """Called where the caller's training runs: inside jax.set_mesh, with automatic or explicit
    axes.
    """
    grid = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind, kind))
    with jax.set_mesh(grid):
        check(shard(params, grid, "tp", "fsdp"), params, None, "tp")


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fsdp", "tp"), ("data", "model")])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("given", [True, False])
def test_more_meshes(
    params: Params, shape: tuple[int, int], names: tuple[str, str], given: bool
) -> None:
    grid = mesh(*shape, names=names)
    check(shard(params, grid, names[1], names[0]), params, grid if given else None, names[1])


def test_fsdp_alone(params: Params) -> None:
    """One axis, and not a tensor's: every device serves the whole model, the weights gathered."""
    grid = mesh(4, names=("fsdp",))
    check(shard(params, grid, None, "fsdp"), params, None, None)


def test_every_parameter_splits() -> None:
    """Biases too, and the pool of each group; the FFN stays whole; the axis is named by the
    caller.
    """
    params = make_params(0, BIASED)
    grid = mesh(2, 2, names=("x", "y"))
    settings = engine(num_blocks=64, tensor_axis="x")
    check(params, params, grid, "x", settings=settings)


def test_more_devices_than_kv_heads(params: Params) -> None:
    """Two KV heads on four devices: each is there twice, in weights and pool."""
    runner = check(params, params, mesh(1, 4), "tp")
    (pool,) = runner._state.kv
    assert {x.data.shape[2] for x in pool["kv"].addressable_shards} == {2}, "one KV head a device"


# Heads of Qwen3-0.6B and Qwen2.5-3B, in a layer of a small width.
SHAPES: dict[str, dict[str, Any]] = {
    "16 heads, 8 KV heads": {"num_layers": 1, "num_heads": 16, "num_kv_heads": 8},
    "16 heads, 2 KV heads": {
        "num_layers": 1,
        "num_heads": 16,
        "num_kv_heads": 2,
        "family": "qwen2",
        "qk_norm": False,
        "qkv_bias": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_real_models(shape: str, devices: int) -> None:
    params = make_params(0, config(**SHAPES[shape], vocab_size=1000))
    check(params, params, mesh(1, devices), "tp")


@pytest.mark.middle
def test_so_with_norms_over_all_heads() -> None:
    """OLMo 2's: their scales are repeated with the heads, and the mean over all is the same."""
    whole = {"pre_norms": False, "post_norms": True, "qk_norm": False, "qk_norm_whole": True}
    params = make_params(0, config(num_layers=1, family="olmo2", **whole))
    check(params, params, mesh(1, 4), "tp")


def test_tensor_parallel_size(params: Params) -> None:
    """It makes the mesh: of jax's devices, or of those that the params lie on."""
    llm = jpaged.LLM(params, **vars(engine(num_blocks=64, tensor_parallel_size=2)))
    where = llm.session.served.placement
    assert isinstance(where.mesh, Mesh)
    assert list(where.mesh.devices.flat) == jax.devices()[:2]
    assert (where.axis, where.axis_size) == ("tp", 2)
    assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == (
        dense_greedy(params, PROMPTS[0], 8)
    )
    one = place_params(params, engine(tensor_parallel_size=1), None)
    assert one.mesh is None and one.device == jax.devices()[0]
    turned = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("fsdp", "tp"))
    theirs = jax.device_put(params, NamedSharding(turned, PartitionSpec()))
    found = place_params(theirs, engine(tensor_parallel_size=4), None)
    assert isinstance(found.mesh, Mesh)
    assert list(found.mesh.devices.flat) == jax.devices()[:3:-1]
    assert place_params(theirs, engine(tensor_parallel_size=2), turned).axis == "tp"
    for size, given in ((4, turned), (2, mesh(1, 1)), (1, mesh(1, 2))):
        with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size}: .* pass one of"):
            place_params(theirs, engine(tensor_parallel_size=size), given)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=16: there are 8 devices"):
        place_params(params, engine(tensor_parallel_size=16), None)


def test_heads_that_do_not_divide(params: Params) -> None:
    message = r"mesh axis 'tp': num_heads=4 and num_kv_heads=2 do not split over 8 devices"
    with pytest.raises(ConfigError, match=message):
        jpaged.generate(params, PROMPTS, mesh=mesh(1, 8), engine_config=SETTINGS)
    whole = jax.device_put(params, NamedSharding(mesh(1, 8), PartitionSpec()))
    with pytest.raises(ConfigError, match=message):
        jpaged.LLM(whole, **vars(SETTINGS))
