"""params_from: MaxText's trees of GPT-OSS, Gemma 4 and Qwen 3.5, made from Hugging Face tensors as
MaxText makes them: paths, transposes and splits are those of its conversion
(maxtext/checkpoint_conversion/utils/param_mapping.py of August 2026), unscanned.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import ConfigError, ModelConfig
from tests.checkpoint.test_gemma_maps import assert_equal, loaded, nested
from tests.golden.reference import Golden, load

Tree = dict[str, Any]
GPT_OSS, GEMMA4, DENSE = (
    load("gpt_oss_g4_d64"),
    load("gemma4_experts"),
    load("gemma4_k2_d32_k1_d64"),
)
QWEN = load("qwen3_5_moe_h2x2_c16_y32")


def reshaped(weight: np.ndarray, *shape: int) -> np.ndarray:
    """MaxText's reshape_kernel: the transposed weight, by heads."""
    return weight.T.reshape(shape)


def layers_of(golden: Golden, prefix: str) -> list[dict[str, np.ndarray]]:
    tensors, count = golden.tensors(), ModelConfig.from_hf(golden.config).num_layers
    return [
        {k.removeprefix(at): v for k, v in tensors.items() if k.startswith(at)}
        for at in (f"{prefix}layers.{i}." for i in range(count))
    ]


def whole(golden: Golden, prefix: str, layers: list[Tree], scale: float = 1.0) -> Tree:
    """The tree of a model; its vocabulary is padded to a multiple of 128."""
    tensors = golden.tensors()
    embedding = tensors[f"{prefix}embed_tokens.weight"]
    rows = -len(embedding) % 128
    flat = {f"layers_{i}.{path}": x for i, layer in enumerate(layers) for path, x in layer.items()}
    flat["decoder_norm.scale"] = tensors[f"{prefix}norm.weight"]
    if "lm_head.weight" in tensors:
        flat["logits_dense.kernel"] = np.pad(tensors["lm_head.weight"], ((0, rows), (0, 0))).T
    table = np.pad(embedding, ((0, rows), (0, 0))) * np.float32(scale)
    embedder = {"token_embedder": {"embedding": jnp.asarray(table)}}
    return {"params": embedder | {"decoder": nested(flat)}}


def attention(tensors: Tree, config: ModelConfig, i: int, name: str) -> Tree:
    mixer: Any = config.layers[i].mixer
    size, width = config.hidden_size, mixer.head_dim
    flat: Tree = {}
    for x, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        if f"self_attn.{x}_proj.weight" in tensors:
            kernel = reshaped(tensors[f"self_attn.{x}_proj.weight"], size, -1, width)
            flat[f"{name}.{theirs}.kernel"] = kernel
        if f"self_attn.{x}_proj.bias" in tensors:
            flat[f"{name}.{theirs}.bias"] = tensors[f"self_attn.{x}_proj.bias"].reshape(-1, width)
    out = tensors["self_attn.o_proj.weight"]
    flat[f"{name}.out.kernel"] = reshaped(out, -1, width, size)
    return flat


