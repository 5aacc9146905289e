"""Orbax folders: config.json, tokenizer files, and in `params/` the canonical tree as an Orbax
checkpoint.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jpaged.checkpoint.tensors import DTYPES, check_fit, first_line, flat
from jpaged.checkpoint.tokenizer import GENERATION_CONFIG, TOKENIZER_FILES
from jpaged.checks import read_json
from jpaged.errors import CheckpointError, ConfigError
from jpaged.images.prepare import IMAGE_FILES, VIDEO_FILE
from jpaged.models.config import ModelConfig
from jpaged.models.params import Params, param_shapes, param_table
from jpaged.models.quantized import is_quantized
from jpaged.models.sentence import write_pooling
from jpaged.models.vision.tower import PREFIX
from jpaged.models.weight import Piece, Weight, store

MARK = "_METADATA"  # the file that every finished Orbax tree has
TRAIN_STATE = ("params.params.", "params.", "model.")  # linen's, a plain state's, nnx's
CHUNK_BYTES = 4 * 2**20


def save_params(params: Params, path: str | os.PathLike[str]) -> None:
    """Write Params as an Orbax folder that `load_params` reads back exactly; finished when this
    returns.

    The config.json, tokenizer files and generation_config of the folder that the params came from
    go along. path: a folder that does not exist or is empty. CheckpointError otherwise, or when
    leaves do not fit the config.
    """
    if not isinstance(params, Params):
        raise ConfigError(
            f"save_params takes what load_params returns, not a {type(params).__name__}"
        )
    folder = check_new(path)
    if held := [name for name, leaf in flat(params, is_quantized).items() if is_quantized(leaf)]:
        raise CheckpointError(
            f"{held[0]} is in 8 or 4 bits, which Orbax folders do not hold: load_params(..., "
            "dequantize=True), or convert.py --dequantize, makes plain weights"
        )
    leaves = flat(params)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, Tracer):
            raise CheckpointError(f"{name}: a {type(leaf).__name__}, not an array, cannot be saved")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(f"{name}: this array was deleted or donated and cannot be saved")
    stored = {name: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in leaves.items()}
    check_fit("params", stored, flat(param_shapes(params.config)))
    config_json = _config_json(params)

    # takes a second and a half; loading a Hugging Face folder never needs it
    import orbax.checkpoint as ocp

    # Small chunks keep a reader's peak low. Compression would save a fifth of the disk and double
    # the time of a load.
    options = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), params)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            checkpointer.save(
                folder / "params", args=ocp.args.PyTreeSave(params, save_args=options)
            )
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG, *IMAGE_FILES, VIDEO_FILE):
            if params.source and (file := params.source / name).exists():
                (shutil.copytree if file.is_dir() else shutil.copyfile)(file, folder / name)
        if params.config.pooling is not None:
            write_pooling(folder, params.config.pooling)
        # Last: without it the folder does not load.
        (folder / "config.json").write_text(config_json, encoding="utf-8")
    # Orbax and tensorstore raise many types for a disk that is full or not writable
    except Exception as e:
        raise CheckpointError(f"{folder}: cannot be written ({first_line(e)})") from e


def check_new(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder to write; CheckpointError if it holds anything."""
    folder = Path(path).expanduser().absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{folder}: exists and is not an empty folder; nothing was written"
            )
    except OSError as e:
        raise CheckpointError(f"{folder}: {e}") from e
    return folder


def find_orbax(folder: Path) -> Path | None:
    """Return a folder's Orbax tree, the folder itself or the one below it; None without one."""
    if (folder / MARK).is_file():
        return folder
    # Without the mark a save was cut short.
    whole = (child for child in folder.iterdir() if "orbax-checkpoint-tmp" not in child.name)
    roots = sorted(child for child in whole if (child / MARK).is_file())
    if len(roots) > 1:
        several = f"several Orbax checkpoints ({', '.join(root.name for root in roots)})"
        raise CheckpointError(f"{folder}: holds {several}; keep config.json beside one of them")
    return roots[0] if roots else None


