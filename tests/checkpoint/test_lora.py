"""Adapters from folders as PEFT writes them, and from the LoRA parts of other projects' trees."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jpaged
from jpaged import CheckpointError, ConfigError, ModelConfig, Params
from jpaged.checkpoint.hf import stored_names
from jpaged.checkpoint.peft import load_adapter
from jpaged.models.lora import Pairs, targets
from tests.golden.configs import CONFIGS
from tests.tiny import CONFIG, config, make_params

RANK = 2
MIXTRAL = config(
    family="mixtral",
    qk_norm=False,
    num_experts=3,
    experts_per_token=2,
    expert_size=20,
    norm_topk_prob=True,
)
PHI = config(family="phi3", qk_norm=False)
GLM = ModelConfig.from_hf(CONFIGS["glm4_g4_d32"])
DEEPSEEK = ModelConfig.from_hf(CONFIGS["deepseek_v3_h4_l32_groups"])


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "use_dora": False, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | changes))
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def tensors(model: Any = CONFIG, modules: tuple[str, ...] = ("q_proj", "down")) -> Any:
    """lora_A [r, in] and lora_B [out, r] of these modules of both layers, by PEFT's names."""
    rng, found = np.random.default_rng(0), {}
    stored = [place for places in stored_names(model).values() for place in places]
    for place in stored:
        if len(place.shape) == 2 and any(module in place.name for module in modules):
            rows = max(s.first + s.shape[0] for s in stored if s.name == place.name)
            name = f"base_model.model.{place.name.removesuffix('.weight')}"
            sides = {"A": (RANK, place.shape[1]), "B": (rows, RANK)}
            end = "lora_{}.weight"
            if "embed" in name:  # as PEFT has them: parameters, of the table transposed
                end, sides = "lora_embedding_{}", {"A": (RANK, rows), "B": (place.shape[1], RANK)}
            for side, shape in sides.items():
                found[f"{name}.{end.format(side)}"] = rng.standard_normal(shape, np.float32)
    return found


def weights_of(params: Params) -> dict[str, np.ndarray]:
    """By the names of Hugging Face, parts that a file stores as one beside each other."""
    found: dict[str, list[np.ndarray]] = {}
    leaves = jax.tree.leaves_with_path(dict(params))
    names = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    flat = {names(path): np.asarray(x) for path, x in leaves}
    for ours, places in stored_names(params.config).items():
        for place in places:
            part = flat[ours][place.fills].reshape(place.shape)
            if place.order is not None:
                part = part[np.argsort(place.order)]
            found.setdefault(place.name, []).append(part)
    return {name: np.concatenate(parts) for name, parts in found.items()}


@pytest.mark.parametrize(
    ("model", "modules", "changes", "scale"),
    [
        (CONFIG, ("q_proj", "down_proj"), {}, 1.5),
        (CONFIG, ("proj",), {"use_rslora": True}, 3 / 2**0.5),
        (CONFIG, ("v_proj",), {"alpha_pattern": {"v_proj": 1}}, 0.5),
        (PHI, ("qkv_proj", "gate_up_proj"), {}, 1.5),  # one pair for what we have in parts
        (CONFIG, ("embed_tokens", "lm_head", "v_proj"), {}, 1.5),
        (GLM, ("q_proj", "k_proj", "v_proj"), {}, 1.5),  # pairs of rope side by side
        (DEEPSEEK, ("kv_b_proj",), {}, 1.5),
        (DEEPSEEK, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), {}, 1.5),
        (MIXTRAL, ("w1", "w2", "w3", "q_proj"), {"use_rslora": True}, 3 / 2**0.5),
        (MIXTRAL, ("experts.1.w3", "experts.0.w2"), {}, 1.5),  # of some experts alone
    ],
)
def test_a_peft_folder(
    model: Any, modules: tuple[str, ...], changes: Any, scale: float, tmp_path: Path
) -> None:
    """W + scale * B A in Hugging Face's own terms."""
    params, stored = make_params(0, model), tensors(model, modules)
    folder = write(tmp_path / "a", stored, **changes)
    pairs = {name: tuple(pair) for name, pair in load_adapter(folder, model).items()}
    before, after = weights_of(params), weights_of(jpaged.merged(params, pairs))
    for name, weight in before.items():
        at = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        delta = np.zeros_like(weight)
        if f"{at}A.weight" in stored:
            delta = scale * stored[f"{at}B.weight"] @ stored[f"{at}A.weight"]
        elif f"{at}embedding_A" in stored:
            delta = scale * (stored[f"{at}embedding_B"] @ stored[f"{at}embedding_A"]).T
        np.testing.assert_allclose(after[name], weight + delta, atol=1e-5)
    assert len(pairs) >= model.num_layers


