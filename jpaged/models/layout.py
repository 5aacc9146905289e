"""The canonical parameter tree: its names, its shapes and how a mesh axis splits it.

Linear weights keep Hugging Face's [out, in] order, so loading transposes nothing and bf16 decode on
CPU reads them along their rows. Query, key and value of one KV head lie together ([K, G+2, D, E]):
a split over KV heads is contiguous, and the fused projection already yields the pool's K, V pairs.
"""

from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig

TENSOR_AXES = ("tp", "tensor", "model")  # names that a mesh's tensor-parallel axis usually has


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """Nested dict of shapes, one tuple a parameter; layers are keyed "0", "1", ..."""
    c = config
    attention: dict[str, Any] = {
        "qkv": (c.num_kv_heads, c.group_size + 2, c.head_dim, c.hidden_size),
        "out": (c.hidden_size, c.num_kv_heads, c.group_size, c.head_dim),
    }
    if c.qkv_bias:
        attention["qkv_bias"] = (c.num_kv_heads, c.group_size + 2, c.head_dim)
    if c.out_bias:
        attention["out_bias"] = (c.hidden_size,)
    if c.qk_norm:
        attention |= {"q_norm": {"scale": (c.head_dim,)}, "k_norm": {"scale": (c.head_dim,)}}
    layer = {
        "input_norm": {"scale": (c.hidden_size,)},
        "attention": attention,
        "post_norm": {"scale": (c.hidden_size,)},
        "mlp": {
            "gate_up": (2, c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        },
    }
    tree: dict[str, Any] = {
        "embed": {"weight": (c.vocab_size, c.hidden_size)},
        "layers": {str(i): layer for i in range(c.num_layers)},
        "norm": {"scale": (c.hidden_size,)},
    }
    if not c.tie_word_embeddings:
        tree["lm_head"] = {"weight": (c.vocab_size, c.hidden_size)}
    return tree


def param_specs(config: ModelConfig, axis: str | None, size: int = 1) -> dict[str, Any]:
    """Nested dict of PartitionSpecs: KV heads, and the FFN where it divides, over `axis` of `size`
    devices.
    """
    if axis is not None and config.num_kv_heads % size:
        heads = config.num_kv_heads
        raise ConfigError(
            f"num_kv_heads={heads} does not split over {size} devices of mesh axis {axis!r}"
        )
    ffn = axis if config.intermediate_size % size == 0 else None
    split = {name: PartitionSpec(axis) for name in ("qkv", "qkv_bias")}
    split |= {"out": PartitionSpec(None, axis)} | {
        name: PartitionSpec(None, ffn) for name in ("gate_up", "down")
    }

    def walk(tree: dict[str, Any]) -> dict[str, Any]:
        return {
            k: walk(v) if isinstance(v, dict) else split.get(k, PartitionSpec())
            for k, v in tree.items()
        }

    return walk(param_shapes(config))


def choose_tensor_axis(mesh: Mesh) -> str:
    """The axis of a mesh to split KV heads over when nobody said: one of the usual names, else the
    last.
    """
    return next((name for name in TENSOR_AXES if name in mesh.axis_names), mesh.axis_names[-1])
