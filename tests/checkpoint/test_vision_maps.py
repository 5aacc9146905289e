"""params_from with the vision towers of tunix and MaxText: trees are made of Hugging Face tensors
by the steps of their own conversions (tunix/models/gemma*/params_safetensors.py and
maxtext/checkpoint_conversion/utils/param_mapping.py of August 2026), in the shapes of their
modules.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import ConfigError, ModelConfig, Params
from jpaged.checkpoint.name_maps import TOKEN, entry_of, name_map
from jpaged.models.params import nest, param_table
from jpaged.models.vision.gemma4 import Gemma4VisionConfig
from tests.checkpoint.test_gemma_maps import nested
from tests.checkpoint.test_maxtext_maps import QWEN, qwen3_5
from tests.golden import towers

Tree = dict[str, Any]
Tensors = Mapping[str, np.ndarray]


def config_of(name: str, **changes: Any) -> ModelConfig:
    return with_tower(ModelConfig.from_hf(towers.CONFIGS[name]), name, **changes)


def with_tower(text: ModelConfig, name: str, **changes: Any) -> ModelConfig:
    """A model with a tower of one block."""
    vision: Any = ModelConfig.from_hf(towers.CONFIGS[name], images=True).vision
    changes = {"hidden_size": text.hidden_size, "num_layers": 1} | changes
    return dataclasses.replace(text, vision=dataclasses.replace(vision, **changes))


def made_params(config: ModelConfig) -> Params:
    """Return params of numbers that all differ."""
    rng = np.random.default_rng(3)
    leaves = {name: rng.standard_normal(spec.shape) for name, spec in param_table(config).items()}
    return Params(nest({name: jnp.asarray(x, jnp.float32) for name, x in leaves.items()}), config)


def text_tree(family: str, params: Params) -> Tree:
    """Return the flat tree of the text part, by the map of its name, which other tests hold to the
    other project's conversions.
    """
    config = dataclasses.replace(params.config, vision=None)
    shown = {"decoder.layers_0.x": None} if family.startswith("maxtext") else {}
    table, pieces = name_map(family, shown, config), dict[str, Tree]()
    for name, spec in param_table(config).items():
        node: Any = params
        for key in name.split("."):
            node = node[key]
        sizes = dict(spec.sizes)
        for part, place in spec.places:
            entry = entry_of(table, spec, part)
            assert entry is not None, part.name
            path, axes, *change = entry
            ours, theirs = [x for x in part.axes if x.isupper()], TOKEN.findall(axes)
            letters = [x for token in theirs for x in token if x.isupper()]
            x = np.asarray(node)[place].reshape([sizes[letter] for letter in ours])
            x = x.transpose([ours.index(letter) for letter in letters])
            kept = [token for token in theirs if not token.isdecimal()]
            x = x.reshape([math.prod(sizes[a] for a in t if a.isupper()) for t in kept])
            for divisor, minus in change:
                x = x * np.float32(divisor) + np.float32(minus)
            index = tuple((i, int(t)) for i, t in enumerate(theirs) if t.isdecimal())
            pieces.setdefault(path, {})[str(index)] = (index, x)
    flat: Tree = {}
    for path, by_index in pieces.items():
        ((index, x), *_) = by_index.values()
        if index:
            ((axis, _),) = index
            x = np.stack([x for _, x in sorted(by_index.values(), key=lambda y: y[0])], axis)
        flat[path] = x
    return flat


def hf_tensors(params: Params) -> Tensors:
    """Return the tensors of the tower as a Hugging Face file has them."""
    vision: Any = params.config.vision
    tensors: dict[str, np.ndarray] = {}
    for spec in vision.params():
        sizes, inputs = dict(spec.sizes), spec.sides[1]
        node: Any = params
        for key in spec.name.split("."):
            node = node[key]
        for part, place in spec.places:
            x = np.asarray(node)[place]
            if "|" not in spec.axes:
                x = x.reshape(-1, math.prod(sizes[a] for a in inputs)) if inputs else x.reshape(-1)
            if part.hf_name.endswith(("patch_embedding.weight", "patch_embed.proj.weight")):
                side, frames = vision.patch_size, getattr(vision, "frames", None)
                x = x.reshape(len(x), 3, *([frames] if frames else []), side, side)
            tensors[part.hf_name] = x
    return tensors


def _siglip_ends(hf: Tensors, node: str, at: str, norm: str) -> Tree:
    """Return what both have before and behind the blocks of SigLIP."""
    kernel = hf[f"{node}embeddings.patch_embedding.weight"]
    return {
        f"{at}.embedding.kernel": kernel.transpose(2, 3, 1, 0),
        f"{at}.embedding.bias": hf[f"{node}embeddings.patch_embedding.bias"],
        f"{at}.pos_embedding": hf[f"{node}embeddings.position_embedding.weight"][None],
        **_norm(hf, f"{node}post_layernorm", f"{at}.{norm}"),
    }


def tunix_gemma3(hf: Tensors, config: ModelConfig) -> Tree:
    node, flat = "model.vision_tower.", dict[str, Any]()
    at = "vision_encoder.siglip_encoder"
    flat |= _siglip_ends(hf, node, at, "transformer.encoder_norm")
    for i in range(1):
        theirs, ours = f"{node}encoder.layers.{i}", f"{at}.transformer.blocks.{i}"
        for n in (1, 2):
            flat |= _norm(hf, f"{theirs}.layer_norm{n}", f"{ours}.ln{n}")
        for x, name in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
            flat |= _linear(hf, f"{theirs}.self_attn.{x}_proj", f"{ours}.attn.{name}_proj")
        for x in ("fc1", "fc2"):
            flat |= _linear(hf, f"{theirs}.mlp.{x}", f"{ours}.mlp.{x}")
    projector = "model.multi_modal_projector."
    flat["embedder.mm_input_projection.w"] = hf[f"{projector}mm_input_projection_weight"]
    flat["embedder.mm_soft_embedding_norm.scale"] = hf[f"{projector}mm_soft_emb_norm.weight"]
    return flat


def maxtext_gemma3(hf: Tensors, config: ModelConfig) -> Tree:
    node, flat = "model.vision_tower.", dict[str, Any]()
    at = "vision_encoder.Gemma3VisionEncoderLayer_0"
    flat |= _siglip_ends(hf, node, at, "Transformer.encoder_norm")
    for i in range(1):
        theirs, ours = f"{node}encoder.layers.{i}", f"{at}.Transformer.encoderblock_{i}"
        for n in (0, 1):
            flat |= _norm(hf, f"{theirs}.layer_norm{n + 1}", f"{ours}.LayerNorm_{n}")
        for x, name in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
            made = _linear(hf, f"{theirs}.self_attn.{x}_proj", "")
            name = f"{ours}.MultiHeadDotProductAttention_0.{name}"
            shape = (3, 10, 30) if x == "out" else (30, 3, 10)
            flat[f"{name}.kernel"] = made[".kernel"].reshape(shape)
            flat[f"{name}.bias"] = made[".bias"].reshape(30 if x == "out" else (3, 10))
        for n in (0, 1):
            flat |= _linear(hf, f"{theirs}.mlp.fc{n + 1}", f"{ours}.MlpBlockViT_0.Dense_{n}")
    projector, at = "model.multi_modal_projector.", "vision_encoder.VisionEmbedder_0"
    flat[f"{at}.mm_input_projection.w"] = hf[f"{projector}mm_input_projection_weight"]
    norm = hf[f"{projector}mm_soft_emb_norm.weight"]
    flat[f"{at}.mm_soft_embedding_norm.scale"] = norm + np.float32(1)
    return flat


def _norm(hf: Tensors, theirs: str, ours: str) -> Tree:
    return {f"{ours}.scale": hf[f"{theirs}.weight"], f"{ours}.bias": hf[f"{theirs}.bias"]}


def _linear(hf: Tensors, theirs: str, ours: str) -> Tree:
    return {f"{ours}.kernel": hf[f"{theirs}.weight"].T, f"{ours}.bias": hf[f"{theirs}.bias"]}


NORMS = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tunix_gemma4(hf: Tensors, config: ModelConfig) -> Tree:
    vision: Any = config.vision
    heads, width = vision.num_heads, vision.width
    node, flat = "model.vision_tower.", dict[str, Any]()
    table = hf[f"{node}patch_embedder.position_embedding_table"]
    flat["vision_encoder.entry.pos_emb"] = table.transpose(1, 0, 2)
    patch = hf[f"{node}patch_embedder.input_proj.weight"]
    flat["vision_encoder.entry.input_projection.w"] = patch.T
    for i in range(vision.num_layers):
        theirs, ours = f"{node}encoder.layers.{i}", f"vision_encoder.layers.{i}"
        for x, name in NORMS.items():
            flat[f"{ours}.{name}.scale"] = hf[f"{theirs}.{x}.weight"]
        for x, name in (("q", "query"), ("k", "key")):
            flat[f"{ours}.attn.{name}_norm.scale"] = hf[f"{theirs}.self_attn.{x}_norm.weight"]
        q, k, v = (
            hf[f"{theirs}.self_attn.{x}_proj.linear.weight"]
            .reshape(heads, -1, width)
            .transpose(0, 2, 1)
            for x in "qkv"
        )
        flat[f"{ours}.attn.q_einsum.w"], flat[f"{ours}.attn.kv_einsum.w"] = q, np.stack([k, v])
        out = hf[f"{theirs}.self_attn.o_proj.linear.weight"].reshape(width, heads, -1)
        flat[f"{ours}.attn.attn_vec_einsum.w"] = out.transpose(1, 2, 0)
        gate, up, down = (
            hf[f"{theirs}.mlp.{x}_proj.linear.weight"] for x in ("gate", "up", "down")
        )
        flat[f"{ours}.mlp.gating_einsum.w"] = np.stack([gate, up])
        flat[f"{ours}.mlp.linear.w"] = down.T
        if vision.is_clipped:
            for x, name in {
                "self_attn.q": "attn.q_einsum",
                "self_attn.k": "attn.kv_einsum",
                "self_attn.o": "attn.attn_vec_einsum",
                "mlp.gate": "mlp.gating_einsum",
                "mlp.down": "mlp.linear",
            }.items():
                for bound in ("input_min", "input_max", "output_min", "output_max"):
                    value = hf[f"{theirs}.{x}_proj.{bound}"]
                    flat[f"{ours}.{name}.clip_{bound}"] = value.reshape(())
    if vision.standardizes:
        for x in ("scale", "bias"):
            flat[f"vision_encoder.standardize.{x}"] = hf[f"{node}std_{x}"]
    projection = hf["model.embed_vision.embedding_projection.weight"]
    flat["embedder.mm_input_projection.w"] = projection.T
    return flat


def maxtext_gemma4(hf: Tensors, config: ModelConfig) -> Tree:
    vision: Any = config.vision
    heads, width, size = vision.num_heads, vision.width, vision.head_dim
    node, at = "model.vision_tower.", "vision_encoder.Gemma4VisionEncoderLayer_0"
    table = hf[f"{node}patch_embedder.position_embedding_table"]
    flat: Tree = {
        f"{at}.vision_entry.pos_emb_param": table.transpose(1, 0, 2),
        f"{at}.vision_entry.input_projection.kernel": hf[
            f"{node}patch_embedder.input_proj.weight"
        ].T,
        f"{at}.std_bias": hf[f"{node}std_bias"],
        f"{at}.std_scale": hf[f"{node}std_scale"],
    }
    for i in range(vision.num_layers):
        theirs, ours = f"{node}encoder.layers.{i}", f"{at}.layer_{i}"
        for x, name in NORMS.items():
            flat[f"{ours}.{name}.scale"] = hf[f"{theirs}.{x}.weight"]
        for x, name in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel = hf[f"{theirs}.self_attn.{x}_proj.linear.weight"]
            flat[f"{ours}.attention.{name}.kernel"] = kernel.T.reshape(width, heads, size)
            if x != "v":
                norm = hf[f"{theirs}.self_attn.{x}_norm.weight"]
                flat[f"{ours}.attention.{name}_norm.scale"] = norm
        out = hf[f"{theirs}.self_attn.o_proj.linear.weight"]
        flat[f"{ours}.attention.out.kernel"] = out.T.reshape(heads, size, width)
        for x, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            flat[f"{ours}.mlp.{name}.kernel"] = hf[f"{theirs}.mlp.{x}_proj.linear.weight"].T
    projection = hf["model.embed_vision.embedding_projection.weight"]
    flat["vision_encoder.Gemma4VisionProjector_0.projection.kernel"] = projection.T
    return flat


def maxtext_qwen(name: str) -> Callable[[Tensors, ModelConfig], Tree]:
    def make(hf: Tensors, config: ModelConfig) -> Tree:
        vision: Any = config.vision
        width, heads, size = vision.width, vision.num_heads, vision.head_dim
        node, at = "model.visual.", f"vision_encoder.{name}VisionEncoder_0"
        kernel = hf[f"{node}patch_embed.proj.weight"]
        flat: Tree = {
            f"{at}.patch_embed.proj.kernel": kernel.transpose(2, 3, 4, 1, 0),
            f"{at}.patch_embed.proj.bias": hf[f"{node}patch_embed.proj.bias"],
            f"{at}.pos_embed_interpolate.pos_embed": hf[f"{node}pos_embed.weight"],
        }
        for i in range(vision.num_layers):
            theirs, ours = f"{node}blocks.{i}", f"{at}.blocks_{i}"
            for n in (1, 2):
                flat |= _norm(hf, f"{theirs}.norm{n}", f"{ours}.ln{n}")
            weights = np.split(hf[f"{theirs}.attn.qkv.weight"], 3)
            biases = np.split(hf[f"{theirs}.attn.qkv.bias"], 3)
            for x, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
                flat[f"{ours}.attn.attn.{x}.kernel"] = weight.T.reshape(width, heads, size)
                flat[f"{ours}.attn.attn.{x}.bias"] = bias.reshape(heads, size)
            out = hf[f"{theirs}.attn.proj.weight"]
            flat[f"{ours}.attn.attn.out.kernel"] = out.T.reshape(heads, size, width)
            flat[f"{ours}.attn.attn.out.bias"] = hf[f"{theirs}.attn.proj.bias"]
            flat |= _linear(hf, f"{theirs}.mlp.linear_fc1", f"{ours}.mlp")
            flat |= _linear(hf, f"{theirs}.mlp.linear_fc2", f"{ours}.mlp_out")
        mergers = {f"vision_encoder.{name}VisionProjector_0.merger": "merger"}
        for j in range(len(vision.deepstack)):
            mergers[f"{at}.merger_{j}"] = f"deepstack_merger_list.{j}"
        for ours, theirs in mergers.items():
            flat |= _norm(hf, f"{node}{theirs}.norm", f"{ours}.ln_q")
            flat |= _linear(hf, f"{node}{theirs}.linear_fc1", f"{ours}.mlp_0")
            flat |= _linear(hf, f"{node}{theirs}.linear_fc2", f"{ours}.mlp_2")
        return flat

    return make


EVEN = config_of("gemma4_standardized", num_kv_heads=4)
DEEP = config_of("qwen3_vl", deepstack=(0,))
CASES: dict[str, tuple[str, ModelConfig, Callable[[Tensors, ModelConfig], Tree]]] = {
    "tunix's Gemma 3": ("tunix_gemma3", config_of("gemma3"), tunix_gemma3),
    "tunix's Gemma 4": ("tunix_gemma4", EVEN, tunix_gemma4),
    "tunix's Gemma 4 with bounds": ("tunix_gemma4", config_of("gemma4_clipped"), tunix_gemma4),
    "MaxText's Gemma 3": ("maxtext_gemma3", config_of("gemma3"), maxtext_gemma3),
    "MaxText's Gemma 4": ("maxtext_gemma4", EVEN, maxtext_gemma4),
    "MaxText's Qwen3-VL": ("maxtext_qwen3", DEEP, maxtext_qwen("Qwen3VL")),
}


def tree_and_params(case: str) -> tuple[Tree, Params]:
    """Return the other project's flat tree, and the params that it was made of."""
    family, config, make = CASES[case]
    params = made_params(config)
    vision = config.vision
    if isinstance(vision, Gemma4VisionConfig) and vision.is_clipped:  # one product there has both
        for block in params["vision"]["blocks"].values():
            block["attention"]["v"]["bounds"] = block["attention"]["k"]["bounds"]
            block["mlp"]["up"]["bounds"] = block["mlp"]["gate"]["bounds"]
    return text_tree(family, params) | make(hf_tensors(params), config), params


