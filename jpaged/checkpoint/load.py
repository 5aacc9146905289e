"""load_params: a checkpoint folder to Params, one tensor at a time."""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jpaged.checkpoint.eagle import head_config, is_head
from jpaged.checkpoint.hf import INDEX, SINGLE, hf_parts
from jpaged.checkpoint.hub import local_folder
from jpaged.checkpoint.orbax import find_orbax, orbax_parts
from jpaged.checkpoint.packed import laid
from jpaged.checkpoint.tensors import DTYPES, Part, empty, flat, float_dtype, read_share
from jpaged.checks import read_json
from jpaged.errors import CheckpointError, ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import (
    Params,
    choose_tensor_axis,
    nest,
    param_specs,
    param_table,
)
from jpaged.models.quantized import QuantizedWeight, partition

# Reading these runs code that they hold.
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def load_params(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    dequantize: bool = False,
    each: Callable[[ParamSpec, Any, ModelConfig], Any] | None = None,
) -> Params:
    """Params from a Hugging Face folder (safetensors), an Orbax folder with a config.json, or a
    model of the Hub by its name.

    path: a folder, else OWNER/NAME or OWNER/NAME@REVISION as `local_folder` takes it. dtype:
    "float32", "bfloat16" or "float16" casts tensor by tensor; None keeps what the files hold. mesh:
    its tensor axis splits KV heads, FFN and vocabulary as `param_specs` says; None is jax's default
    device. Linear weights that the files hold in 8 or 4 bits stay so, as QuantizedWeights of this
    dtype (bfloat16), where they can; dequantize makes all of them plain. each: what is kept of a
    parameter once it is there, of (its ParamSpec, the array, the model). Names, shapes, dtypes and
    file sizes are all checked before the first tensor is read.
    Host memory peaks at the checkpoint's own size on CPU, where jax takes the buffers over, and at
    the largest tensor's on an accelerator; of several processes each reads its own shares alone.
    Raises CheckpointError (missing, damaged, unsafe, misfit) and ConfigError (architecture, dtype
    or mesh cannot work).
    """
    target = None if dtype is None else float_dtype(dtype)
    folder = local_folder(path)
    config = read_config(folder)
    stored = find_parts(folder, config)
    table = param_table(config)
    shapes = {name: spec.shape for name, spec in table.items()}
    shardings: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    if mesh is not None:
        axis = choose_tensor_axis(mesh)
        specs = flat(param_specs(config, axis, mesh.shape[axis]))
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    leaves = {}
    # Large ones first, while there is most room.
    for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
        held = {part.dtype for part in stored[name]}
        own = held.pop() if len(held) == 1 else DTYPES["float32"]
        where = shardings.get(name)
        if where is not None and not where.is_fully_addressable:
            read = functools.cache(
                functools.partial(read_share, name, stored[name], shapes[name], target or own)
            )
            leaves[name] = jax.make_array_from_callback(shapes[name], where, read)
            continue
        spec = table[name]
        keep = any(part.packed for part in stored[name]) and not dequantize
        if keep:
            kept = laid(stored[name], shapes[name], len(spec.sides[0]))
            if kept is not None:
                if not kept.is_finite():
                    raise CheckpointError(
                        f"{folder}: {name} holds a value in {kept.form} that is not finite"
                    )
                weight = QuantizedWeight(
                    **kept._asdict(), num_outputs=len(spec.sides[0]), dtype=target or own
                )
                leaves[name] = jax.block_until_ready(_placed(weight, mesh, specs.get(name)))
                continue
        buffer = empty(shapes[name], target or own)
        for part in stored[name]:
            part.read(buffer[part.index])
        # Waiting here bounds the host's share: a transfer keeps its buffer alive until it is done.
        leaf = jax.block_until_ready(jax.device_put(buffer, where))
        del buffer
        leaves[name] = leaf if each is None else each(spec, leaf, config)
        del leaf
    return Params(nest({name: leaves[name] for name in shapes}), config, folder)


def _placed(weight: QuantizedWeight, mesh: Mesh | None, spec: Any) -> QuantizedWeight:
    """A weight of numpy arrays on the devices; ConfigError where groups do not split."""
    if mesh is None:
        return jax.device_put(weight)
    where = jax.tree.map(lambda part: NamedSharding(mesh, part), partition(weight, spec))
    try:
        return jax.device_put(weight, where)
    except ValueError as e:
        raise ConfigError(
            f"{weight.form} weights of {weight.shape} with scales of {weight.scales.shape} do not "
            f"split by {spec}: fewer devices, or dequantize=True"
        ) from e


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint folder; the message of any error names the folder."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder (nor is it OWNER/NAME, a model of the Hugging Face Hub)"
        )
    raw = read_json(folder / "config.json", CheckpointError)
    try:
        return head_config(folder, raw) if is_head(raw) else ModelConfig.from_hf(raw)
    except ConfigError as e:
        raise type(e)(f"{folder}: {e}") from e


def find_parts(folder: Path, config: ModelConfig) -> dict[str, list[Part]]:
    """The stored parts of every canonical tensor, checked, from whichever format the folder
    holds.
    """
    try:
        if any((folder / name).is_file() for name in (INDEX, SINGLE)):
            return hf_parts(folder, config)
        if (root := find_orbax(folder)) is not None:
            return orbax_parts(root, config)
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    except OSError as e:
        raise CheckpointError(f"{folder}: {e}") from e
    if pickled:
        unsafe = "is a pickle, which can run code when it is read; convert it to safetensors"
        raise CheckpointError(f"{folder}: {pickled[0]} {unsafe}")
    raise CheckpointError(
        f"{folder}: holds neither model.safetensors, nor its index, nor an Orbax checkpoint"
    )