def orbax_weights(root: Path, config: ModelConfig) -> dict[str, Weight]:
    """Return every canonical parameter as the one piece that holds it, by its name, after names,
    shapes and dtypes have been checked.

    It reads with tensorstore, as Orbax does. Orbax's restore would hold every tensor twice, so that
    a checkpoint which is mostly embedding peaks at 1.5 to 2 times its size, and it leaves failing
    tasks behind where a file is damaged.
    """
    import tensorstore as ts

    wanted = flat(param_shapes(config))
    one = {"limit": 1}  # every thread's allocator keeps the chunks that it freed
    context = ts.Context({"data_copy_concurrency": one, "file_io_concurrency": one})
    try:
        metadata = read_json(root / MARK)
        stored = [
            ".".join(key["key"] for key in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()
        ]
        names = our_names(stored, wanted)
        if config.vision is None:  # of a model that was saved with its tower, the text part
            names = {name: at for name, at in names.items() if not name.startswith(PREFIX)}
        specs = {name: _spec(root, at, metadata) for name, at in names.items() if name in wanted}
        opening = {name: ts.open(spec, context=context, read=True) for name, spec in specs.items()}
        arrays = {name: future.result() for name, future in opening.items()}
    except Exception as e:  # damage shows as anything from KeyError to tensorstore's own
        raise CheckpointError(f"{root}: damaged Orbax checkpoint ({first_line(e)})") from e
    shapes = dict.fromkeys(names, ((), "")) | {
        n: (a.shape, a.dtype.name) for n, a in arrays.items()
    }
    check_fit(root, shapes, wanted)
    weights = {}
    for name, spec in param_table(config).items():
        array, label = arrays[name], f"{root}: {name}"
        read = functools.partial(_read, label, array)
        piece = Piece(DTYPES[array.dtype.name], read, functools.partial(_Chunks, label, array))
        weights[name] = Weight(spec=spec, source=(piece,), folder=root)
    return weights


def our_names(stored: Iterable[str], wanted: Container[str]) -> dict[str, str]:
    """Return the stored name of each of our tensors: {"norm.scale": "params.norm.scale.value"}.

    nnx saves a Variable as its `value`. In a training loop's state the weights are the part that
    TRAIN_STATE names; its other parts (optimizer, step) are left out.
    """
    plain = {name.removesuffix(".value"): name for name in stored}
    for prefix in TRAIN_STATE:
        part = {
            name.removeprefix(prefix): stored_name
            for name, stored_name in plain.items()
            if name.startswith(prefix)
        }
        if "norm.scale" in part and "norm.scale" in wanted:
            return part
    return plain


def _spec(root: Path, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return tensorstore's address of one tensor of an Orbax tree."""
    kvstore = {"driver": "file", "path": f"{root}/{name}/"}
    if (root / "manifest.ocdbt").exists():
        kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{root}/"},
            "path": f"{name}/",
        }
    # If Orbax stored chunks of zeros too, a missing chunk is lost and must not be read as zeros.
    complete = bool(metadata.get("store_array_data_equal_to_fill_value"))
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    return {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": not complete}


class _Chunks:
    """A stored tensor, an index of which reads the chunks that it meets."""

    def __init__(self, name: str, array: Any, shape: tuple[int, ...]):
        assert tuple(array.shape) == shape, name
        self._name, self._array = name, array

    def __getitem__(self, index: Any) -> np.ndarray:
        try:
            return self._array[index].read().result()
        except Exception as e:
            raise CheckpointError(f"{self._name} cannot be read ({first_line(e)})") from e


def _read(name: str, array: Any, out: np.ndarray) -> None:
    """Fill an array with a stored tensor, one stored chunk after another."""
    chunk = array.chunk_layout.read_chunk.shape
    sides = [
        [slice(i, min(i + c, n)) for i in range(0, n, c)]
        for n, c in zip(out.shape, chunk, strict=True)
    ]
    for index in itertools.product(*sides):
        store(name, _Chunks(name, array, out.shape)[index], out[index])


def _config_json(params: Params) -> str:
    """Return the source's config.json if it still describes these params, else one made from the
    config.
    """
    raw, has_images = params.config.to_hf(), params.config.vision is not None
    config = dataclasses.replace(params.config, pooling=None)  # which other files say
    if params.source is not None:
        with contextlib.suppress(ConfigError):  # the folder has gone or changed since
            theirs = read_json(params.source / "config.json")
            raw = theirs if ModelConfig.from_hf(theirs, images=has_images) == config else raw
    if ModelConfig.from_hf(raw, images=has_images) != config:
        raise ConfigError(f"no {params.config.family} config.json can express {params.config}")
    return json.dumps(raw, indent=2) + "\n"