@pytest.mark.parametrize("case", CASES)
def test_a_tree_with_its_tower(case: str) -> None:
    """Every tensor of the tower is ours to the bit, but for norms that hold 1 + scale, and new
    weights compile nothing. What is missing or of another shape is named.
    """
    family, config, _ = CASES[case]
    flat, params = tree_and_params(case)
    tree = {"params": nested(flat)}
    made = jpaged.params_from(tree, family, config=config)
    assert jax.tree.structure(made) == jax.tree.structure(params)
    for (path, x), y in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path)
        exact = "vision" in name and not (family == "maxtext_gemma3" and "projection_norm" in name)
        np.testing.assert_allclose(x, y, *((0, 0) if exact else (1e-6, 1e-6)), err_msg=name)
    twice = jax.tree.map(lambda x: x * 2, tree)
    with jax.no_tracing():
        jpaged.params_from(twice, family, config=config)
    of_tower = [path for path in flat if path.startswith(("vision_encoder.", "embedder.mm_"))]
    assert len(of_tower) > 15
    for path in of_tower:
        less = {name: x for name, x in flat.items() if name != path}
        with pytest.raises(ConfigError, match=f"the tree lacks {path}$"):
            jpaged.params_from(nested(less), family, config=config)
        wrong = nested(flat | {path: np.ones((*flat[path].shape, 2), np.float32)})
        with pytest.raises(
            ConfigError, match=rf"{path} is of shape .*2,?\); for vision\..* says \("
        ):
            jpaged.params_from(wrong, family, config=config)