def test_a_base_that_lies_in_the_folder(tmp_path: Path) -> None:
    """PEFT writes it beside adapters of the embedding and the head; of another size it is refused,
    and so is any other module's.
    """
    good = tensors(modules=("embed_tokens", "lm_head"))
    shape = (CONFIG.vocab_size, CONFIG.hidden_size)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    head = "base_model.model.lm_head.base_layer.weight"
    found = load_adapter(
        write(tmp_path / "a", {**good, name: np.ones(shape), head: np.ones(shape)}), CONFIG
    )
    assert set(found) == {"embed.weight", "lm_head.weight"}
    other = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    for changed, at in ((shape[0] + 1, name), (shape[0], other)):
        with pytest.raises(CheckpointError, match=r"base_layer is of shape .* was changed"):
            load_adapter(write(tmp_path / "b", {**good, at: np.ones((changed, shape[1]))}), CONFIG)


def test_the_head_of_a_tied_model(tmp_path: Path) -> None:
    """A folder adapts it by its own name, and the embedding stays."""
    tied = config(tie_word_embeddings=True)
    stored = tensors(modules=("lm_head",))
    pairs = load_adapter(write(tmp_path / "a", stored), tied)
    params = make_params(0, tied)
    merged = jpaged.merged(params, {name: tuple(pair) for name, pair in pairs.items()})
    at = "base_model.model.lm_head.lora_"
    delta = 1.5 * stored[f"{at}B.weight"] @ stored[f"{at}A.weight"]
    embed = params["embed"]["weight"]
    np.testing.assert_allclose(merged["lm_head"]["weight"], embed + delta, atol=1e-5)
    assert merged["embed"]["weight"] is embed


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_dora": True}, "use_dora=True: DoRA"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"r": 4}, "of rank 2, by adapter_config.json r=4"),
        ({"lora_alpha": None}, "lora_alpha=None"),
    ],
)
def test_a_folder_that_is_refused(changes: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_adapter(write(tmp_path / "a", tensors(), **changes), CONFIG)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    good = tensors()
    name = next(iter(good)).removesuffix("lora_A.weight")

    def refused(changed: Any, match: str) -> None:
        with pytest.raises((CheckpointError, ConfigError), match=match):
            load_adapter(write(tmp_path / "a", changed), CONFIG)

    refused({k: x for k, x in good.items() if k != f"{name}lora_B.weight"}, "lacks lora_B")
    refused({**good, f"{name}lora_magnitude_vector.weight": np.ones(3)}, "no lora_A or lora_B")
    refused({n.replace("q_proj", "embed"): x for n, x in good.items()}, "no weight of this model")
    router = "base_model.model.model.layers.0.mlp.gate.lora_A.weight"
    refused({router: np.ones((2, 3), np.float32)}, "no weight of this model")
    refused({f"{name}lora_A.weight": np.ones((2, 3))}, "of dtype F64")
    refused({n.replace("q_proj", "lm_head"): x for n, x in good.items()}, "no weight of this model")
    refused({**good, f"{name}lora_B.weight": np.ones((5, RANK), np.float32)}, "B is of shape")
    refused({}, "holds no adapter")
    with pytest.raises(CheckpointError, match=r"adapter_config.json"):
        load_adapter(tmp_path / "none", CONFIG)
    (write(tmp_path / "b") / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="pickle"):
        load_adapter(tmp_path / "b", CONFIG)


def tunix_lora(model: Any = CONFIG) -> tuple[Any, Any]:
    """LoRA parts as qwix adds them to tunix's Qwen3, and W + 2 A B in tunix's terms."""
    rng, tree, deltas = np.random.default_rng(1), {}, {}
    E, F = model.hidden_size, model.intermediate_size
    K, G, D = model.num_kv_heads, model.group_size, model.head_dim
    sides = {
        "attn.q_proj.w": ((E,), (K * G, D)),
        "attn.k_proj.w": ((E,), (K, D)),
        "attn.o_proj.w": ((K * G, D), (E,)),
        "mlp.gate_proj.kernel": ((E,), (F,)),
        "mlp.down_proj.kernel": ((F,), (E,)),
    }
    for layer in range(model.num_layers):
        for path, (inputs, outputs) in sides.items():
            a = rng.standard_normal((*inputs, RANK)).astype(np.float32)
            b = rng.standard_normal((RANK, *outputs)).astype(np.float32)
            at = f"layers.{layer}.{path}"
            tree[f"{at}_lora_a"], tree[f"{at}_lora_b"] = jnp.asarray(a), jnp.asarray(b)
            deltas[at] = 2.0 * np.tensordot(a, b, axes=1)
    return tree, deltas


def test_a_tunix_tree() -> None:
    """What it stands for is what params_from merges."""
    params, (lora, deltas) = make_params(), tunix_lora()
    found = jpaged.lora_from(lora, "tunix_qwen3", config=CONFIG, scale=2.0)
    merged = jpaged.merged(params, found)
    K, G, D, E = CONFIG.num_kv_heads, CONFIG.group_size, CONFIG.head_dim, CONFIG.hidden_size
    for layer in ("0", "1"):
        own, new = params["layers"][layer], merged["layers"][layer]
        change = jax.tree.map(lambda a, b: np.asarray(a - b), new, own)
        at = f"layers.{layer}."
        qkv = change["attention"]["qkv"]  # [K, G+2, D, E]
        q = deltas[f"{at}attn.q_proj.w"].reshape(E, K, G, D).transpose(1, 2, 3, 0)
        np.testing.assert_allclose(qkv[:, :G], q, atol=1e-5)
        k = deltas[f"{at}attn.k_proj.w"].transpose(1, 2, 0)
        np.testing.assert_allclose(qkv[:, G], k, atol=1e-5)
        assert not qkv[:, G + 1].any()
        out = deltas[f"{at}attn.o_proj.w"].reshape(K, G, D, E).transpose(3, 0, 1, 2)
        np.testing.assert_allclose(change["attention"]["out"], out, atol=1e-5)
        gate = deltas[f"{at}mlp.gate_proj.kernel"].T
        np.testing.assert_allclose(change["mlp"]["gate_up"][0], gate, atol=1e-5)
        assert not change["mlp"]["gate_up"][1].any()
        down = deltas[f"{at}mlp.down_proj.kernel"].T
        np.testing.assert_allclose(change["mlp"]["down"], down, atol=1e-5)


def test_trees_that_are_refused() -> None:
    lora, _ = tunix_lora()

    def refused(tree: Any, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            jpaged.lora_from(tree, "tunix_qwen3", config=CONFIG, scale=1.0)

    refused({"layers.0.attn.q_proj.w": jnp.ones(3)}, "no LoRA parts")
    refused(lora | {"embedder.input_embedding_lora_a": jnp.ones((97, 2))}, "cannot be an adapter")
    name = "layers.0.attn.q_proj.w_lora_a"
    refused(lora | {name: jnp.ones((7, RANK))}, "is of shape")


def test_parts(tmp_path: Path) -> None:
    """Names of all parts, of a mixture too; its experts have them where that is asked."""
    mixture = config(
        family="qwen2_moe",
        qk_norm=False,
        num_experts=3,
        experts_per_token=2,
        expert_size=40,
        shared_expert_size=26,
        dense_layers=(1,),
    )
    names = set(targets(mixture))
    assert "layers.0.mlp.shared.gate" in names and "layers.1.mlp.gate" in names
    assert not any("experts" in name or "router" in name for name in names)
    assert "layers.0.mlp.experts.up" in targets(mixture, ("experts",)).keys() - names
    pairs: Pairs = load_adapter(write(tmp_path / "a", tensors()), CONFIG)
    assert set(pairs) <= set(targets(CONFIG))
