"""Orbax checkpoints that a training loop of nnx and optax wrote, restored straight onto a mesh and
served.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

import jpaged
from jpaged import CheckpointError, ModelConfig, Params
from jpaged.checkpoint.tensors import flat
from jpaged.models.decoder import Decoder
from jpaged.models.params import param_specs
from jpaged.models.trees import to_tree
from tests import tiny
from tests.golden.configs import CONFIGS

pytestmark = pytest.mark.train
Trained = tuple[Decoder, nnx.Optimizer]
GREEDY = jpaged.SamplingParams(temperature=0, max_tokens=6)


MODELS = {
    "plain": tiny.CONFIG,
    "gemma3": ModelConfig.from_hf(CONFIGS["gemma3_g2_d32_linear"]),
    "mixture": ModelConfig.from_hf(CONFIGS["qwen3_moe_g2_d32_normed"]),
}


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest) -> Trained:
    """A model after two steps of a plain loop, and its optimizer."""
    config = MODELS[request.param]
    model, params = Decoder(config, rngs=nnx.Rngs(0)), tiny.make_params(0, config)
    layers = {int(i): x for i, x in params["layers"].items()}
    nnx.update(model, {**dict(params), "layers": layers})
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    tokens = jnp.asarray(tiny.make_prompts(16, 16)).reshape(2, 16)

    @nnx.jit
    def step(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> None:
        def loss(model: Decoder) -> jax.Array:
            hidden, _ = model(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model.logits(hidden), tokens[:, 1:]
            )
            return losses.mean()

        optimizer.update(model, nnx.grad(loss)(model))

    with jax.numpy_dtype_promotion("standard"):  # the mark comes too late for a module's fixture
        for _ in range(2):
            step(model, optimizer, tokens)
    return model, optimizer


def save(folder: Path, model: Decoder, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    return folder


def save_by_manager(folder: Path, model: Decoder, optimizer: nnx.Optimizer) -> Path:
    parts = {
        "params": ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(model, nnx.Param))),
        "opt_state": ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(optimizer))),
    }
    with ocp.CheckpointManager(folder) as manager:
        manager.save(2, args=ocp.args.Composite(**parts))
    (folder / "2" / "params" / "config.json").write_text(json.dumps(model.config.to_hf()))
    return folder / "2" / "params"


def train_state(model: Decoder, optimizer: nnx.Optimizer) -> dict[str, Any]:
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": jnp.int32(2)}


WRITERS: dict[str, Callable[..., Path]] = {
    "manager": save_by_manager,
    "nnx state": lambda folder, model, _: save(folder, model, nnx.state(model)),
    "train state": lambda folder, model, o: save(folder, model, train_state(model, o)),
    "linen": lambda folder, model, _: save(
        folder, model, {"params": {"params": to_tree(model)}, "step": jnp.int32(2)}
    ),
    "nnx both": lambda f, m, o: save(f, m, {"model": nnx.state(m), "optimizer": nnx.state(o)}),
}


def tensor_mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)


def assert_on_mesh(params: Params, mesh: Mesh) -> None:
    specs = flat(param_specs(params.config, "tp", 2))
    for name, x in flat(params).items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim), name


@pytest.mark.parametrize("writer", WRITERS)
def test_load_params_restores_it_onto_a_mesh(writer: str, trained: Trained, tmp_path: Path) -> None:
    folder, mesh = WRITERS[writer](tmp_path / "run", *trained), tensor_mesh()
    params = jpaged.load_params(folder, mesh=mesh)
    assert_on_mesh(params, mesh)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(to_tree(trained[0])), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_served_from_a_mesh(trained: Trained, tmp_path: Path) -> None:
    """By load_params, and by Orbax's own restore of the whole state, whose weights are then served
    where they lie.
    """
    mesh, config = tensor_mesh(), trained[0].config
    folder = save(tmp_path / "run", trained[0], train_state(*trained))
    loaded = jpaged.load_params(folder, mesh=mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config, "tp", 2))
    state = train_state(*trained)
    layers = {int(i): layer for i, layer in shardings["layers"].items()}
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    abstract["params"] = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract["params"],
        {**shardings, "layers": layers},
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, abstract)["params"]
    prompt = tiny.make_prompts(7)[0]
    wanted = tiny.dense_greedy(Params(to_tree(trained[0]), config), prompt, 6)
    for params in (loaded, restored):
        out = jpaged.generate(params, [prompt], GREEDY, config=config, engine_config=tiny.ENGINE)
        assert tiny.tokens_of(out) == [wanted]
    jpaged.release(compiled=True)


def test_a_state_without_the_weights_is_refused(trained: Trained, tmp_path: Path) -> None:
    folder = save(
        tmp_path / "run",
        trained[0],
        {"opt_state": nnx.to_pure_dict(nnx.state(trained[1])), "step": jnp.int32(2)},
    )
    count = len(jax.tree.leaves(to_tree(trained[0])))
    with pytest.raises(CheckpointError, match=rf"{count} missing \(embed\.weight"):
        jpaged.load_params(folder)