def test_qwen_3_5_of_maxtext() -> None:
    """Its text part is a mixture of experts."""
    config = with_tower(ModelConfig.from_hf(QWEN.config), "qwen3_5")
    params = made_params(config)
    flat = maxtext_qwen("Qwen3_5Moe")(hf_tensors(params), config)
    tree = qwen3_5()
    tree["params"] |= nested(flat)
    made = jpaged.params_from(tree, "maxtext_qwen3_5", config=config)
    assert jax.tree.structure(made) == jax.tree.structure(params)
    for x, y in zip(*map(jax.tree.leaves, (made["vision"], params["vision"])), strict=True):
        assert (x == y).all()


def test_a_kernel_of_a_convolution_in_another_order_is_named() -> None:
    """It has as many numbers as the right one."""
    flat, params = tree_and_params("MaxText's Qwen3-VL")
    path = next(name for name in flat if name.endswith("patch_embed.proj.kernel"))
    flat[path] = flat[path].transpose(4, 3, 0, 1, 2)
    with pytest.raises(ConfigError, match=r"is of shape \(40, 3, 2, 4, 4\); for vision\.patch\.w"):
        jpaged.params_from(nested(flat), "maxtext_qwen3", config=params.config)


def test_the_tower_is_asked_for(tmp_path: Path) -> None:
    flat, params = tree_and_params("tunix's Gemma 3")
    tree, raw = nested(flat), params.config.to_hf()
    made = jpaged.params_from(tree, "tunix_gemma3", config=raw, images=True)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), made, params))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    again = jpaged.params_from(tree, "tunix_gemma3", config=tmp_path, images=True)
    assert again.config == params.config and again.source == tmp_path
    with pytest.raises(ConfigError, match=r"does not take: pass images=True to have the vision"):
        jpaged.params_from(tree, "tunix_gemma3", config=raw)
    text = dataclasses.replace(params.config, vision=None)
    with pytest.raises(ConfigError, match="this ModelConfig has no vision tower"):
        jpaged.params_from(tree, "tunix_gemma3", config=text, images=True)
    with pytest.raises(ConfigError, match="'maxtext_gpt_oss' has no map of the vision tower Sigl"):
        jpaged.params_from(tree, "maxtext_gpt_oss", config=params.config)


def test_a_map_of_ones_own_has_a_tower() -> None:
    """Names are those of its parameters, or of the parts that they are stored as."""
    config = config_of("gemma3")
    params = made_params(config)
    table: dict[str, Any] = {}
    tree: Tree = {}
    for name, spec in param_table(config).items():
        node: Any = params
        for key in name.split("."):
            node = node[key]
        sizes = dict(spec.sizes)
        for part, place in spec.places:
            letters = [x for x in part.axes if x.isupper()]
            table[spec.at(part.name)] = (f"their.{spec.at(part.name)}", " ".join(letters))
            x = np.asarray(node)[place].reshape([sizes[letter] for letter in letters])
            tree[f"their.{spec.at(part.name)}"] = x
    made = jpaged.params_from(nested(tree), table, config=config)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), made, params))
    with pytest.raises(ConfigError, match=r"the name map gives 'vision\.other'"):
        jpaged.params_from(nested(tree), {**table, "vision.other": ("a", "E")}, config=config)
