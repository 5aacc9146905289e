"""Latent attention is what its heads would compute if each made keys and values of the latents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.forward import IN_TRAINING, bind
from jpaged.models.kv_groups import dense_view, kv_groups
from jpaged.models.kv_view import Place
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.rope import QueryScaling, RopeConfig, Rotary, rotate, rotation
from jpaged.models.params import param_specs
from jpaged.models.rope_scaling import RopeScaling
from tests.tiny import CONFIG, make_params

SCALING = RopeScaling(kind="yarn", factor=8.0, original_max_position=16, attention_factor=1.2)
ROPE = RopeConfig(
    dim=8, interleaved=True, scaling=SCALING, query_scaling=QueryScaling(beta=0.3, length=8)
)
LATENT = LatentConfig(
    num_heads=3,
    latent_dim=20,
    rope_dim=8,
    content_dim=12,
    value_dim=10,
    query_latent_dim=14,
    rope=ROPE,
    mscale=0.8,
    bias=True,
)
PLAIN = LatentConfig(num_heads=5, latent_dim=16, rope_dim=4, content_dim=4, value_dim=6)


def model_of(mixer: LatentConfig) -> ModelConfig:
    layer = LayerConfig(mixer=mixer, ffn=MLPConfig(intermediate_size=24))
    return dataclasses.replace(CONFIG, family="deepseek_v3", layers=(layer,))


@jax.numpy_rank_promotion("allow")
def expanded(config: LatentConfig, weights: dict[str, Any], x: Any, length: int) -> Any:
    """Attention over keys and values that each head makes, f32 [T, E]: no product is moved."""

    def norm(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    at, latent, content = jnp.arange(len(x)), config.latent_dim, config.content_dim
    of_query = x
    if config.query_latent_dim is not None:
        of_query = x @ weights["q_a"].T + weights.get("q_a_bias", 0.0)
        of_query = norm(of_query, weights["q_norm"]["scale"])
    q = jnp.einsum("te,hde->thd", of_query, weights["q"])
    kv = x @ weights["kv"].T + weights.get("kv_bias", 0.0)
    made = jnp.einsum("tl,hdl->thd", norm(kv[:, :latent], weights["norm"]["scale"]), weights["up"])
    k, v = made[..., :content], made[..., content:]
    rotated_q, rotated_k = q[..., content:], kv[:, None, latent:]
    factor = jnp.ones(len(x))
    if config.rope is not None:
        angles = rotation(config.rope, at, length)
        rotated_q, rotated_k = (rotate(part, *angles) for part in (rotated_q, rotated_k))
        if config.rope.query_scaling is not None:
            factor = config.rope.query_scaling.factors(at)
    q = jnp.concatenate([q[..., :content], rotated_q], -1) * factor[:, None, None]
    k = jnp.concatenate([k, jnp.broadcast_to(rotated_k, (*k.shape[:2], config.rope_dim))], -1)
    scores = jnp.einsum("thd,shd->hts", q, k) * config.scale
    weight = jax.nn.softmax(jnp.where(at[None, :] <= at[:, None], scores, -jnp.inf), axis=-1)
    o = jnp.einsum("hts,shd->thd", weight, v)
    return jnp.einsum("thd,ehd->te", o, weights["out"]) + weights.get("out_bias", 0.0)


@pytest.mark.parametrize("config", [LATENT, PLAIN], ids=["everything", "plain"])
def test_absorbed_is_expanded(config: LatentConfig) -> None:
    """What the layer adds, and how that changes with each weight and input."""
    params = make_params(3, model_of(config))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 30, CONFIG.hidden_size)))
    x, wanted = x.astype(jnp.float32), np.random.default_rng(1).standard_normal((30, 32))
    length = 64
    tree = dict(params)

    def absorbed(weights: dict[str, Any], x: Any) -> Any:
        layers = {"0": tree["layers"]["0"] | {"latent": weights}}
        layer = bind(params.config, tree | {"layers": layers}).layers[0]
        positions = jnp.arange(30)[None]
        rotary = None if config.rope is None else Rotary.at(config.rope, positions, length)
        assert layer.mixer is not None
        view = dense_view(params.config, x)
        y, _ = layer.mixer(x, IN_TRAINING, rotary, view, (Place(0, 0),))
        return y[0]

    weights = tree["layers"]["0"]["latent"]
    ours = jax.jit(absorbed)(weights, x)
    theirs = expanded(config, weights, x[0], length)
    np.testing.assert_allclose(ours, theirs, atol=3e-6 * float(jnp.abs(theirs).max()), rtol=1e-5)

    def loss(y: Any) -> Any:
        return jnp.sum(y * wanted)

    ways = (absorbed, lambda w, x: expanded(config, w, x[0], length))
    gradients = [jax.grad(lambda w, x, f=f: loss(f(w, x)), (0, 1)) for f in ways]
    found, exact = (jax.jit(gradient)(weights, x) for gradient in gradients)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert float(jnp.abs(b).max()) > 0
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()), rtol=1e-4)


def test_the_scale_of_scores() -> None:
    """The root of a key's width, times YaRN's factor twice: once for queries and once for keys."""
    assert PLAIN.scale == 8**-0.5
    factor = 0.1 * 0.8 * np.log(8.0) + 1
    np.testing.assert_allclose(LATENT.scale, 20**-0.5 * factor**2)


def test_heads_are_split_and_latents_are_not() -> None:
    model = model_of(dataclasses.replace(LATENT, num_heads=4))
    specs = param_specs(model, "tp", 2)["layers"]["0"]["latent"]
    split = {name for name in ("q", "up") if specs[name] == PartitionSpec("tp")}
    assert split == {"q", "up"} and specs["out"] == PartitionSpec(None, "tp")
    assert all(specs[name] == PartitionSpec() for name in ("q_a", "kv", "kv_bias", "out_bias"))
    (group,) = kv_groups(model)
    assert [field.split for field in group.record.fields] == [None, None]
    assert (group.num_kv_heads, group.head_dim, group.value_dim) == (1, 28, 20)
    assert (group.num_heads, group.vectors, group.window) == (4, (20, 8), None)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="num_heads=3"):
        LATENT.served(2)
    assert dataclasses.replace(LATENT, num_heads=6).served(3).share(3).num_heads == 2


def test_what_cannot_be() -> None:
    for field, value in {"latent_dim": 0, "rope_dim": 1, "mscale": -1.0}.items():
        changes: dict[str, Any] = {field: value, "rope": None}
        with pytest.raises(ConfigError):
            dataclasses.replace(LATENT, **changes)
    with pytest.raises(ConfigError, match="rope of 8 dimensions"):
        dataclasses.replace(LATENT, rope_dim=16)
