"""load_params from Hugging Face folders: what it reads, how it fuses, what it refuses."""

import dataclasses
import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.load import find_weights, read_params
from jpaged.checkpoint.tensors import flat
from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.params import param_shapes, param_specs
from jpaged.models.weight import Piece, Weight
from tests.checkpoint.conftest import make_tensors

Make = Callable[..., Path]


def expected(raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The canonical tensors, put together head by head, apart from the loader's own table."""
    heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    d = raw.get("head_dim") or raw["hidden_size"] // heads
    group = heads // kv
    want = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
    }
    if not raw["tie_word_embeddings"]:
        want["lm_head.weight"] = tensors["lm_head.weight"]
    for i in range(raw["num_hidden_layers"]):
        t = {
            k.removeprefix(f"model.layers.{i}."): v
            for k, v in tensors.items()
            if k.startswith(f"model.layers.{i}.")
        }
        at = f"layers.{i}.attention."

        def heads_of(kind: str, t: dict[str, np.ndarray] = t) -> np.ndarray:
            rows = []
            for k in range(kv):
                mine = [
                    t[f"self_attn.q_proj.{kind}"][(k * group + j) * d :][:d] for j in range(group)
                ]
                rows.append(
                    [*mine, *(t[f"self_attn.{x}_proj.{kind}"][k * d : (k + 1) * d] for x in "kv")]
                )
            return np.array(rows)

        out = t["self_attn.o_proj.weight"]
        want |= {
            f"layers.{i}.input_norm.scale": t["input_layernorm.weight"],
            f"layers.{i}.post_norm.scale": t["post_attention_layernorm.weight"],
            f"{at}qkv": heads_of("weight"),
            f"{at}out": out.reshape(out.shape[0], kv, group, d),
            f"layers.{i}.mlp.gate_up": np.stack(
                [t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]]
            ),
            f"layers.{i}.mlp.down": t["mlp.down_proj.weight"],
        }
        if "self_attn.q_proj.bias" in t:
            want[f"{at}qkv_bias"] = heads_of("bias")
        if "self_attn.o_proj.bias" in t:
            want[f"{at}out_bias"] = t["self_attn.o_proj.bias"]
        if "self_attn.q_norm.weight" in t:
            want |= {f"{at}{x}_norm.scale": t[f"self_attn.{x}_norm.weight"] for x in "qk"}
    return want


def assert_tensors(params: Any, want: dict[str, np.ndarray]) -> None:
    got = flat(params)
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(np.asarray(got[name]), value, err_msg=name, strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lands_in_its_place(
    make: Make, small: dict[str, Any], dtype: str, shards: int
) -> None:
    tensors = make_tensors(small, dtype)
    folder = make(small, shards=shards, tensors=tensors)
    params = load_params(folder)
    assert_tensors(params, expected(small, tensors))
    assert params.config == ModelConfig.from_hf(small)
    assert params.config.eos_token_ids == (3, 5)
    assert params.source == folder
    assert {k: v.shape for k, v in flat(params).items()} == flat(
        param_shapes(params.config), is_leaf=lambda node: isinstance(node, tuple)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2", "num_key_value_heads": 8},
        {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2},
        {"model_type": "llama", "attention_bias": True, "head_dim": 8, "num_key_value_heads": 1},
        {"model_type": "mistral", "tie_word_embeddings": True},
    ],
)
def test_families(make: Make, small: dict[str, Any], change: dict[str, Any]) -> None:
    raw = small | change
    tensors = make_tensors(raw, "bfloat16")
    assert_tensors(load_params(make(raw, tensors=tensors)), expected(raw, tensors))


