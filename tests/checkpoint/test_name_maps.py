"""params_from: trees in the layouts of tunix and MaxText, made from Hugging Face tensors as those
projects do it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jpaged
from jpaged import ConfigError, ModelConfig, Params
from jpaged.checkpoint.name_maps import PARTS, TUNIX_QWEN3, maxtext_qwen3
from tests import tiny
from tests.golden.weights import noise, state_dict

Tree = dict[str, Any]
UNTIED = tiny.CONFIG
TIED = tiny.config(tie_word_embeddings=True)
BIASED = tiny.config(qkv_bias=True, out_bias=False)


def hf_tensors(config: ModelConfig = UNTIED) -> dict[str, np.ndarray]:
    return state_dict("foreign", config.to_hf())


def expected(tensors: dict[str, np.ndarray], config: ModelConfig) -> Params:
    """Our tree of Hugging Face tensors, written out."""
    k, g, d, e = config.num_kv_heads, config.group_size, config.head_dim, config.hidden_size

    def layer(i: int) -> Tree:
        at = f"model.layers.{i}."
        q, key, v, o = (tensors[f"{at}self_attn.{x}_proj.weight"] for x in "qkvo")
        attention: Tree = {
            "qkv": np.concatenate(
                [q.reshape(k, g, d, e), key.reshape(k, 1, d, e), v.reshape(k, 1, d, e)], 1
            ),
            "out": o.reshape(e, k, g, d),
            "q_norm": {"scale": tensors[f"{at}self_attn.q_norm.weight"]},
            "k_norm": {"scale": tensors[f"{at}self_attn.k_norm.weight"]},
        }
        if config.switches.qkv_bias:
            biases = [tensors[f"{at}self_attn.{x}_proj.bias"].reshape(k, -1, d) for x in "qkv"]
            attention["qkv_bias"] = np.concatenate(biases, 1)
        gate, up = (tensors[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        return {
            "input_norm": {"scale": tensors[f"{at}input_layernorm.weight"]},
            "attention": attention,
            "post_norm": {"scale": tensors[f"{at}post_attention_layernorm.weight"]},
            "mlp": {"gate_up": np.stack([gate, up]), "down": tensors[f"{at}mlp.down_proj.weight"]},
        }

    tree: Tree = {
        "embed": {"weight": tensors["model.embed_tokens.weight"]},
        "layers": {str(i): layer(i) for i in range(config.num_layers)},
        "norm": {"scale": tensors["model.norm.weight"]},
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = {"weight": tensors["lm_head.weight"]}
    return Params(tree, config)


def tunix_tree(tensors: dict[str, np.ndarray], config: ModelConfig) -> Tree:
    """As tunix's safetensors loader makes it: transposed, then reshaped to heads; layers keyed by
    integers.
    """
    h, k, d, e = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size

    def layer(i: int) -> Tree:
        at = f"model.layers.{i}."
        shapes = {"q": (e, h, d), "k": (e, k, d), "v": (e, k, d), "o": (h, d, e)}
        attn: Tree = {
            f"{x}_proj": {"w": tensors[f"{at}self_attn.{x}_proj.weight"].T.reshape(shapes[x])}
            for x in "qkvo"
        }
        attn |= {f"{x}_norm": {"w": tensors[f"{at}self_attn.{x}_norm.weight"]} for x in "qk"}
        norms = {
            f"{x}_layernorm": {"w": tensors[f"{at}{x}_layernorm.weight"]}
            for x in ("input", "post_attention")
        }
        mlp = {
            f"{x}_proj": {"kernel": tensors[f"{at}mlp.{x}_proj.weight"].T}
            for x in ("gate", "up", "down")
        }
        return {"attn": attn, "mlp": mlp, **norms}

    tree: Tree = {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "layers": {i: layer(i) for i in range(config.num_layers)},
        "final_norm": {"w": tensors["model.norm.weight"]},
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = {"w": tensors["lm_head.weight"].T}
    return jax.tree.map(jnp.asarray, tree)


def maxtext_tree(
    tensors: dict[str, np.ndarray],
    config: ModelConfig,
    *,
    scanned: bool,
    scan_axis: int = 1,
    padding: int = 0,
) -> Tree:
    """As MaxText's conversion makes it: `weight.T.reshape(shape)`, stacked on scan_axis, the
    vocabulary padded.
    """
    h, k, d, e = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size

    def layer(i: int) -> Tree:
        at = f"model.layers.{i}."
        shapes = {"query": (e, h, d), "key": (e, k, d), "value": (e, k, d), "out": (h, d, e)}
        names = dict(zip(shapes, "qkvo", strict=True))
        attention: Tree = {
            name: {"kernel": tensors[f"{at}self_attn.{x}_proj.weight"].T.reshape(shapes[name])}
            for name, x in names.items()
        }
        if config.switches.qkv_bias:
            for name in ("query", "key", "value"):
                attention[name]["bias"] = tensors[f"{at}self_attn.{names[name]}_proj.bias"].reshape(
                    -1, d
                )
        attention["query_norm"] = {"scale": tensors[f"{at}self_attn.q_norm.weight"]}
        attention["key_norm"] = {"scale": tensors[f"{at}self_attn.k_norm.weight"]}
        mlp = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
        return {
            "pre_self_attention_layer_norm": {"scale": tensors[f"{at}input_layernorm.weight"]},
            "self_attention": attention,
            "post_self_attention_layer_norm": {
                "scale": tensors[f"{at}post_attention_layernorm.weight"]
            },
            "mlp": {
                name: {"kernel": tensors[f"{at}mlp.{x}_proj.weight"].T} for name, x in mlp.items()
            },
        }

    layers = [layer(i) for i in range(config.num_layers)]
    decoder: Tree = {"decoder_norm": {"scale": tensors["model.norm.weight"]}}
    if scanned:
        decoder["layers"] = jax.tree.map(lambda *x: np.stack(x, scan_axis), *layers)
    else:
        decoder |= {f"layers_{i}": tree for i, tree in enumerate(layers)}
    rows = ((0, padding), (0, 0))
    if not config.tie_word_embeddings:
        decoder["logits_dense"] = {
            "kernel": np.pad(tensors["lm_head.weight"], rows, constant_values=7.0).T
        }
    embedding = np.pad(tensors["model.embed_tokens.weight"], rows, constant_values=7.0)
    tree = {"params": {"token_embedder": {"embedding": embedding}, "decoder": decoder}}
    return jax.tree.map(jnp.asarray, tree)


def assert_equal(params: Params, other: Params) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(other)
    for (path, x), y in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
def test_tunix(config: ModelConfig):
    tensors = hf_tensors(config)
    params = jpaged.params_from(tunix_tree(tensors, config), "tunix_qwen3", config=config)
    assert_equal(params, expected(tensors, config))


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("config", [UNTIED, TIED, BIASED], ids=["untied", "tied", "biased"])
def test_maxtext(config: ModelConfig, scanned: bool):
    tensors = hf_tensors(UNTIED if config is UNTIED else config)
    if (
        config.switches.qkv_bias
    ):  # Hugging Face's attention_bias has an output bias too, which MaxText's Qwen3 has not
        tensors = hf_tensors(tiny.config(qkv_bias=True, out_bias=True))
    tree = maxtext_tree(tensors, config, scanned=scanned, padding=5)
    params = jpaged.params_from(tree, "maxtext_qwen3", config=config)
    assert_equal(params, expected(tensors, config))


def test_maxtext_scanned_over_the_first_axis():
    tensors = hf_tensors()
    tree = maxtext_tree(tensors, UNTIED, scanned=True, scan_axis=0)
    params = jpaged.params_from(tree, maxtext_qwen3(scan_axis=0), config=UNTIED)
    assert_equal(params, expected(tensors, UNTIED))
    with pytest.raises(
        ConfigError, match=r"layer_norm\.scale is of shape \(2, 32\); .*\(E = 32, L = 2\)"
    ):
        jpaged.params_from(tree, "maxtext_qwen3", config=UNTIED)


def test_name_map_of_hugging_face_names():
    """A map of one's own: flat keys, fused heads, and a fused gate and up of which each takes an
    index.
    """
    names = {
        "embed.weight": ("model.embed_tokens.weight", "V E"),
        "layers.{i}.input_norm.scale": ("model.layers.{i}.input_layernorm.weight", "E"),
        "layers.{i}.attention.q": ("model.layers.{i}.self_attn.q_proj.weight", "(K G D) E"),
        "layers.{i}.attention.k": ("model.layers.{i}.self_attn.k_proj.weight", "(K D) E"),
        "layers.{i}.attention.v": ("model.layers.{i}.self_attn.v_proj.weight", "(K D) E"),
        "layers.{i}.attention.q_norm.scale": ("model.layers.{i}.self_attn.q_norm.weight", "D"),
        "layers.{i}.attention.k_norm.scale": ("model.layers.{i}.self_attn.k_norm.weight", "D"),
        "layers.{i}.attention.out": ("model.layers.{i}.self_attn.o_proj.weight", "E (K G D)"),
        "layers.{i}.post_norm.scale": ("model.layers.{i}.post_attention_layernorm.weight", "E"),
        "layers.{i}.mlp.gate": ("model.layers.{i}.mlp.gate_up", "E 0 F"),
        "layers.{i}.mlp.up": ("model.layers.{i}.mlp.gate_up", "E 1 F"),
        "layers.{i}.mlp.down": ("model.layers.{i}.mlp.down_proj.weight", "E F"),
        "norm.scale": ("model.norm.weight", "E"),
        "lm_head.weight": ("lm_head.weight", "V E"),
    }
    tensors = hf_tensors()
    tree: Tree = dict(tensors)
    for i in range(UNTIED.num_layers):
        parts = [tree.pop(f"model.layers.{i}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        tree[f"model.layers.{i}.mlp.gate_up"] = np.stack([part.T for part in parts], 1)
    assert_equal(jpaged.params_from(tree, names, config=UNTIED), expected(tensors, UNTIED))


class Node(nnx.Module):
    """An nnx module over a tree, with the random keys that modules with dropout carry."""

    def __init__(self, tree: Tree):
        for name, child in tree.items():
            if name == "layers":
                child = nnx.List([Node(layer) for layer in child.values()])
            setattr(self, name, Node(child) if isinstance(child, dict) else child)
            if not isinstance(child, dict | nnx.List):
                setattr(self, name, nnx.Param(child))
        self.rngs = nnx.Rngs(0)


def test_forms_of_tree():
    tensors = hf_tensors()
    tree, wanted = tunix_tree(tensors, UNTIED), expected(tensors, UNTIED)
    module = Node(tree)
    boxed = jax.tree.map(lambda x: meta.Partitioned(x, names=(None,) * x.ndim), tree)
    forms = [
        module,
        nnx.state(module),
        nnx.state(module, nnx.Param),
        {"params": tree},
        {"params": boxed},
    ]
    forms += [{**tree, "layers": [tree["layers"][i] for i in range(UNTIED.num_layers)]}]
    for form in forms:
        assert_equal(jpaged.params_from(form, "tunix_qwen3", config=UNTIED), wanted)
    assert_equal(jpaged.params_from(tree, "tunix_qwen3", config=UNTIED.to_hf()), wanted)


def test_served():
    tensors = hf_tensors()
    params = jpaged.params_from(tunix_tree(tensors, UNTIED), "tunix_qwen3", config=UNTIED)
    out = jpaged.generate(
        params,
        [[3, 5, 7]],
        jpaged.SamplingParams(temperature=0, max_tokens=6),
        engine_config=tiny.ENGINE,
    )
    assert out[0].outputs[0].token_ids == tiny.dense_greedy(expected(tensors, UNTIED), [3, 5, 7], 6)
    jpaged.release(compiled=True)


@pytest.mark.parametrize(
    "make", [tunix_tree, lambda t, c: maxtext_tree(t, c, scanned=True)], ids=["tunix", "scanned"]
)
def test_new_weights_compile_nothing_and_what_needs_no_change_is_aliased(make: Callable[..., Tree]):
    family = "tunix_qwen3" if make is tunix_tree else "maxtext_qwen3"
    tree = make(hf_tensors(), UNTIED)
    jpaged.params_from(tree, family, config=UNTIED)
    newer = jax.tree.map(lambda x: x + 1, tree)
    with tiny.compiles() as names, jax.transfer_guard_device_to_host("disallow_explicit"):
        params = jpaged.params_from(newer, family, config=UNTIED)
    assert names == []
    embedding = newer["embedder"]["input_embedding"] if make is tunix_tree else None
    if embedding is not None:
        assert params["embed"]["weight"] is embedding
        assert (
            params["layers"]["1"]["attention"]["k_norm"]["scale"]
            is newer["layers"][1]["attn"]["k_norm"]["w"]
        )
    else:
        assert params["norm"]["scale"] is newer["params"]["decoder"]["decoder_norm"]["scale"]


def test_sharded_trees_stay_on_their_mesh():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    specs = {
        "q_proj": (None, "tp"),
        "k_proj": ("fsdp", "tp"),
        "v_proj": ("fsdp", "tp"),
        "o_proj": ("tp",),
        "mlp": ("fsdp",),
    }

    def place(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        spec = next((spec for key, spec in specs.items() if key in name), ())
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    tensors = hf_tensors()
    tree = jax.tree_util.tree_map_with_path(place, tunix_tree(tensors, UNTIED))
    params = jpaged.params_from(tree, "tunix_qwen3", config=UNTIED)
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(params))
    assert_equal(params, expected(tensors, UNTIED))
    greedy = jpaged.SamplingParams(temperature=0, max_tokens=4)
    out = jpaged.generate(params, [[3, 5, 7]], greedy, engine_config=tiny.ENGINE)
    assert out[0].outputs[0].token_ids == tiny.dense_greedy(expected(tensors, UNTIED), [3, 5, 7], 4)
    jpaged.release(compiled=True)


def add_lora(tree: Tree, rank: int = 3) -> Tree:
    """LoRA parts beside two weights of each layer, in qwix's shapes: [contracted..., rank] and
    [rank, others...].
    """
    for i, layer in tree["layers"].items():
        for node, name, contracted in (
            (layer["attn"]["q_proj"], "w", 1),
            (layer["attn"]["o_proj"], "w", 2),
        ):
            shape = node[name].shape
            a, b = (*shape[:contracted], rank), (rank, *shape[contracted:])
            for x, dims in (("a", a), ("b", b)):
                node[f"{name}_lora_{x}"] = jnp.asarray(noise(f"{i}{x}{shape}", dims), jnp.float32)
    return tree


def test_lora_is_merged():
    tensors, config = hf_tensors(), UNTIED
    tree = add_lora(tunix_tree(tensors, config))
    params = jpaged.params_from(tree, "tunix_qwen3", config=config, lora_scale=0.5)
    for i, layer in tree["layers"].items():
        for node, axes, name in (
            (layer["attn"]["q_proj"], "dr,rnh->dnh", "q"),
            (layer["attn"]["o_proj"], "nhr,rd->nhd", "o"),
        ):
            delta = 0.5 * np.einsum(axes, node["w_lora_a"], node["w_lora_b"])
            merged = np.asarray(node["w"]) + delta
            flat = (
                merged.reshape(config.hidden_size, -1)
                if name == "q"
                else merged.reshape(-1, config.hidden_size)
            )
            tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"] = flat.T
    for x, y in zip(
        jax.tree.leaves(params), jax.tree.leaves(expected(tensors, config)), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_lora_is_never_ignored():
    tree = add_lora(tunix_tree(hf_tensors(), UNTIED))
    with pytest.raises(ConfigError, match=r"layers\.0\.attn\.q_proj\.w_lora_a: pass lora_scale="):
        jpaged.params_from(tree, "tunix_qwen3", config=UNTIED)
    attn = tree["layers"][1]["attn"]
    attn["q_proj"]["w_lora_a"] = attn["q_proj"]["w_lora_a"][:-1]
    with pytest.raises(
        ConfigError, match=r"layers\.1\.attn\.q_proj\.w_lora_a \(31, 3\) .* cannot be merged"
    ):
        jpaged.params_from(tree, "tunix_qwen3", config=UNTIED, lora_scale=1.0)
    alone = {
        "layers": {
            0: {
                "attn": {
                    "q_proj": {"w_lora_a": jnp.ones((32, 3)), "w_lora_b": jnp.ones((3, 4, 16))}
                }
            }
        }
    }
    with pytest.raises(ConfigError, match=r"lacks embedder\.input_embedding .*LoRA parts alone"):
        jpaged.params_from(alone, "tunix_qwen3", config=UNTIED, lora_scale=1.0)
    tree = tunix_tree(hf_tensors(), UNTIED)
    tree["layers"][0]["attn"]["q_norm"]["w_lora_b"] = jnp.ones((3, 4))
    with pytest.raises(
        ConfigError, match=r"holds layers\.0\.attn\.q_norm\.w_lora_b .*without a weight"
    ):
        jpaged.params_from(tree, "tunix_qwen3", config=UNTIED, lora_scale=1.0)


def change(tree: Any, path: str, value: Any) -> None:
    """Put a value at a dotted path, or delete what is there (None)."""
    *keys, last = path.split(".")
    for key in keys:
        tree = tree[int(key) if key.isdigit() else key]
    if value is None:
        del tree[last]
    else:
        tree[last] = value(tree[last]) if callable(value) else value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layers.1.attn.k_proj.w", None, r"lacks layers\.1\.attn\.k_proj\.w$"),
        (
            "layers.1.attn.k_proj.w",
            lambda x: x[:, :1],
            r"k_proj\.w is of shape \(32, 1, 16\); .*K = 2, D = 16",
        ),
        (
            "layers.0.mlp.up_proj.kernel",
            lambda x: x.T,
            r"layers\.0\.mlp\.up_proj\.kernel is of shape \(48, 32\)",
        ),
        (
            "layers.0.mlp.router",
            {"kernel": np.ones(3)},
            r"holds layers\.0\.mlp\.router\.kernel, which",
        ),
        ("final_norm.w", lambda x: x.astype(jnp.int8), r"final_norm\.w is of dtype int8"),
        ("final_norm.w", 3.0, r"final_norm\.w is a float, not an array"),
        (
            "layers.0.attn.v_proj.w",
            lambda x: x.astype(jnp.bfloat16),
            r"layers\.0\.attention\.qkv are in bfloat16 and",
        ),
    ],
)
def test_misfits_are_named(path: str, value: Any, message: str):
    tree = tunix_tree(hf_tensors(), UNTIED)
    change(tree, path, value)
    with pytest.raises(ConfigError, match=message):
        jpaged.params_from(tree, "tunix_qwen3", config=UNTIED)


def test_tied_config_refuses_a_head():
    with pytest.raises(ConfigError, match=r"holds lm_head\.w, which"):
        jpaged.params_from(tunix_tree(hf_tensors(), UNTIED), "tunix_qwen3", config=TIED)


def test_tracers_and_deleted_arrays_are_refused():
    tree = tunix_tree(hf_tensors(), UNTIED)
    with pytest.raises(ConfigError, match="is a tracer: params_from is host Python"):
        jax.jit(
            lambda tree: jax.tree.leaves(jpaged.params_from(tree, "tunix_qwen3", config=UNTIED))
        )(tree)
    tree["final_norm"]["w"].delete()
    with pytest.raises(ConfigError, match=r"final_norm\.w is a deleted array"):
        jpaged.params_from(tree, "tunix_qwen3", config=UNTIED)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("tunix_llama", "family='tunix_llama': must be"),
        (
            {**TUNIX_QWEN3, "layers.{i}.attention.qkv": ("x", "E")},
            r"gives 'layers\.\{i\}\.attention\.qkv', which",
        ),
        (
            {k: v for k, v in TUNIX_QWEN3.items() if k != "norm.scale"},
            "lacks 'norm.scale', which this config needs",
        ),
        (
            dict(TUNIX_QWEN3) | {"norm.scale": ("final_norm.w", "D")},
            "axes 'D' of norm.scale: must hold E once each",
        ),
        (
            dict(TUNIX_QWEN3) | {"norm.scale": ("final_norm.w", "E L L")},
            "axes 'E L L' of norm.scale",
        ),
        (dict(TUNIX_QWEN3) | {"norm.scale": ("final_norm.w", "E -")}, "axes 'E -' of norm.scale"),
    ],
)
def test_bad_name_maps_are_refused(family: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        jpaged.params_from(tunix_tree(hf_tensors(), UNTIED), family, config=UNTIED)


def test_every_part_is_in_the_maps():
    assert set(TUNIX_QWEN3) | set(maxtext_qwen3()) <= set(PARTS)
