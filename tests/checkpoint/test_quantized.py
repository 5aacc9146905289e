"""Folders whose linear weights are in 8 or 4 bits: each format packed number by number as its
publishers do, and read back as they lie and as what they stand for.
"""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import jpaged
from jpaged import LLM, EngineConfig, SamplingParams
from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.tensors import flat
from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.quantized import is_quantized
from tests.checkpoint.conftest import SMALL, make_tensors, write_folder

RAW = {**SMALL, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
RAW |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GROUP = 32
ROOT = Path(__file__).parents[2]
ENGINE: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 8,
    "num_blocks": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "seq_buckets": (8,),
    "dtype": "float32",
}

type Made = tuple[dict[str, np.ndarray], np.ndarray]  # the file's tensors, and what they stand for


def words(numbers: np.ndarray) -> np.ndarray:
    """int32 of eight 4-bit numbers each, the first in the lowest bits: [..., 8] to [...]."""
    out = np.zeros(numbers.shape[:-1], np.uint32)
    for i in range(8):
        out |= numbers[..., i].astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def codes(rng: Any, N: int, E: int, group: int = GROUP) -> tuple[Any, Any, Any]:
    """Numbers [N, E] and zeros [N, E/g] from 0 to 15, f16 scales [N, E/g]."""
    numbers = rng.integers(0, 16, (N, E)).astype(np.uint8)
    zeros = rng.integers(1, 16, (N, E // group)).astype(np.uint8)
    return numbers, zeros, rng.uniform(0.01, 0.1, (N, E // group)).astype(np.float16)


def meant(numbers: Any, zeros: Any, scales: Any, group: int = GROUP) -> np.ndarray:
    out = np.zeros(numbers.shape)
    for n, e in np.ndindex(*numbers.shape):
        zero, scale = float(zeros[n, e // group]), float(scales[n, e // group])
        out[n, e] = (float(numbers[n, e]) - zero) * scale
    return out


def awq(rng: Any, N: int, E: int) -> Made:
    """AutoAWQ's WQLinear_GEMM: transposed, of 8 outputs the even ones first in a word."""
    numbers, zeros, scales = codes(rng, N, E)

    def packed(x: np.ndarray) -> np.ndarray:
        return words(x.T.reshape(x.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]])

    tensors = {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales.T.copy()}
    return tensors, meant(numbers, zeros, scales)


def gptq(rng: Any, N: int, E: int, less: int = 1) -> Made:
    """AutoGPTQ's QuantLinear: transposed, 8 inputs a word; zeros less one in its first format."""
    numbers, zeros, scales = codes(rng, N, E)
    tensors = {
        "qweight": words(numbers.T.reshape(-1, 8, N).swapaxes(1, 2)),
        "qzeros": words((zeros - less).T.reshape(E // GROUP, -1, 8)),
        "scales": scales.T.copy(),
        "g_idx": (np.arange(E) // GROUP).astype(np.int32),
    }
    return tensors, meant(numbers, zeros, scales)


def gptq_v2(rng: Any, N: int, E: int) -> Made:
    return gptq(rng, N, E, less=0)


def compressed_int4(rng: Any, N: int, E: int, *, symmetric: bool = True) -> Made:
    """compressed-tensors' pack_to_int32: along inputs; zeros along outputs."""
    numbers, zeros, scales = codes(rng, N, E)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    tensors = {
        "weight_packed": words(numbers.reshape(N, -1, 8)),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array([N, E], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.reshape(-1, 8, E // GROUP).swapaxes(1, 2))
    return tensors, meant(numbers, zeros, scales.astype(ml_dtypes.bfloat16))


def compressed_zeros(rng: Any, N: int, E: int) -> Made:
    return compressed_int4(rng, N, E, symmetric=False)


def floats(rng: Any, N: int, E: int) -> np.ndarray:
    return (30 * rng.standard_normal((N, E))).astype(ml_dtypes.float8_e4m3fn)


def fp8(rng: Any, N: int, E: int) -> Made:
    """DeepSeek's and Qwen's: blocks of 128 outputs and 128 inputs, the last ones cut."""
    values = floats(rng, N, E)
    scales = rng.uniform(1e-3, 3e-3, (-(-N // 128), -(-E // 128))).astype(np.float32)
    out = np.zeros((N, E))
    for n, e in np.ndindex(N, E):
        out[n, e] = float(values[n, e]) * float(scales[n // 128, e // 128])
    return {"weight": values, "weight_scale_inv": scales}, out


def fp8_tensor(rng: Any, N: int, E: int) -> Made:
    """Ministral 3's: one scale for all, and one of activations, which is not used."""
    values, scale = floats(rng, N, E), rng.uniform(1e-3, 3e-3, ()).astype(np.float32)
    tensors = {"weight": values, "weight_scale_inv": scale, "activation_scale": 2 * scale}
    return tensors, values.astype(np.float64) * scale


def compressed_fp8(rng: Any, N: int, E: int) -> Made:
    values, scales = floats(rng, N, E), rng.uniform(1e-3, 3e-3, (N, 1)).astype(np.float32)
    return {"weight": values, "weight_scale": scales}, values.astype(np.float64) * scales


def compressed_int8(rng: Any, N: int, E: int) -> Made:
    values = rng.integers(-127, 128, (N, E)).astype(np.int8)
    scales = rng.uniform(1e-4, 1e-3, (N, 1)).astype(ml_dtypes.bfloat16)
    return {"weight": values, "weight_scale": scales}, values * scales.astype(np.float64)


def compressed(layout: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


FORMATS: dict[str, tuple[Callable[..., Made], str, dict[str, Any]]] = {
    "fp8": (fp8, "fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8_tensor": (fp8_tensor, "fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
    "awq": (awq, "int4", {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "gptq": (gptq, "int4", {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq_v2": (
        gptq_v2,
        "int4",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "compressed_int4": (
        compressed_int4,
        "int4",
        compressed("pack-quantized", 4, "group", group_size=GROUP),
    ),
    "compressed_zeros": (
        compressed_zeros,
        "int4",
        compressed("pack-quantized", 4, "group", group_size=GROUP, symmetric=False),
    ),
    "compressed_fp8": (compressed_fp8, "fp8", compressed("float-quantized", 8, "channel")),
    "compressed_int8": (compressed_int8, "int8", compressed("int-quantized", 8, "channel")),
}


def folders(tmp_path: Path, name: str) -> tuple[Path, Path, str]:
    """A folder in a format and one of what it stands for, in f32; and the form it is kept in."""
    make, form, config = FORMATS[name]
    rng, tensors = np.random.default_rng(0), make_tensors(RAW)
    packed: dict[str, np.ndarray] = {}
    for key, tensor in tensors.items():
        if "proj" not in key:
            packed[key] = tensor = tensor * 0.1 if tensor.ndim > 1 else 1 + tensor * 0.1
            tensors[key] = packed[key]
            continue
        own, exact = make(rng, *tensor.shape)
        packed |= {f"{key.removesuffix('weight')}{kind}": part for kind, part in own.items()}
        tensors[key] = exact.astype(np.float32)
    packed = {key: np.ascontiguousarray(part) for key, part in packed.items()}
    return (
        write_folder(tmp_path / name, RAW | {"quantization_config": config}, packed),
        write_folder(tmp_path / "plain", RAW, tensors),
        form,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_what_was_published(tmp_path: Path, name: str) -> None:
    packed, plain, form = folders(tmp_path, name)
    expected = flat(load_params(plain))
    kept, whole = (flat(load_params(packed, dequantize=how), is_quantized) for how in (False, True))
    assert kept.keys() == whole.keys() == expected.keys()
    planned = jpaged.plan_memory(packed, EngineConfig(**ENGINE))
    assert planned.weights == sum(leaf.nbytes for leaf in kept.values())
    for key, exact in expected.items():
        if not is_quantized(kept[key]):
            assert not any(part in key for part in ("qkv", "out", "gate_up", "down")), key
            continue
        assert (kept[key].form.name, kept[key].shape) == (form, exact.shape)
        assert kept[key].values.nbytes == exact.size // (2 if form == "int4" else 1)
        found = np.asarray(jax.jit(lambda leaf: leaf.whole())(kept[key]))
        assert np.allclose(found, exact, rtol=1e-6, atol=0)
        assert np.array_equal(whole[key], np.asarray(exact).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["fp8", "awq", "compressed_int8"])
@pytest.mark.parametrize("devices", [1, 2])
def test_it_is_served_as_it_lies(tmp_path: Path, name: str, devices: int) -> None:
    packed, plain, form = folders(tmp_path, name)
    if (name, devices) == ("fp8", 2):  # 192 inputs in blocks of 64 do not split
        with pytest.raises(ConfigError, match=r"(do|does) not split"):
            LLM(packed, tensor_parallel_size=2, **ENGINE)
        return
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = []
    for folder in (packed, plain):
        llm = LLM(folder, tensor_parallel_size=devices, **ENGINE)
        outs = llm.generate([[5, 9, 23], [70, 3]], greedy, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].token_logprobs) for o in outs])
        llm.close()
    for (ours, logprobs), (theirs, expected) in zip(*answers, strict=True):
        assert ours == theirs and np.abs(logprobs - expected).max() < 5e-5
    assert form in {"fp8", "int4", "int8"}


def test_a_plain_folder_is_quantised_leaf_by_leaf(tmp_path: Path) -> None:
    """As params that are there already are, and nothing plain is kept beside."""
    folder = write_folder(tmp_path / "plain", RAW, make_tensors(RAW))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers, sizes = [], []
    for model in (folder, load_params(folder)):
        llm = LLM(model, quantization="int8", **ENGINE)
        out = llm.generate([[5, 9, 23]], greedy, use_tqdm=False)[0].outputs[0]
        answers.append((out.token_ids, out.token_logprobs))
        assert llm.session.served.params is not None
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(llm.session.served.params)))
        if model is folder:
            llm.update_params(load_params(folder))  # plain ones take their place
        llm.close()
    assert answers[0][0] == answers[1][0] and np.array_equal(answers[0][1], answers[1][1])
    assert sizes[0] < 0.35 * sizes[1]


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_what_is_not_finite_is_refused_by_name(tmp_path: Path, part: str) -> None:
    packed, _, _ = folders(tmp_path, "fp8")
    file = packed / "model.safetensors"
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    own = json.loads(raw[8 : 8 + size])[f"model.layers.1.mlp.down_proj.{part}"]
    nan = np.array(np.nan, {"F8_E4M3": ml_dtypes.float8_e4m3fn}.get(own["dtype"], np.float32))
    at = 8 + size + own["data_offsets"][0] + 2 * nan.nbytes
    raw[at : at + nan.nbytes] = nan.tobytes()
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"layers\.1\.\S+ holds a value in fp8 that is n"):
        load_params(packed)


def test_a_folder_of_plain_weights_is_made_of_it(tmp_path: Path) -> None:
    """`convert.py --dequantize`."""
    packed, _, _ = folders(tmp_path, "awq")
    convert = runpy.run_path(str(ROOT / "scripts" / "convert.py"))["main"]
    assert convert([str(packed), str(tmp_path / "refused")]) == 1
    assert convert([str(packed), str(tmp_path / "out"), "--dequantize"]) == 0
    found, expected = load_params(tmp_path / "out"), load_params(packed, dequantize=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_does_not_fit(tmp_path: Path) -> None:
    packed, plain, _ = folders(tmp_path, "gptq")
    params = load_params(packed)
    with pytest.raises(CheckpointError, match="is in 8 or 4 bits, which Orbax folders do not hold"):
        save_params(params, tmp_path / "saved")
    with pytest.raises(ConfigError, match="is in int4 already, quantization= asks for int8"):
        LLM(params, quantization="int8", **ENGINE)
    llm = LLM(packed, **ENGINE)
    with pytest.raises(ConfigError, match="in other forms than those that this engine"):
        llm.update_params(load_params(plain))
    llm.close()
    jpaged.release()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes'\): not one of fp8, awq, gptq, compre"),
        ({"quant_method": "awq", "bits": 8}, r"'awq'\): 8 bits: only 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv': only gemm"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits: only 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin': only gptq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2': only e4m3"),
        (compressed("nvfp4-pack-quantized", 4, "group"), "format='nvfp4-pack-quantized': only"),
        (compressed("pack-quantized", 4, "group", actorder="group"), "actorder='group'"),
        ({"quant_method": "mxfp4"}, r"'mxfp4'\): not one of"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jpaged.ModelConfig.from_hf(RAW | {"quantization_config": config})


def test_damage_is_named(tmp_path: Path) -> None:
    make, _, config = FORMATS["gptq"]
    rng, tensors = np.random.default_rng(0), make_tensors(RAW)
    for key in [key for key in tensors if "proj" in key]:
        own, _ = make(rng, *tensors.pop(key).shape)
        own["g_idx"] = own["g_idx"][::-1].copy()
        tensors |= {f"{key.removesuffix('weight')}{kind}": part for kind, part in own.items()}
    tensors = {key: np.ascontiguousarray(part) for key, part in tensors.items()}
    raw = RAW | {"quantization_config": config}
    folder = write_folder(tmp_path / "order", raw, tensors)
    with pytest.raises(CheckpointError, match=r"g_idx: inputs are grouped in another order"):
        load_params(folder)
    lost = {key: x for key, x in tensors.items() if key != "model.layers.1.mlp.up_proj.qzeros"}
    with pytest.raises(CheckpointError, match=r"1 missing \(model.layers.1.mlp.up_proj.qzeros\)"):
        load_params(write_folder(tmp_path / "lost", raw, lost))
