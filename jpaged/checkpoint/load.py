"""load_params reads a checkpoint folder into Params, one tensor at a time."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpaged.checkpoint.eagle import is_head, read_head
from jpaged.checkpoint.hf import INDEX, SINGLE, hf_weights
from jpaged.checkpoint.hub import local_folder
from jpaged.checkpoint.orbax import find_orbax, orbax_weights
from jpaged.checkpoint.tensors import flat, float_dtype
from jpaged.checks import read_json
from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.mtp import mtp_config
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import Params, choose_tensor_axis, nest, param_specs
from jpaged.models.quantized import is_quantized
from jpaged.models.sentence import read_pooling
from jpaged.models.served import served_form
from jpaged.models.weight import Weight
from jpaged.runtime import heap
from jpaged.runtime.placing import Placer

# Files with these ends hold code that runs when they are read.
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
READERS = 4  # threads at most


def load_params(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    dequantize: bool = False,
    mtp: bool = False,
    images: bool = False,
    each: Callable[[ParamSpec, Any, ModelConfig], Any] | None = None,
) -> Params:
    """Return Params from a Hugging Face folder (safetensors), an Orbax folder with a config.json,
    or a model of the Hub by its name.

    path: a folder, else OWNER/NAME or OWNER/NAME@REVISION as `local_folder` takes it. dtype:
    "float32", "bfloat16" or "float16" casts tensor by tensor; None keeps what the files hold. mesh:
    its tensor axis splits KV heads, FFN and vocabulary as `param_specs` says; None is jax's default
    device. Linear weights that the files hold in 8 or 4 bits stay so where they can (not on a mesh
    of several processes), as QuantizedWeights that stand for weights of this dtype (None:
    bfloat16); dequantize makes all of them plain. mtp: the head that the files have to guess a
    further token, in place of the model. images: with the vision tower, under "vision"; otherwise
    of the text part alone. each: takes (ParamSpec, array, ModelConfig) of a plain parameter once it
    is on its device, and returns what is kept of it.

    Names, shapes, dtypes and file sizes are all checked before the first tensor is read. Host
    memory peaks at the checkpoint's size on CPU, where jax takes the buffers over, and at the
    largest tensor's on an accelerator; of several processes each reads only its own shares.
    Raises CheckpointError (missing, damaged, unsafe, misfit) and ConfigError (architecture, dtype
    or mesh cannot work).
    """
    return read_params(
        path, dtype=dtype, mesh=mesh, dequantize=dequantize, mtp=mtp, images=images, each=each
    )


def read_params(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    dequantize: bool = False,
    mtp: bool = False,
    images: bool = False,
    each: Callable[[ParamSpec, Any, ModelConfig], Any] | None = None,
    quantization: str | None = None,
    interleaves: Callable[[np.dtype], bool] = lambda _: False,
) -> Params:
    """Like load_params. quantization: plain parameters become what one device serves under this
    setting, one after another, so that no two plain ones are held; only without a mesh.
    interleaves: takes a dtype, and returns whether weights in 8 and 4 bits that stand for weights
    of it are to lie interleaved (see models.served.in_order).
    """
    assert mesh is None or quantization is None, "KV heads are repeated before they are quantised"
    target = None if dtype is None else float_dtype(dtype)
    folder = local_folder(path)
    config = read_config(folder, images=images)
    if mtp:
        config = mtp_config(config)
    weights = find_weights(folder, config)
    specs: dict[str, Any] = {}
    placer = Placer(lambda _: None)
    if mesh is not None:
        axis, devices = choose_tensor_axis(mesh), mesh
        specs = flat(param_specs(config, axis, mesh.shape[axis]))
        placer = Placer(lambda spec: NamedSharding(devices, spec))
    # Large ones first, while there is most room.
    names = sorted(weights, key=lambda name: -math.prod(weights[name].spec.shape))

    def wanted(name: str) -> Weight:
        weight = replace(weights[name], dtype=target, keeps_form=not dequantize)
        interleaved = interleaves(weight.wanted_dtype)
        form = served_form(weight.spec, config, quantization, interleaved=interleaved)
        weight = replace(weight, form=form, interleaved=interleaved)
        return weight if mesh is None else replace(weight, split=specs[name])

    stored = map(wanted, names)
    # Whatever else holds what was read is to hold one weight at a time.
    if mesh is None and each is None and quantization is None and _takes_buffers_over():
        stored = _read_by_threads(list(stored))
    leaves = {}
    for name, weight in zip(names, stored, strict=True):
        leaf = placer(weight)
        leaves[name] = (
            leaf if each is None or is_quantized(leaf) else each(weight.spec, leaf, config)
        )
        del leaf, weight
    if quantization is not None:
        heap.trim()  # of plain weights
    return Params(nest({name: leaves[name] for name in weights}), config, folder)


def _takes_buffers_over() -> bool:
    """Return whether arrays of jax are the buffers that were read, which are then held once."""
    return jax.default_backend() == "cpu"


def _read_by_threads(weights: list[Weight]) -> Iterator[Weight]:
    """Yield weights in their order, those that files hold plain already read."""

    def read(weight: Weight) -> Weight:
        return weight.read() if all(part.quantized is None for part in weight.source) else weight

    threads = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "read")
    try:
        yield from threads.map(read, weights)
    finally:
        threads.shutdown(cancel_futures=True)


def read_config(folder: Path, *, images: bool = False) -> ModelConfig:
    """Return the ModelConfig of a checkpoint folder; the message of any error names the folder.
    images: with the vision tower.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder (nor is it OWNER/NAME, a model of the Hugging Face Hub)"
        )
    raw = read_json(folder / "config.json", CheckpointError)
    try:
        if is_head(raw):
            return read_head(folder, raw)
        return replace(ModelConfig.from_hf(raw, images=images), pooling=read_pooling(folder))
    except ConfigError as e:
        raise type(e)(f"{folder}: {e}") from e


def find_weights(folder: Path, config: ModelConfig) -> dict[str, Weight]:
    """Return the canonical parameters as the pieces that a folder of any format holds, checked, in
    the order of the forward pass.
    """
    try:
        if any((folder / name).is_file() for name in (INDEX, SINGLE)):
            return hf_weights(folder, config)
        if (root := find_orbax(folder)) is not None:
            return orbax_weights(root, config)
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    except OSError as e:
        raise CheckpointError(f"{folder}: {e}") from e
    if pickled:
        unsafe = "is a pickle, which can run code when it is read; convert it to safetensors"
        raise CheckpointError(f"{folder}: {pickled[0]} {unsafe}")
    raise CheckpointError(
        f"{folder}: holds neither model.safetensors, nor its index, nor an Orbax checkpoint"
    )
