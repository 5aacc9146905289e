"""The table of parameters: its names and shapes are the module's own, a mesh axis splits what it is
said to split, and one line of it is all that a parameter takes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.checkpoint import params_from
from jpaged.checkpoint.hf import stored_names
from jpaged.checkpoint.name_maps import TUNIX_QWEN3
from jpaged.checkpoint.tensors import flat
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.param_spec import ParamSpec, Part
from jpaged.models.params import (
    choose_tensor_axis,
    param_shapes,
    param_specs,
    random_params,
)
from jpaged.models.trees import to_tree
from jpaged.runtime.footprint import bound
from tests.checkpoint.test_name_maps import hf_tensors, tunix_tree
from tests.tiny import CONFIG, engine

VARIANTS = {
    "qwen3": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True),
    "qwen2": dataclasses.replace(CONFIG, family="qwen2", qk_norm=False, qkv_bias=True),
    "llama": dataclasses.replace(
        CONFIG, family="llama", qk_norm=False, qkv_bias=True, out_bias=True
    ),
    "mistral": dataclasses.replace(CONFIG, family="mistral", qk_norm=False, num_layers=11),
    "gemma3": dataclasses.replace(
        CONFIG, family="gemma3_text", post_norms=True, norm_offset=True, mlp_bias=True
    ),
    "mixture": dataclasses.replace(
        CONFIG,
        family="qwen2_moe",
        num_experts=3,
        experts_per_token=2,
        expert_size=40,
        shared_expert_size=26,
        dense_layers=(1,),
    ),
    "gpt_oss": dataclasses.replace(
        CONFIG,
        family="gpt_oss",
        qk_norm=False,
        num_experts=3,
        experts_per_token=2,
        expert_size=40,
        attention_sinks=True,
        expert_bias=True,
    ),
    "olmo2": dataclasses.replace(
        CONFIG, family="olmo2", qk_norm=False, qk_norm_whole=True, pre_norms=False, post_norms=True
    ),
}
DELTA = DeltaConfig(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=16, conv_width=3)
VARIANTS["hybrid"] = dataclasses.replace(
    CONFIG,
    family="qwen3_5_text",
    layers=(dataclasses.replace(CONFIG.layers[0], mixer=DELTA), *CONFIG.layers[1:]),
)
for rank in (None, 5):
    KDA = KimiDeltaConfig(
        num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=16, gate_rank=rank
    )
    layers = (dataclasses.replace(CONFIG.layers[0], mixer=KDA), *CONFIG.layers[1:])
    VARIANTS[f"kda_{rank}"] = dataclasses.replace(CONFIG, family="kimi_linear", layers=layers)


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_shapes_are_the_modules_own(config: ModelConfig) -> None:
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert jax.tree.map(lambda leaf: leaf.shape, to_tree(model)) == param_shapes(config)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("axis", [None, "tp"])
def test_specs_have_the_trees_own_structure(config: ModelConfig, axis: str | None) -> None:
    specs = param_specs(config, axis, 2)
    shapes = jax.tree.leaves_with_path(param_shapes(config), is_leaf=is_shape)
    found = jax.tree.leaves_with_path(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    assert [path for path, _ in shapes] == [path for path, _ in found]
    split = set()
    for (path, shape), (_, spec) in zip(shapes, found, strict=True):
        assert len(spec) <= len(shape)
        for size, name in zip(shape, spec, strict=False):
            if name is not None:
                assert name == axis and size % 2 == 0
                split.add(path[-1].key)  # pyright: ignore[reportAttributeAccessIssue]
    expected = {"qkv", "out", "gate_up", "down", "weight"}
    if config.layers[0].mixer == DELTA:
        expected |= {"qkvz", "ba", "conv", "log_decay", "dt_bias"}
    elif isinstance(config.layers[0].mixer, KimiDeltaConfig):
        expected |= {"strength", "conv", "log_decay", "dt_bias"}
        has_rank = config.layers[0].mixer.gate_rank is not None
        expected |= {"qkv", "decay_up", "gate_up"} if has_rank else {"qkvz", "decay"}
    else:
        expected |= {"qkv_bias"} if config.switches.qkv_bias else set()
        expected |= {"gate_up_bias"} if config.switches.mlp_bias else set()
        expected |= {"scale"} if config.switches.qk_norm_whole else set()
        expected |= {"sinks"} if config.switches.attention_sinks else set()
        expected |= {"gate_up_bias"} if config.switches.expert_bias else set()
    assert split == (set() if axis is None else expected)


def test_a_share_holds_whole_kv_heads() -> None:
    """Device i's part of the fused projection is its KV heads with their own query heads, in
    order.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    spec = param_specs(CONFIG, "tp", 2)["layers"]["0"]["attention"]["qkv"]
    shape = param_shapes(CONFIG)["layers"]["0"]["attention"]["qkv"]
    parts = NamedSharding(mesh, spec).devices_indices_map(shape)
    assert [parts[d][0] for d in mesh.devices] == [slice(0, 1), slice(1, 2)]
    assert all(index[1:] == (slice(None),) * 3 for index in parts.values())