def test_tensors_larger_than_a_slab(
    make: Make, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jpaged.checkpoint.hf.SLAB_BYTES", 100
    )  # no tensor's size is a multiple of it
    tensors = make_tensors(small, "float32")
    folder = make(small, tensors=tensors)
    assert_tensors(load_params(folder), expected(small, tensors))
    cast = {name: value.astype(np.float16) for name, value in tensors.items()}
    assert_tensors(load_params(folder, dtype="float16"), expected(small, cast))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_cast(make: Make, small: dict[str, Any], dtype: Any) -> None:
    tensors = make_tensors(small, "float32")
    want = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    assert_tensors(load_params(make(small, tensors=tensors), dtype=dtype), expected(small, want))


def test_cast_that_overflows_is_refused(make: Make, small: dict[str, Any]) -> None:
    tensors = make_tensors(small, "bfloat16")
    tensors["model.norm.weight"][3] = 1e6
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .*float16's range"):
        load_params(make(small, tensors=tensors), dtype="float16")


@pytest.mark.parametrize("dtype", ["int8", "float64", "nonsense", 3])
def test_dtype_that_weights_cannot_have(make: Make, small: dict[str, Any], dtype: Any) -> None:
    with pytest.raises(ConfigError, match="must be float32, bfloat16, float16 or None"):
        load_params(make(small), dtype=dtype)


def test_parts_of_two_dtypes_meet_in_float32(make: Make, small: dict[str, Any]) -> None:
    tensors = make_tensors(small, "bfloat16")
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    params = load_params(make(small, tensors=tensors))
    assert params["layers"]["0"]["attention"]["qkv"].dtype == jnp.float32
    assert params["layers"]["1"]["attention"]["qkv"].dtype == jnp.bfloat16


def test_only_files_that_the_index_names(make: Make, small: dict[str, Any]) -> None:
    folder = make(small, shards=2)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"not safetensors")
    (folder / "model.safetensors").write_bytes(b"nor this")
    (folder / "consolidated.safetensors").write_bytes(b"nor this")
    (folder / "training_args.bin").write_bytes(b"a pickle beside the weights is none of ours")
    load_params(folder)


def test_tied_embeddings_may_carry_a_head_and_buffers_are_skipped(
    make: Make, small: dict[str, Any]
) -> None:
    raw = small | {"tie_word_embeddings": True}
    tensors = make_tensors(raw)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    assert "lm_head" not in load_params(make(raw, tensors=tensors | extra))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 4)])
