"""Experts that are stored together: in mxfp4, and what does not fit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jpaged
from jpaged import CheckpointError, ConfigError
from jpaged.checkpoint.load import find_weights
from jpaged.checkpoint.tensors import flat
from jpaged.models.quantized import MXFP4, dequantized
from tests.golden.reference import load

GOLDEN = load("gpt_oss_g2_d32_yarn")
GREEDY = jpaged.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 8,
    "num_blocks": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "seq_buckets": (8,),
}
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def value(half_byte: int, exponent: int) -> float:
    """Of four bits, sign, two of exponent, one of mantissa, and a scale."""
    sign, high, low = half_byte >> 3, (half_byte >> 1) & 3, half_byte & 1
    size = 0.5 * low if high == 0 else (1 + 0.5 * low) * 2.0 ** (high - 1)
    return (-size if sign else size) * 2.0 ** (exponent - 127)


def packed() -> dict[str, np.ndarray]:
    """The reference's tensors in bf16, the experts' weights of random bytes."""
    tensors: dict[str, np.ndarray] = {}
    for name, x in GOLDEN.tensors().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = x.astype(ml_dtypes.bfloat16)
            continue
        rng = np.random.default_rng(len(tensors))
        experts, inputs, outputs = x.shape
        groups = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*groups, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 123, groups, np.uint8)
    return tensors


def unpacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same as transformers stores them when it has dequantised them."""
    out = {k: v for k, v in tensors.items() if not k.endswith(("_blocks", "_scales"))}
    for name, blocks in tensors.items():
        if not name.endswith("_blocks"):
            continue
        whole = name.removesuffix("_blocks")
        scales = tensors[f"{whole}_scales"]
        experts, outputs, groups, _ = blocks.shape
        rows = np.zeros((experts, groups * 32, outputs), np.float32)
        for (x, row, group, byte), pair in np.ndenumerate(blocks):
            at, exponent = 32 * group + 2 * byte, int(scales[x, row, group])
            rows[x, at, row] = value(int(pair) & 15, exponent)
            rows[x, at + 1, row] = value(int(pair) >> 4, exponent)
        out[whole] = rows.astype(ml_dtypes.bfloat16)
        assert (out[whole].astype(np.float32) == rows).all(), "exact in bfloat16"
    return out


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GOLDEN.config | config))
    return folder


def test_mxfp4_is_read_as_what_it_means(tmp_path: Path) -> None:
    tensors = packed()
    folder = write(tmp_path / "a", tensors, quantization_config=QUANTIZED)
    kept, found = jpaged.load_params(folder), jpaged.load_params(folder, dequantize=True)
    wanted = jpaged.load_params(write(tmp_path / "b", unpacked(tensors)))
    planned = jpaged.plan_memory(folder).weights
    assert planned == sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
    for i in range(3):
        experts = [p["layers"][str(i)]["mlp"]["experts"] for p in (found, wanted)]
        assert set(experts[0]) == {"gate_up", "gate_up_bias", "down", "down_bias"}
        for name, x in experts[0].items():
            assert x.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(x, experts[1][name], err_msg=name)
        for name in ("gate_up", "down"):
            as_it_lies = kept["layers"][str(i)]["mlp"]["experts"][name]
            assert (
                as_it_lies.form == MXFP4 and as_it_lies.values.nbytes == experts[1][name].size // 2
            )
            np.testing.assert_array_equal(as_it_lies.whole(), experts[1][name].astype(jnp.float32))
    ids = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    served = [jpaged.LLM(p, **SIZES).score(ids) for p in (kept, found)]
    for ours, theirs in zip(*served, strict=True):
        assert np.abs(np.subtract(ours, theirs)[1:]).max() < 0.05, "in bf16, as the folder has it"
    gate_up = np.asarray(wanted["layers"]["0"]["mlp"]["experts"]["gate_up"], np.float32)
    stored = unpacked(tensors)["model.layers.0.mlp.experts.gate_up_proj"].astype(np.float32)
    np.testing.assert_array_equal(gate_up[3, 0], stored[3, :, 0::2].T)  # gates
    np.testing.assert_array_equal(gate_up[3, 1], stored[3, :, 1::2].T)  # ups


def test_every_number_of_mxfp4() -> None:
    numbers = np.tile(np.arange(16, dtype=np.uint8), 2)[None]
    scales = np.full((1, 1), 2.0, np.float32)
    found = dequantized(numbers, scales, MXFP4.unpacked)
    assert isinstance(found, np.ndarray) and found.dtype == np.float32
    assert found.tolist() == [[2 * value(n, 127) for n in range(16)] * 2]


def test_experts_are_served_as_they_lie(tmp_path: Path) -> None:
    """As the plain ones that they stand for, to rounding of f32."""
    tensors, answers = packed(), []
    folders = (
        write(tmp_path / "a", tensors, quantization_config=QUANTIZED),
        write(tmp_path / "b", unpacked(tensors)),
    )
    for folder in folders:
        llm = jpaged.LLM(folder, dtype="float32", **SIZES)
        outs = llm.generate([[5, 9, 23], [70, 3]], GREEDY, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].token_logprobs) for o in outs])
        llm.close()
    for (ours, logprobs), (theirs, expected) in zip(*answers, strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 5e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), "1 missing"),
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_bias"), "1 missing"),
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_blocks"), "down_proj"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(np.uint8)[::2]}),
            "1 not bfloat16",
        ),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: Any, said: str) -> None:
    tensors = packed()
    change(tensors)
    with pytest.raises(CheckpointError, match=said):
        jpaged.load_params(write(tmp_path / "a", tensors, quantization_config=QUANTIZED))


def test_other_quantizations_and_families(tmp_path: Path) -> None:
    tensors = packed()
    with pytest.raises(ConfigError, match="quantization_config \\('fp8'\\)"):
        jpaged.load_params(
            write(tmp_path / "a", tensors, quantization_config={"quant_method": "fp8"})
        )
    with pytest.raises(ConfigError, match="quantization_config \\('mxfp4'\\)"):
        jpaged.ModelConfig.from_hf(load("qwen3_g7_d80").config | {"quantization_config": QUANTIZED})


def test_shares_are_of_the_whole(tmp_path: Path) -> None:
    """What one of several processes reads: some experts, and a share of their width."""
    folder = write(tmp_path / "a", packed(), quantization_config=QUANTIZED)
    whole = flat(jpaged.load_params(folder, dequantize=True))
    config = jpaged.ModelConfig.coerce(folder)
    weights = find_weights(folder, config)
    wide = (slice(2, 6), slice(None), slice(32, 64), slice(None))
    for name, index in (
        ("layers.1.mlp.experts.gate_up", wide),
        ("layers.1.mlp.experts.gate_up_bias", wide[:3]),
        ("layers.1.mlp.experts.down", (*wide[:2], wide[2])),
    ):
        x = whole[name]
        found = weights[name].read_share(index)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, x[index], err_msg=name)