def test_heads_and_vocabularies_that_do_not_divide_are_kept_by_the_embedding() -> None:
    config = dataclasses.replace(CONFIG, vocab_size=97, qkv_bias=True)
    specs = param_specs(config, ("x", "tp"), 4)
    attention = specs["layers"]["0"]["attention"]
    assert attention["qkv"] == PartitionSpec(None, None, None, ("x", "tp"))
    assert attention["out"] == PartitionSpec(("x", "tp"))
    assert attention["qkv_bias"] == PartitionSpec(None), "it has no such axis"
    assert specs["embed"]["weight"] == PartitionSpec(None, ("x", "tp"))


def test_an_ffn_that_does_not_divide_stays_whole() -> None:
    specs = param_specs(dataclasses.replace(CONFIG, intermediate_size=45), "tp", 2)["layers"]["0"]
    assert specs["mlp"]["gate_up"] == PartitionSpec(None, None) == specs["mlp"]["down"]
    assert specs["attention"]["qkv"] == PartitionSpec("tp")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [(("fsdp", "tp"), "tp"), (("model", "data"), "model"), (("x", "y"), "y"), (("a",), "a")],
)
def test_choose_tensor_axis(names: tuple[str, ...], chosen: str) -> None:
    assert (
        choose_tensor_axis(Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(names)), names))
        == chosen
    )


def test_random_params() -> None:
    """What the table says of each: norms of one, no bias, matrices of the deviation that it has."""
    config = VARIANTS["llama"]
    params = random_params(config, seed=3, dtype=jnp.bfloat16)
    assert params.config == config
    assert jax.tree.map(lambda leaf: leaf.shape, dict(params)) == param_shapes(config)
    leaves = {name: np.asarray(leaf, np.float32) for name, leaf in flat(params).items()}
    residual = 0.02 * (2 * config.num_layers) ** -0.5
    for name, x in leaves.items():
        if name.endswith(("scale", "bias")):
            assert (x == float("norm" in name)).all(), name
        else:
            deviation = residual if name.endswith(("out", "down")) else 0.02
            assert 0.9 < x.std() / deviation < 1.1, name
    again, other = (flat(random_params(config, seed, jnp.bfloat16)) for seed in (3, 4))
    assert all((np.asarray(again[name], np.float32) == x).all() for name, x in leaves.items())
    assert (np.asarray(other["embed.weight"], np.float32) != leaves["embed.weight"]).any()


def test_adding_a_parameter_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more, one behind a switch, one stored in parts: every view has them."""
    gain = ParamSpec("gain", "K G D", "gain", "ones", "K")
    fused = ParamSpec("ab", "F 2, E", (Part("a", "F 1, E", "a"), Part("b", "F 1, E", "b")))
    before, settings = flat(param_shapes(CONFIG)), engine().resolve(CONFIG)
    needed = bound(CONFIG, settings, jnp.float16).total
    theirs = tunix_tree(hf_tensors(), CONFIG)
    of_attention, of_mlp = AttentionConfig.params, MLPConfig.params
    monkeypatch.setattr(
        AttentionConfig, "params", lambda c: (*of_attention(c), *[gain][: c.qk_norm is not None])
    )
    monkeypatch.setattr(MLPConfig, "params", lambda c: (*of_mlp(c), fused))
    shapes, specs = param_shapes(CONFIG), param_specs(CONFIG, "tp", 2)
    more = {"gain": (2, 2, 16), "ab": (48, 2, 32)}
    assert flat(shapes) == before | {f"layers.{i}.{n}": s for i in "01" for n, s in more.items()}
    assert specs["layers"]["1"]["gain"] == PartitionSpec("tp")
    assert specs["layers"]["1"]["ab"] == PartitionSpec()
    assert "gain" not in param_shapes(VARIANTS["mistral"])["layers"]["0"], "its switch is off"
    stored, layer = stored_names(CONFIG), "model.layers.1."
    assert [part[:2] for part in stored["layers.1.gain"]] == [(f"{layer}gain", (64,))]
    assert [part[:2] for part in stored["layers.1.ab"]] == [
        (f"{layer}a", (48, 32)),
        (f"{layer}b", (48, 32)),
    ]
    # float16 weights are also held in f32.
    gained = bound(CONFIG, settings, jnp.float16).total - needed
    assert gained == 4 * 2 * (64 + 48 * 2 * 32)
    params = random_params(CONFIG)
    assert (np.asarray(params["layers"]["0"]["gain"]) == 1).all()
    assert 0.01 < np.asarray(params["layers"]["0"]["ab"]).std() < 0.03
    a, b = np.arange(2 * 48 * 32.0).reshape(2, 48, 32), np.ones((2, 32, 48))
    theirs |= {"a": a, "b": b, "gain": np.arange(2 * 64.0).reshape(2, 64)}
    names = dict(TUNIX_QWEN3) | {
        "layers.{i}.gain": ("gain", "L (K G D)"),
        "layers.{i}.a": ("a", "L F E"),
        "layers.{i}.b": ("b", "L E F"),
    }
    found = params_from(theirs, names, config=CONFIG)["layers"]["1"]
    np.testing.assert_array_equal(found["ab"], np.stack([a[1], b[1].T], 1))
    np.testing.assert_array_equal(found["gain"].ravel(), np.arange(64, 128))
