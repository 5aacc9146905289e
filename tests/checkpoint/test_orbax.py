"""save_params and load_params on Orbax folders: exact, sharded or not, with the files that belong
to a model.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.tensors import flat
from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.params import Params
from tests.checkpoint.conftest import make_tensors

Make = Callable[..., Path]


def assert_same(a: Params, b: Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (name, x), y in zip(flat(a).items(), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name, strict=True)


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "tp"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip(make: Make, small: dict[str, Any], tmp_path: Path, dtype: str) -> None:
    params = load_params(make(small, dtype))
    save_params(params, tmp_path / "out")
    back = load_params(tmp_path / "out")
    assert isinstance(back, Params)
    assert_same(params, back)
    assert back.source == tmp_path / "out"
    assert back.config.eos_token_ids == (3, 5)


def test_round_trip_of_other_families_and_mixed_dtypes(
    make: Make, small: dict[str, Any], tmp_path: Path
) -> None:
    raw = small | {"model_type": "qwen2", "tie_word_embeddings": True, "num_hidden_layers": 11}
    tensors = make_tensors(raw, "bfloat16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    params = load_params(make(raw, tensors=tensors))
    save_params(params, tmp_path / "out")
    assert_same(params, load_params(tmp_path / "out"))


def test_sharded_params_and_a_mesh_to_load_onto(
    make: Make, small: dict[str, Any], tmp_path: Path
) -> None:
    folder = make(small, "bfloat16")
    whole = load_params(folder)
    save_params(load_params(folder, mesh=mesh_of(2, 2)), tmp_path / "out")
    assert_same(whole, load_params(tmp_path / "out"))
    mesh = mesh_of(1, 4)
    back = load_params(tmp_path / "out", mesh=mesh)
    assert_same(whole, back)
    assert back["layers"]["0"]["attention"]["qkv"].sharding == NamedSharding(
        mesh, PartitionSpec("tp")
    )


def test_chunks_of_every_shape(
    make: Make, small: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "jpaged.checkpoint.orbax.CHUNK_BYTES", 300
    )  # many chunks a tensor, along several axes
    params = load_params(make(small, "bfloat16"))
    save_params(params, tmp_path / "out")
    assert_same(params, load_params(tmp_path / "out"))


def test_cast(make: Make, small: dict[str, Any], tmp_path: Path) -> None:
    params = load_params(make(small, "float32"))
    save_params(params, tmp_path / "out")
    assert_same(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), params),
        load_params(tmp_path / "out", dtype="bfloat16"),
    )


def test_orbax_itself_restores_params(make: Make, small: dict[str, Any], tmp_path: Path) -> None:
    params = load_params(make(small, "bfloat16"))
    save_params(params, tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        back = checkpointer.restore(tmp_path / "out" / "params", params)
    assert isinstance(back, Params)
    assert_same(params, back)


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
@pytest.mark.parametrize("beside", [True, False])
def test_a_callers_own_orbax_save(
    make: Make, small: dict[str, Any], tmp_path: Path, beside: bool, options: dict[str, Any]
) -> None:
    folder = make(small, "bfloat16")
    params = load_params(folder)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "run" / "weights", params)
    where = tmp_path / "run" if beside else tmp_path / "run" / "weights"
    shutil.copy(folder / "config.json", where)
    assert_same(params, load_params(where))


def test_files_that_go_along(make: Make, small: dict[str, Any], tmp_path: Path) -> None:
    folder = make(small | {"_note": "the folder's own"})
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    )
    for name in names:
        (folder / name).write_text(f'"{name}"')
    (folder / "README.md").write_text("not ours to copy")
    save_params(load_params(folder), tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*names, "config.json", "params"}
    assert all((tmp_path / "out" / name).read_text() == f'"{name}"' for name in names)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_note"] == "the folder's own"


@pytest.mark.parametrize("source", ["none", "gone", "other"])
def test_config_json_without_a_source(
    make: Make, small: dict[str, Any], tmp_path: Path, source: str
) -> None:
    loaded = load_params(make(small))
    other = make(small | {"vocab_size": 97}, name="other")
    where = {"none": None, "gone": tmp_path / "gone", "other": other}[source]
    save_params(Params(dict(loaded), loaded.config, where), tmp_path / "out")
    assert_same(loaded, load_params(tmp_path / "out"))


def test_numpy_leaves(make: Make, small: dict[str, Any], tmp_path: Path) -> None:
    params = load_params(make(small, "bfloat16"))
    save_params(jax.device_get(params), tmp_path / "out")
    assert_same(params, load_params(tmp_path / "out"))


def test_an_existing_folder_is_never_overwritten(
    make: Make, small: dict[str, Any], tmp_path: Path
) -> None:
    params = load_params(make(small))
    (tmp_path / "empty").mkdir()
    save_params(params, tmp_path / "empty")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "file").touch()
    for taken in ("empty", "hf", "file"):
        with pytest.raises(CheckpointError, match=f"{taken}: exists and is not an empty folder"):
            save_params(params, tmp_path / taken)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "file"])


def test_what_cannot_be_saved(make: Make, small: dict[str, Any], tmp_path: Path) -> None:
    params = load_params(make(small))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="not a dict"):
        save_params(dict(params), out)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match=r"embed\.weight: a ShapeDtypeStruct"):
        save_params(jax.eval_shape(lambda p: p, params), out)
    with pytest.raises(CheckpointError, match=r"embed\.weight: a \w*Tracer"):
        jax.jit(lambda p: save_params(p, out))(params)
    with pytest.raises(CheckpointError, match=r"19 missing \(embed\.weight, "):
        save_params(jax.tree.map(lambda _: None, params), out)
    with pytest.raises(
        CheckpointError, match=r"1 of another shape \(norm\.scale \[31\], config \[32\]\)"
    ):
        save_params(
            Params(dict(params) | {"norm": {"scale": np.ones(31, np.float32)}}, params.config), out
        )
    with pytest.raises(CheckpointError, match="int8"):
        save_params(jax.tree.map(lambda x: x.astype(jnp.int8), params), out)
    jax.tree.leaves(params)[3].delete()
    with pytest.raises(CheckpointError, match="deleted or donated"):
        save_params(params, out)
    assert not out.exists()


def test_a_config_that_no_config_json_expresses(
    make: Make, small: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load_params(make(small | {"model_type": "llama"}))
    odd = ModelConfig(**{**vars(loaded.config), "sliding_windows": (4, 8)})
    with pytest.raises(ConfigError, match=r"no llama config\.json can express"):
        save_params(Params(dict(loaded), odd), tmp_path / "out")


def test_a_disk_that_fills_up(
    make: Make, small: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    params = load_params(make(small))
    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with pytest.raises(
        CheckpointError, match=r"out: cannot be written \(.*No space left on device\)"
    ):
        save_params(params, tmp_path / "out")
    with pytest.raises(CheckpointError):
        load_params(tmp_path / "out")


def test_a_path_through_a_file(make: Make, small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/out: "):
        save_params(load_params(make(small)), tmp_path / "file" / "out")


class TestDamage:
    @pytest.fixture
    def saved(self, make: Make, small: dict[str, Any], tmp_path: Path) -> Path:
        save_params(load_params(make(small)), tmp_path / "out")
        return tmp_path / "out"

    @pytest.mark.parametrize("keep", [0, 0.5])
    def test_every_file_truncated_in_turn(self, saved: Path, keep: float) -> None:
        """Whatever file is cut, loading either still gives the exact tensors or raises
        CheckpointError.
        """
        good = load_params(saved)
        files = [file for file in (saved / "params").rglob("*") if file.is_file()]
        refusals = 0
        for file in files:
            data = file.read_bytes()
            file.write_bytes(data[: int(len(data) * keep)])
            try:
                assert_same(good, load_params(saved))
            except CheckpointError:
                refusals += 1
            file.write_bytes(data)
        assert refusals >= 3  # the metadata, the manifest and the data at least
        assert_same(good, load_params(saved))

    @pytest.mark.parametrize("zarr3", [False, True])
    def test_a_lost_chunk_never_reads_as_zeros(self, saved: Path, zarr3: bool) -> None:
        params = jax.tree.map(jnp.zeros_like, load_params(saved))
        shutil.rmtree(saved / "params")
        with ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
        ) as checkpointer:
            checkpointer.save(saved / "params", params)
        assert_same(params, load_params(saved))
        chunks = [file for file in (saved / "params" / "norm.scale").rglob("*") if file.is_file()]
        for chunk in chunks:
            if chunk.name not in (".zarray", "zarr.json"):
                chunk.unlink()
        with pytest.raises(CheckpointError, match=r"params: norm\.scale cannot be read"):
            load_params(saved)

    def test_cut_short_while_writing(self, saved: Path) -> None:
        (saved / "params").rename(saved / "params.orbax-checkpoint-tmp-0")
        with pytest.raises(CheckpointError, match="holds neither"):
            load_params(saved)

    def test_several_checkpoints(self, saved: Path) -> None:
        shutil.copytree(saved / "params", saved / "step_2")
        with pytest.raises(CheckpointError, match=r"several Orbax checkpoints \(params, step_2\)"):
            load_params(saved)

    def test_misfit(self, saved: Path, small: dict[str, Any]) -> None:
        (saved / "config.json").write_text(json.dumps(small | {"num_hidden_layers": 3}))
        with pytest.raises(
            CheckpointError, match=r"8 missing \(layers\.2\.attention\.k_norm\.scale, "
        ):
            load_params(saved)