def gpt_oss() -> Tree:
    config, trees = ModelConfig.from_hf(GPT_OSS.config), []
    for i, own in enumerate(layers_of(GPT_OSS, "model.")):
        flat = attention(own, config, i, "GptOssAttention")
        flat |= {
            "pre_self_attention_layer_norm.scale": own["input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": own["post_attention_layernorm.weight"],
            "GptOssAttention.out.bias": own["self_attn.o_proj.bias"],
            "GptOssAttention.sinks": own["self_attn.sinks"],
            "GptOssMlp.gate.kernel": own["mlp.router.weight"].T,
            "GptOssMlp.gate.bias": own["mlp.router.bias"],
            "GptOssMlp.wo": own["mlp.experts.down_proj"],
            "GptOssMlp.wo_bias": own["mlp.experts.down_proj_bias"],
        }
        for n in (0, 1):  # MaxText's interleave
            flat[f"GptOssMlp.wi_{n}"] = own["mlp.experts.gate_up_proj"][..., n::2]
            flat[f"GptOssMlp.wi_{n}_bias"] = own["mlp.experts.gate_up_proj_bias"][..., n::2]
        trees.append(flat)
    return whole(GPT_OSS, "model.", trees)


def gemma4(golden: Golden) -> Tree:
    config, trees = ModelConfig.from_hf(golden.config), []
    for i, own in enumerate(layers_of(golden, "model.")):
        flat = attention(own, config, i, "self_attention")
        flat |= {
            "self_attention.query_norm.scale": own["self_attn.q_norm.weight"],
            "self_attention.key_norm.scale": own["self_attn.k_norm.weight"],
            "pre_self_attention_norm.scale": own["input_layernorm.weight"],
            "post_self_attention_norm.scale": own["post_attention_layernorm.weight"],
            "pre_ffw_norm.scale": own["pre_feedforward_layernorm.weight"],
            "post_ffw_norm.scale": own["post_feedforward_layernorm.weight"],
            "layer_scalar": own["layer_scalar"],
        }
        mlp = "mlp"
        if "experts.gate_up_proj" in own:
            mlp, moe = "mlp.moe_block.shared_experts", "mlp.moe_block.MoeBlock_0"
            gate, up = np.split(own["experts.gate_up_proj"], 2, axis=1)
            flat |= {
                "mlp.pre_feedforward_layernorm_2.scale": own["pre_feedforward_layernorm_2.weight"],
                "mlp.post_feedforward_layernorm_1.scale": own[
                    "post_feedforward_layernorm_1.weight"
                ],
                "mlp.post_feedforward_layernorm_2.scale": own[
                    "post_feedforward_layernorm_2.weight"
                ],
                "mlp.pre_forward_scale_2": own["router.scale"],
                f"{moe}.gate.kernel": own["router.proj.weight"].T,
                f"{moe}.per_expert_scale": own["router.per_expert_scale"],
                f"{moe}.wi_0": gate.transpose(0, 2, 1),
                f"{moe}.wi_1": up.transpose(0, 2, 1),
                f"{moe}.wo": own["experts.down_proj"].transpose(0, 2, 1),
            }
        for theirs, x in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            flat[f"{mlp}.{theirs}.kernel"] = own[f"mlp.{x}_proj.weight"].T
        trees.append(flat)
    return whole(golden, "model.", trees, scale=config.hidden_size**0.5)


def qwen3_5() -> Tree:
    config, trees = ModelConfig.from_hf(QWEN.config), []
    text = QWEN.config["text_config"]
    heads, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    size = heads * text["linear_key_head_dim"]
    for own in layers_of(QWEN, "model.language_model."):
        gate, up = np.split(own["mlp.experts.gate_up_proj"], 2, axis=1)
        flat: Tree = {
            "input_layernorm.scale": own["input_layernorm.weight"],
            "post_attention_layernorm.scale": own["post_attention_layernorm.weight"],
            "mlp.routed_experts.gate.kernel": own["mlp.gate.weight"].T,
            "mlp.routed_experts.wi_0": gate.swapaxes(1, 2),
            "mlp.routed_experts.wi_1": up.swapaxes(1, 2),
            "mlp.routed_experts.wo": own["mlp.experts.down_proj"].transpose(0, 2, 1),
            "mlp.shared_expert.wi_0.kernel": own["mlp.shared_expert.gate_proj.weight"].T,
            "mlp.shared_expert.wi_1.kernel": own["mlp.shared_expert.up_proj.weight"].T,
            "mlp.shared_expert.wo.kernel": own["mlp.shared_expert.down_proj.weight"].T,
            "mlp.shared_expert_gate.kernel": own["mlp.shared_expert_gate.weight"].T,
        }
        if "self_attn.q_proj.weight" in own:
            shapes = {"q": (-1, 2 * text["head_dim"]), "k": (-1, text["head_dim"])}
            for x, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
                kernel = own[f"self_attn.{x}_proj.weight"]
                shape = shapes["q" if x == "q" else "k"]
                name = f"attention.attention.{theirs}.kernel"
                flat[name] = reshaped(kernel, config.hidden_size, *shape)
            out = own["self_attn.o_proj.weight"]
            flat["attention.attention.out.kernel"] = reshaped(
                out, -1, text["head_dim"], config.hidden_size
            )
            for x, theirs in (("q", "query"), ("k", "key")):
                flat[f"attention.attention.{theirs}_norm.scale"] = own[f"self_attn.{x}_norm.weight"]
        else:  # MaxText's concat_qkvz_and_transpose, concat_ba_and_transpose and permute_conv
            linear = {k.removeprefix("linear_attn."): v for k, v in own.items()}
            q, k, v = np.split(linear["in_proj_qkv.weight"], [size, 2 * size])
            rows = [x.reshape(heads, -1, x.shape[1]) for x in (q, k, v, linear["in_proj_z.weight"])]
            qkvz = np.concatenate(rows, axis=1).reshape(-1, q.shape[1]).T
            rows = [linear[f"in_proj_{x}.weight"].reshape(heads, values // heads, -1) for x in "ba"]
            flat |= {
                "attention.in_proj_qkvz.kernel": qkvz,
                "attention.in_proj_ba.kernel": np.concatenate(rows, 1).reshape(-1, q.shape[1]).T,
                "attention.conv1d.kernel": linear["conv1d.weight"].transpose(2, 1, 0),
                "attention.A_log": linear["A_log"],
                "attention.dt_bias": linear["dt_bias"],
                "attention.norm.rms_norm.scale": linear["norm.weight"],
                "attention.out_proj.kernel": linear["out_proj.weight"].T,
            }
        trees.append(flat)
    return whole(QWEN, "model.language_model.", trees)


CASES = {
    "maxtext_gpt_oss": (GPT_OSS, gpt_oss),
    "maxtext_gemma4": (GEMMA4, lambda: gemma4(GEMMA4)),
    "maxtext_qwen3_5": (QWEN, qwen3_5),
}


@pytest.mark.parametrize("family", CASES)
def test_maxtexts_trees(family: str, tmp_path: Path) -> None:
    """Every tensor is that of the checkpoint, and new weights compile nothing."""
    golden, make = CASES[family]
    config, tree = ModelConfig.from_hf(golden.config), make()
    assert_equal(jpaged.params_from(tree, family, config=config), loaded(golden, tmp_path))
    twice = jax.tree.map(lambda x: x * 2, tree)
    with jax.no_tracing():
        jpaged.params_from(twice, family, config=config)


def test_a_dense_gemma4(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(DENSE.config)
    assert_equal(
        jpaged.params_from(gemma4(DENSE), "maxtext_gemma4", config=config),
        loaded(DENSE, tmp_path),
    )


@pytest.mark.parametrize("family", CASES)
def test_what_does_not_fit_is_named(family: str) -> None:
    golden, make = CASES[family]
    config, tree = ModelConfig.from_hf(golden.config), make()
    scanned = nested({"params.decoder.layers.layers_0.x.kernel": np.ones((2, 2))})
    with pytest.raises(ConfigError, match="scan_layers=False"):
        jpaged.params_from(scanned, family, config=config)
    decoder = tree["params"]["decoder"]
    decoder["layers_0"]["other"] = jnp.ones(2)
    with pytest.raises(ConfigError, match=r"layers_0\.other"):
        jpaged.params_from(tree, family, config=config)
    del decoder["layers_0"]["other"]
    decoder["decoder_norm"]["scale"] = jnp.ones(3)
    with pytest.raises(ConfigError, match=r"decoder_norm\.scale is of shape"):
        jpaged.params_from(tree, family, config=config)


def test_a_fused_tensor_of_another_shape_is_named() -> None:
    tree = qwen3_5()
    fused = tree["params"]["decoder"]["layers_0"]["attention"]["in_proj_qkvz"]
    fused["kernel"] = fused["kernel"][:, :-1]
    with pytest.raises(ConfigError, match=r"in_proj_qkvz\.kernel is of shape \(56, 319\)"):
        jpaged.params_from(tree, "maxtext_qwen3_5", config=ModelConfig.from_hf(QWEN.config))
