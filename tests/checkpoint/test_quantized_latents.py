"""Folders of DeepSeek V3 in FP8 with scales of 128 x 128 blocks, as DeepSeek publishes it, and of
Kimi K2.5, whose experts are in int4 of compressed-tensors: made here at sizes that blocks of 128 do
not divide, and served as what they stand for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, EngineConfig, SamplingParams
from jpaged.checkpoint import load_params
from jpaged.checkpoint.tensors import flat
from jpaged.errors import CheckpointError
from jpaged.models.quantized import is_quantized
from tests.checkpoint.conftest import write_folder
from tests.checkpoint.test_quantized import ENGINE, Made, compressed, compressed_int4, fp8
from tests.golden.configs import CONFIGS
from tests.golden.mtp import file_tensors
from tests.golden.weights import state_dict

NAME = "deepseek_v3_h4_l32_groups"
RAW: dict[str, Any] = CONFIGS[NAME] | {
    "hidden_size": 160,
    "intermediate_size": 224,
    "moe_intermediate_size": 96,
    "q_lora_rank": 136,
    "kv_lora_rank": 144,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
EVEN: dict[str, Any] = RAW | {"hidden_size": 128, "intermediate_size": 256, "q_lora_rank": 128}
EVEN |= {"moe_intermediate_size": 128, "kv_lora_rank": 128, "v_head_dim": 64}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8["activation_scheme"] = "dynamic"
INT4 = compressed("pack-quantized", 4, "group", group_size=32, symmetric=True, actorder=None)
INT4["ignore"] = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
INT4["ignore"] += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


def is_linear(name: str) -> bool:
    """DeepSeek's files have all products in FP8 but those of embeddings, head and routers."""
    return name.endswith("_proj.weight") or name.endswith("_proj_with_mqa.weight")


def is_of_experts(name: str) -> bool:
    return ".mlp.experts." in name


def folders(
    tmp_path: Path,
    raw: dict[str, Any],
    quantization: dict[str, Any],
    make: Callable[..., Made],
    is_packed: Callable[[str], bool],
    *,
    is_kimi: bool = False,
    has_mtp: bool = False,
    lost: str | None = None,
) -> tuple[Path, Path]:
    """A folder in a format, and one in f32 of what it stands for. lost: a tensor left out."""
    rng, tensors = np.random.default_rng(0), state_dict(NAME, raw)
    if has_mtp:
        tensors |= file_tensors(NAME, raw)
    packed: dict[str, np.ndarray] = {}
    for name, tensor in list(tensors.items()):
        if not is_packed(name):
            packed[name] = tensor
            continue
        parts, exact = make(rng, *tensor.shape)
        packed |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in parts.items()}
        tensors[name] = exact.astype(np.float32)
    whole = raw | {"quantization_config": quantization}
    if is_kimi:
        packed = {f"language_model.{name}": tensor for name, tensor in packed.items()}
        packed["vision_tower.encoder.blocks.0.wqkv.weight"] = np.zeros((3, 2), np.float32)
        text = whole | {"model_type": "kimi_k2"}
        whole = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}
        whole |= {"text_config": text, "tie_word_embeddings": False, "eos_token_id": 159}
    packed = {name: np.ascontiguousarray(x) for name, x in packed.items() if name != lost}
    return (
        write_folder(tmp_path / "packed", whole, packed, shards=3),
        write_folder(tmp_path / "plain", raw, tensors),
    )


def deepseek(tmp_path: Path, raw: dict[str, Any], **more: Any) -> tuple[Path, Path]:
    return folders(tmp_path, raw, FP8, fp8, is_linear, **more)


def kimi(tmp_path: Path, raw: dict[str, Any], **more: Any) -> tuple[Path, Path]:
    return folders(tmp_path, raw, INT4, compressed_int4, is_of_experts, is_kimi=True, **more)


MODELS = {"deepseek": (deepseek, "fp8"), "kimi": (kimi, "int4")}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_was_published(tmp_path: Path, name: str) -> None:
    """What is absorbed is read plain, rows of rotated pairs in our order; the plan says as much."""
    make, form = MODELS[name]
    packed, plain = make(tmp_path, RAW)
    expected, kept = (
        flat(load_params(plain)),
        flat(load_params(packed, dtype="float32"), is_quantized),
    )
    whole = flat(load_params(packed, dequantize=True))
    assert kept.keys() == whole.keys() == expected.keys()
    in_form = {key for key, leaf in kept.items() if is_quantized(leaf)}
    ends = {key.split(".", 2)[2] for key in in_form}
    products = {"mlp.experts.gate_up", "mlp.experts.down"}
    if name == "deepseek":
        products |= {f"latent.{x}" for x in ("q_a", "q", "kv", "out")}
        products |= {f"mlp.{x}" for x in ("gate_up", "down", "shared.gate_up", "shared.down")}
    assert ends == products
    for key, exact in expected.items():
        leaf = kept[key]
        if key not in in_form:
            assert np.allclose(leaf, exact, rtol=1e-6, atol=0), key
            continue
        assert (leaf.form.name, leaf.shape) == (form, exact.shape)
        found = np.asarray(jax.jit(lambda leaf: leaf.whole())(leaf))
        assert np.allclose(found, exact, rtol=1e-6, atol=0), key
    planned = jpaged.plan_memory(packed, EngineConfig(**ENGINE))
    assert planned.weights == sum(leaf.nbytes for leaf in kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_its_head_is_read_plain(tmp_path: Path, name: str) -> None:
    """The layer past the last, in FP8 or with experts in int4 as the model's; also beside images.
    The model is read as if it were not there.
    """
    packed, plain = MODELS[name][0](tmp_path, RAW, has_mtp=True)
    expected = flat(load_params(plain, mtp=True))
    whole = flat(load_params(packed, mtp=True, dequantize=True), is_quantized)
    assert whole.keys() == expected.keys()
    for key, exact in expected.items():
        np.testing.assert_allclose(whole[key], exact, rtol=4e-3, err_msg=key)  # read as bfloat16
    assert load_params(packed).keys() == load_params(plain).keys()


@pytest.mark.parametrize(
    ("name", "raw", "devices"),
    [
        ("deepseek", RAW, 1),
        ("kimi", RAW, 1),
        ("deepseek", EVEN, 2),
        ("kimi", EVEN | {"moe_intermediate_size": 192}, 2),
    ],
    ids=["deepseek", "kimi", "deepseek_tp2", "kimi_tp2"],
)
def test_it_is_served_as_it_lies(
    tmp_path: Path, name: str, raw: dict[str, Any], devices: int
) -> None:
    packed, plain = MODELS[name][0](tmp_path, raw)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [list(range(3, 40)), [70, 3]]
    answers = []
    for folder in (packed, plain):
        llm = LLM(folder, tensor_parallel_size=devices, **ENGINE)
        outs = llm.generate(prompts, greedy, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].token_logprobs) for o in outs])
        llm.close()
    for (ours, logprobs), (theirs, expected) in zip(*answers, strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 2e-4


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    """A weight in FP8 without its scales is no plain weight."""
    lost = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"
    packed, _ = folders(tmp_path, RAW, FP8, fp8, is_linear, lost=lost)
    with pytest.raises(CheckpointError, match="kv_b_proj"):
        load_params(packed)
