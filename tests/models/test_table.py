"""The canonical tree: its names and shapes are the module's own, and a mesh axis splits what it is
said to split.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder, to_tree
from jpaged.models.params import choose_tensor_axis, param_shapes, param_specs
from tests.tiny import CONFIG

VARIANTS = {
    "qwen3": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True),
    "qwen2": dataclasses.replace(CONFIG, family="qwen2", qk_norm=False, qkv_bias=True),
    "llama": dataclasses.replace(
        CONFIG, family="llama", qk_norm=False, qkv_bias=True, out_bias=True
    ),
    "mistral": dataclasses.replace(CONFIG, family="mistral", qk_norm=False, num_layers=11),
}


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
    expected = {"qkv", "out", "gate_up", "down"} | ({"qkv_bias"} if config.qkv_bias else set())
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


def test_kv_heads_that_do_not_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"num_kv_heads=2 does not split over 4 devices of mesh axis 'tp'"
    ):
        param_specs(CONFIG, "tp", 4)


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