def test_straight_onto_a_mesh(make: Make, small: dict[str, Any], shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh(shape, ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    tensors = make_tensors(small, "bfloat16")
    params = load_params(make(small, tensors=tensors), mesh=mesh)
    assert_tensors(params, expected(small, tensors))
    attention = params["layers"]["0"]["attention"]
    assert attention["qkv"].sharding == NamedSharding(mesh, PartitionSpec("tp"))
    assert attention["out"].sharding == NamedSharding(mesh, PartitionSpec(None, "tp"))
    assert attention["qkv"].addressable_shards[0].data.shape[0] == 4 // shape[1]
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_shares_are_read_alone(
    make: Make, small: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """As a process of several reads them: the slices that it is asked for, and no more."""
    folder = make(small)
    whole = load_params(folder)
    if kind == "orbax":
        save_params(whole, folder := tmp_path / "orbax")
    stored, config = find_weights(folder, whole.config), whole.config
    specs = flat(param_specs(config, "tp", 2))
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    for name, leaf in flat(dict(whole)).items():
        index = list(NamedSharding(mesh, specs[name]).devices_indices_map(leaf.shape).values())[1]
        read: list[int] = []

        def spied(piece: Piece, read: list[int] = read) -> Piece:
            class Spy:
                def __init__(self, shape: Any):
                    self.array = piece.view(shape)

                def __getitem__(self, at: Any) -> Any:
                    read.append(self.array[at].size)
                    return self.array[at]

            return piece._replace(view=Spy)

        pieces = tuple(map(spied, stored[name].source))
        weight = dataclasses.replace(stored[name], source=pieces, dtype="float32")
        found = weight.read_share(index)
        np.testing.assert_array_equal(found, np.asarray(leaf)[index], err_msg=name)
        assert sum(read) == found.size, name


def test_a_mesh_that_kv_heads_do_not_divide(make: Make, small: dict[str, Any]) -> None:
    """Split by the embedding's axis, an eighth on each device all the same."""
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    tensors = make_tensors(small, "bfloat16")
    params = load_params(make(small, tensors=tensors), mesh=mesh)
    assert_tensors(params, expected(small, tensors))
    qkv = params["layers"]["0"]["attention"]["qkv"]
    assert qkv.sharding == NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))


# What is refused. Nothing may be read, let alone allocated, before the refusal.


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("jpaged.checkpoint.hf.read_entry", read)
    monkeypatch.setattr("jpaged.models.weight.aligned", read)


def refused(folder: Path, match: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error, match=match) as caught:
        load_params(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_reads")
class TestMisfits:
    def test_missing(self, make: Make, small: dict[str, Any]) -> None:
        tensors = {k: v for k, v in make_tensors(small).items() if ".1." not in k}
        refused(
            make(small, tensors=tensors), r"11 missing \(model\.layers\.1\.\S+, \S+, \S+, \.\.\.\)$"
        )

    def test_missing_head(self, make: Make, small: dict[str, Any]) -> None:
        tensors = make_tensors(small | {"tie_word_embeddings": True})
        refused(make(small, tensors=tensors), r"1 missing \(lm_head\.weight\)")

    def test_extra(self, make: Make, small: dict[str, Any]) -> None:
        tensors = make_tensors(small) | {
            "model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)
        }
        refused(
            make(small, tensors=tensors),
            r"1 not in this architecture \(model\.layers\.2\.mlp\.up_proj\.weight\)",
        )

    def test_misshapen(self, make: Make, small: dict[str, Any]) -> None:
        tensors = make_tensors(small)
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros(
            (48, 32), np.float32
        )  # transposed
        refused(
            make(small, tensors=tensors),
            r"1 of another shape \(\S+down_proj\.weight \[48, 32\], config \[32, 48\]\)",
        )

    def test_dtype(self, make: Make, small: dict[str, Any]) -> None:
        tensors = make_tensors(small)
        tensors["model.norm.weight"] = np.zeros(32, np.int8)
        refused(
            make(small, tensors=tensors),
            r"not bfloat16, float16 or float32 \(model\.norm\.weight I8\)",
        )

    def test_all_kinds_in_one_message(self, make: Make, small: dict[str, Any]) -> None:
        tensors = make_tensors(small)
        tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = np.zeros((1, 1), np.float32)
        refused(
            make(small, tensors=tensors),
            "1 missing .*1 not in this architecture .*1 of another shape",
        )


@pytest.mark.usefixtures("no_reads")
class TestDamage:
    @pytest.mark.parametrize("shards", [1, 2])
    @pytest.mark.parametrize("keep", [0, 5, 8, 200, -1])
    def test_truncated(self, make: Make, small: dict[str, Any], shards: int, keep: int) -> None:
        folder = make(small, shards=shards)
        file = sorted(folder.glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:keep])
        refused(folder, rf"{file.name}: .*(truncated|damaged)")

    @pytest.mark.parametrize(
        "junk", [b"junk", b"\xff" * 64, struct.pack("<Q", 4) + b"\x80\x81{}", b"\0" * 8]
    )
    def test_garbage(self, make: Make, small: dict[str, Any], junk: bytes) -> None:
        folder = make(small)
        (folder / "model.safetensors").write_bytes(junk)
        refused(folder, r"model\.safetensors: ")

    @pytest.mark.parametrize(
        "header",
        [
            [],
            "x",
            {"a": 1},
            {"a": {"dtype": "F32", "shape": [2]}},
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
            {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
            {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
            {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
            {x: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for x in "ab"},
            {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        ],
        ids=str,
    )
    def test_damaged_header(self, make: Make, small: dict[str, Any], header: Any) -> None:
        folder = make(small)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
        refused(folder, r"model\.safetensors: .*(damaged|truncated)")

    def test_nested_too_deep(self, make: Make, small: dict[str, Any]) -> None:
        folder = make(small)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
        refused(folder, r"model\.safetensors: truncated or damaged")

    def test_bytes_after_the_end(self, make: Make, small: dict[str, Any]) -> None:
        folder = make(small)
        with (folder / "model.safetensors").open("ab") as f:
            f.write(b"\0\0")
        refused(folder, r"model\.safetensors: .*not fully covered")

    def test_git_lfs_pointer(self, make: Make, small: dict[str, Any]) -> None:
        folder = make(small)
        (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        )
        refused(folder, "Git LFS pointer")

    def test_damaged_index(self, make: Make, small: dict[str, Any]) -> None:
        folder = make(small, shards=2)
        for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
            (folder / "model.safetensors.index.json").write_text(text)
            refused(folder, r"model\.safetensors\.index\.json: ")

    def test_index_names_a_missing_file(self, make: Make, small: dict[str, Any]) -> None:
        folder = make(small, shards=2)
        (folder / "model-00002-of-00002.safetensors").unlink()
        refused(folder, r"model-00002-of-00002\.safetensors: No such file")

    def test_index_names_the_wrong_file(self, make: Make, small: dict[str, Any]) -> None:
        folder = make(small, shards=2)
        index = folder / "model.safetensors.index.json"
        value = json.loads(index.read_text())
        files = sorted(set(value["weight_map"].values()))
        value["weight_map"]["model.norm.weight"] = files[
            value["weight_map"]["model.norm.weight"] == files[0]
        ]
        index.write_text(json.dumps(value))
        refused(folder, r"model\.norm\.weight is not in model-")


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(
    "escape",
    ["../x.safetensors", "/elsewhere/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors"],
)
def test_index_stays_inside_the_folder(make: Make, small: dict[str, Any], escape: str) -> None:
    folder = make(small, shards=2)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = escape
    index.write_text(json.dumps(value))
    save_file(
        load_file(folder / "model-00001-of-00002.safetensors"), folder.parent / "x.safetensors"
    )
    refused(folder, "not a .safetensors file inside the folder")


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.pkl"]
)
def test_pickles_are_refused(make: Make, small: dict[str, Any], file: str) -> None:
    folder = make(small)
    (folder / "model.safetensors").rename(folder / file)
    refused(folder, rf"{file} is a pickle")


@pytest.mark.usefixtures("no_reads")
def test_an_index_of_pickles_is_refused(make: Make, small: dict[str, Any]) -> None:
    folder = make(small, shards=2)
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "'pytorch_model.bin', which is not a .safetensors file")


def test_folders_that_hold_no_checkpoint(tmp_path: Path, make: Make, small: dict[str, Any]) -> None:
    refused(tmp_path / "nowhere", "nowhere: no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"config\.json: no such file")
    folder = make(small)
    (folder / "model.safetensors").unlink()
    refused(folder, "holds neither")
    (folder / "config.json").write_text("{]")
    refused(folder, r"config\.json: ")
    (folder / "config.json").write_text(json.dumps(small | {"model_type": "gpt_neox"}))
    refused(folder, "hf: architecture 'gpt_neox'", ConfigError)


def test_plain_weights_are_read_by_threads(
    make: Make, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where something is made of each plain one, so that no two are held."""
    readers, read = set[str](), Weight.read

    def noted(weight: Weight) -> Weight:
        readers.add(threading.current_thread().name.partition("_")[0])
        return read(weight)

    monkeypatch.setattr(Weight, "read", noted)
    plain, here = load_params(make(small)), threading.current_thread().name
    assert readers == {"read"}
    readers.clear()
    kept = load_params(make(small), each=lambda spec, leaf, config: leaf)
    assert readers == {here}
    readers.clear()
    read_params(make(small), quantization="int8")
    assert readers == {here}
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(x, y)
