"""params_from: tunix's and MaxText's trees of Gemma 3, MaxText's of experts, made from Hugging Face
tensors as those projects do it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jpaged
from jpaged import ConfigError, EngineConfig, ModelConfig, Params, SamplingParams
from jpaged.checkpoint.name_maps import PARTS, maxtext_gemma3, tunix_gemma3
from jpaged.kept import sessions as kept_sessions
from jpaged.models.layers.attention import AttentionConfig
from tests.golden.reference import Golden, load
from tests.golden.weights import checksum, state_dict

Tree = dict[str, Any]
GEMMA, MOE = load("gemma3_g2_d32_linear"), load("qwen3_moe_g2_d32_normed")


def nested(flat: Tree) -> Tree:
    tree: Tree = {}
    for path, value in flat.items():
        *above, last = path.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = jnp.asarray(value)
    return tree


def loaded(golden: Golden, folder: Path) -> Params:
    return jpaged.load_params(golden.write(folder))


def layers(golden: Golden, changes: Tree) -> tuple[ModelConfig, list[dict[str, np.ndarray]]]:
    """The config, and the tensors of each layer by their names in it."""
    config = dataclasses.replace(ModelConfig.from_hf(golden.config), **changes)
    tensors = golden.tensors()
    return config, [
        {k.removeprefix(at): v for k, v in tensors.items() if k.startswith(at)}
        for at in (f"model.layers.{i}." for i in range(config.num_layers))
    ]


def assert_equal(params: Params, other: Params) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(other)
    for (path, x), y in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_tunix_gemma3(tmp_path: Path) -> None:
    config, own = layers(GEMMA, {})
    h, k, d, e = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    flat: Tree = {
        "embedder.input_embedding": GEMMA.tensors()["model.embed_tokens.weight"],
        "final_norm.scale": GEMMA.tensors()["model.norm.weight"],
    }
    for i, tensors in enumerate(own):
        q, key, v = (tensors[f"self_attn.{x}_proj.weight"].T for x in "qkv")
        kv = [x.reshape(e, k, d).transpose(1, 0, 2) for x in (key, v)]
        flat |= {
            f"layers.{i}.attn.q_einsum.w": q.reshape(e, h, d).transpose(1, 0, 2),
            f"layers.{i}.attn.kv_einsum.w": np.stack(kv),
            f"layers.{i}.attn.attn_vec_einsum.w": tensors["self_attn.o_proj.weight"].T.reshape(
                h, d, e
            ),
            f"layers.{i}.attn._query_norm.scale": tensors["self_attn.q_norm.weight"],
            f"layers.{i}.attn._key_norm.scale": tensors["self_attn.k_norm.weight"],
            f"layers.{i}.pre_attention_norm.scale": tensors["input_layernorm.weight"],
            f"layers.{i}.post_attention_norm.scale": tensors["post_attention_layernorm.weight"],
            f"layers.{i}.pre_ffw_norm.scale": tensors["pre_feedforward_layernorm.weight"],
            f"layers.{i}.post_ffw_norm.scale": tensors["post_feedforward_layernorm.weight"],
        }
        for x in ("gate", "up", "down"):
            flat[f"layers.{i}.mlp.{x}_proj.kernel"] = tensors[f"mlp.{x}_proj.weight"].T
    params = jpaged.params_from(nested(flat), "tunix_gemma3", config=config)
    assert_equal(params, loaded(GEMMA, tmp_path))


def test_tunix_gemma3_with_as_many_kv_heads_as_heads() -> None:
    """q, k and v in one tensor."""
    change: Tree = {"num_kv_heads": 4, "num_layers": 1, "sliding_windows": ()}
    config = dataclasses.replace(ModelConfig.from_hf(GEMMA.config), **change)
    rng, names = np.random.default_rng(0), tunix_gemma3(fused=True)
    sizes = {"V": 160, "E": 72, "F": 104, "K": 4, "D": 32, "(K G)": 4}
    tokens = {"0 (K G) E D": "3 K E D", "1 K E D": "3 K E D", "2 K E D": "3 K E D"}
    flat = {}
    for path, axes, *_ in names.values():
        spelled = tokens.get(axes, axes).replace("(K G)", "K").split()
        shape = [int(token) if token.isdecimal() else sizes[token] for token in spelled]
        flat[path.format(i=0)] = rng.standard_normal(shape).astype(np.float32)
    params = jpaged.params_from(nested(flat), "tunix_gemma3", config=config)
    qkv = flat["layers.0.attn.qkv_einsum.w"]  # [3, K, E, D]
    found = np.asarray(params["layers"]["0"]["attention"]["qkv"])  # [K, 3, D, E]
    np.testing.assert_array_equal(found, qkv.transpose(1, 0, 3, 2))


GEMMA4 = ("gemma4_k2_d32_k1_d64", "gemma4_experts", "gemma4_shared_keys")


def tunix_gemma4(golden: Golden, *, is_flat: bool) -> tuple[ModelConfig, Tree]:
    """A tree of tunix's Gemma 4 by what transformers' tensors say; shared layers have tensors of
    keys and values, which nothing reads.
    """
    config, own = layers(golden, {})
    top, embed = golden.tensors(), config.hidden_size
    flat: Tree = {
        "embedder.input_embedding": top["model.embed_tokens.weight"],
        "final_norm.scale": top["model.norm.weight"],
    }
    if (per_layer := config.layers[0].per_layer) is not None:
        table = top["model.embed_tokens_per_layer.weight"]
        projection = top["model.per_layer_model_projection.weight"].T
        shape = (config.num_layers, per_layer.size)
        flat |= {
            "embedder.per_layer_input_embedding": table if is_flat else table.reshape(-1, *shape),
            "embedder.per_layer_model_projection.w": (
                projection if is_flat else projection.reshape(-1, *shape)
            ),
            "embedder.per_layer_projection_norm.scale": top[
                "model.per_layer_projection_norm.weight"
            ],
        }
    for i, (layer, tensors) in enumerate(zip(config.layers, own, strict=True)):
        mixer, at = layer.mixer, f"layers.{i}."
        assert isinstance(mixer, AttentionConfig)
        h, k, d = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim

        def heads(name: str, count: int, width: int, own: Tree = tensors) -> np.ndarray:
            return own[f"self_attn.{name}_proj.weight"].T.reshape(embed, count, width)

        flat |= {
            f"{at}attn.q_einsum.w": heads("q", h, d).transpose(1, 0, 2),
            f"{at}attn.attn_vec_einsum.w": tensors["self_attn.o_proj.weight"].T.reshape(
                h, d, embed
            ),
            f"{at}attn._query_norm.scale": tensors["self_attn.q_norm.weight"],
            f"{at}attn._key_norm.scale": tensors.get("self_attn.k_norm.weight", np.ones(d)),
            f"{at}pre_attention_norm.scale": tensors["input_layernorm.weight"],
            f"{at}post_attention_norm.scale": tensors["post_attention_layernorm.weight"],
            f"{at}pre_ffw_norm.scale": tensors["pre_feedforward_layernorm.weight"],
            f"{at}post_ffw_norm.scale": tensors["post_feedforward_layernorm.weight"],
            f"{at}skip_scale": tensors["layer_scalar"].reshape(1),
        }
        if mixer.value_is_key:
            flat[f"{at}attn.k_einsum.w"] = heads("k", k, d).transpose(1, 0, 2)
        elif mixer.keys_of is not None:
            flat[f"{at}attn.kv_einsum.w"] = np.ones((2, k, embed, d))
        else:
            flat[f"{at}attn.kv_einsum.w"] = np.stack(
                [heads(x, k, d).transpose(1, 0, 2) for x in "kv"]
            )
        for x in ("gate", "up", "down"):
            flat[f"{at}mlp.{x}_proj.kernel"] = tensors[f"mlp.{x}_proj.weight"].T
        if layer.per_layer is not None:
            flat |= {
                f"{at}per_layer_input_gate.w": tensors["per_layer_input_gate.weight"].T,
                f"{at}per_layer_projection.w": tensors["per_layer_projection.weight"].T,
                f"{at}post_per_layer_input_norm.scale": tensors["post_per_layer_input_norm.weight"],
            }
        if "router.proj.weight" in tensors:
            gate_up, count = tensors["experts.gate_up_proj"], len(tensors["experts.gate_up_proj"])
            flat |= {
                f"{at}dense_post_ffw_norm.scale": tensors["post_feedforward_layernorm_1.weight"],
                f"{at}moe_pre_ffw_norm.scale": tensors["pre_feedforward_layernorm_2.weight"],
                f"{at}moe_post_ffw_norm.scale": tensors["post_feedforward_layernorm_2.weight"],
                f"{at}moe.router_logits": tensors["router.proj.weight"].T,
                f"{at}moe.router_scale": tensors["router.scale"],
                f"{at}moe.per_expert_scale": tensors["router.per_expert_scale"],
                f"{at}moe.gating_einsum": gate_up.reshape(count, 2, -1, embed),
                f"{at}moe.linear": tensors["experts.down_proj"].transpose(0, 2, 1),
            }
    return config, nested(flat)


@pytest.mark.parametrize("name", GEMMA4)
def test_tunix_gemma4(tmp_path: Path, name: str) -> None:
    """Layers that differ, values that are keys, experts, keys of other layers, per-layer embeddings
    as one axis and, as before tunix 0.1.8, as two.
    """
    golden = load(name)
    wanted = loaded(golden, tmp_path)
    for is_flat in (True, False):
        config, tree = tunix_gemma4(golden, is_flat=is_flat)
        params = jpaged.params_from(tree, "tunix_gemma4", config=config)
        assert_equal(params, wanted)
    tree["layers"]["0"]["attn"]["k_scale"] = np.ones(2)
    with pytest.raises(ConfigError, match=r"holds layers\.0\.attn\.k_scale, which the name map"):
        jpaged.params_from(tree, "tunix_gemma4", config=config)


def gemma_maxtext(golden: Golden) -> Tree:
    config, own = layers(golden, {})
    h, k, d, e = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    scale = np.float32(jnp.bfloat16(e**0.5))
    embedding = golden.tensors()["model.embed_tokens.weight"] * scale
    flat: Tree = {
        "params.token_embedder.embedding": np.pad(embedding, ((0, 8), (0, 0))),
        "params.decoder.decoder_norm.scale": golden.tensors()["model.norm.weight"] + 1,
    }
    norms = {
        "pre_self_attention_norm": "input_layernorm",
        "post_self_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "self_attention.query_norm": "self_attn.q_norm",
        "self_attention.key_norm": "self_attn.k_norm",
    }
    shapes = {"query": (e, h, d), "key": (e, k, d), "value": (e, k, d), "out": (h, d, e)}
    for i, tensors in enumerate(own):
        at = f"params.decoder.layers_{i}."
        for theirs, name in norms.items():
            flat[f"{at}{theirs}.scale"] = tensors[f"{name}.weight"] + 1
        for (theirs, shape), x in zip(shapes.items(), "qkvo", strict=True):
            kernel = tensors[f"self_attn.{x}_proj.weight"].T.reshape(shape)
            flat[f"{at}self_attention.{theirs}.kernel"] = kernel
        for theirs, x in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            flat[f"{at}mlp.{theirs}.kernel"] = tensors[f"mlp.{x}_proj.weight"].T
    return nested(flat)


def test_maxtext_gemma3(tmp_path: Path) -> None:
    """Its norms hold 1 + scale and its embedding is scaled: both are undone."""
    config = ModelConfig.from_hf(GEMMA.config)
    params = jpaged.params_from(gemma_maxtext(GEMMA), "maxtext_gemma3", config=config)
    assert_equal(params, loaded(GEMMA, tmp_path))
    scanned = nested({"params.decoder.layers.mlp.wo.kernel": np.ones((2, 2, 2))})
    with pytest.raises(ConfigError, match="scan_layers=False"):
        jpaged.params_from(scanned, "maxtext_gemma3", config=config)


@pytest.mark.parametrize("scanned", [True, False])
def test_maxtext_experts(tmp_path: Path, scanned: bool) -> None:
    """Every layer a mixture; scanned experts are [experts, layers, ...]."""
    raw = MOE.config | {"mlp_only_layers": []}
    digest = checksum(state_dict(MOE.name, raw))
    golden = dataclasses.replace(MOE, config=raw, weights_sha256=digest)
    config, own = layers(golden, {"dense_layers": ()})
    h, k, d, e = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    shapes = {"query": (e, h, d), "key": (e, k, d), "value": (e, k, d), "out": (h, d, e)}
    trees = []
    for tensors in own:
        flat: Tree = {
            "pre_self_attention_layer_norm.scale": tensors["input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": tensors["post_attention_layernorm.weight"],
            "self_attention.query_norm.scale": tensors["self_attn.q_norm.weight"],
            "self_attention.key_norm.scale": tensors["self_attn.k_norm.weight"],
            "moe_block.gate.kernel": tensors["mlp.gate.weight"].T,
        }
        for (theirs, shape), x in zip(shapes.items(), "qkvo", strict=True):
            kernel = tensors[f"self_attn.{x}_proj.weight"].T.reshape(shape)
            flat[f"self_attention.{theirs}.kernel"] = kernel
        for theirs, x in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            each = [tensors[f"mlp.experts.{n}.{x}_proj.weight"].T for n in range(16)]
            flat[f"moe_block.{theirs}"] = np.stack(each)
        trees.append(nested(flat))
    decoder: Tree = {f"layers_{i}": tree for i, tree in enumerate(trees)}
    if scanned:
        decoder = {"layers": jax.tree.map(lambda *x: jnp.stack(x, 1), *trees)}
    tensors = golden.tensors()
    decoder["decoder_norm"] = {"scale": jnp.asarray(tensors["model.norm.weight"])}
    decoder["logits_dense"] = {"kernel": jnp.asarray(tensors["lm_head.weight"].T)}
    embedding = {"embedding": jnp.asarray(tensors["model.embed_tokens.weight"])}
    tree = {"params": {"token_embedder": embedding, "decoder": decoder}}
    params = jpaged.params_from(tree, "maxtext_qwen3", config=config)
    assert_equal(params, loaded(golden, tmp_path))


@pytest.mark.middle
def test_a_trainers_shards_are_served_on_their_mesh() -> None:
    """Gemma's tree over tp as a trainer holds it: nothing is gathered, and the tokens are the
    reference's.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    tree = gemma_maxtext(GEMMA)

    def place(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        heads = any(f"'{n}']" in name for n in ("query", "key", "value"))
        split = {"wi_0": 1, "wi_1": 1, "wo": 0, "'out'": 0, "embedding": 0}
        at = 1 if heads else next((i for n, i in split.items() if n in name), None)
        spec = PartitionSpec() if at is None else PartitionSpec(*[None] * at, "tp")
        return jax.device_put(x, NamedSharding(mesh, spec))

    sharded = jax.tree_util.tree_map_with_path(place, tree)
    params = jpaged.params_from(sharded, "maxtext_gemma3", config=GEMMA.config)
    qkv: Any = params["layers"]["0"]["attention"]["qkv"]
    assert qkv.sharding.mesh == mesh
    settings = EngineConfig(
        block_size=8,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        token_buckets=(32,),
        seq_buckets=(8,),
        num_blocks=48,
    )
    greedy, prompt = SamplingParams(temperature=0, max_tokens=12), GEMMA.prompts[2]
    (output,) = jpaged.generate(params, prompt.token_ids, greedy, engine_config=settings)
    assert output.outputs[0].token_ids == prompt.greedy[:12]
    assert kept_sessions()[-1].runner.placement.axis == "tp"


def test_every_part_is_known() -> None:
    assert {*tunix_gemma3(), *tunix_gemma3(fused=True), *maxtext_gemma3(64)} <= set(PARTS)
