"""Hugging Face folders: which safetensors files hold the weights, and where each tensor goes in the
canonical tree.

The safetensors header is parsed here (eight bytes of length, then JSON): its library maps the file
into memory, and pages that were read through a map stay in the process's share until the file is
closed, which would double the peak.
"""

import functools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from jpaged.checkpoint.tensors import DTYPES, SLAB_BYTES, Part, check_fit, flat, store
from jpaged.checks import read_json
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.params import param_shapes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Not wanted but no misfit: old checkpoints carry the first, which is computed, and tied ones the
# second at times.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$")


class Entry(NamedTuple):
    """One tensor of one file: bytes start to start + nbytes."""

    file: Path
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str  # numpy's name where this project reads it, else the file's code


def plan_hf(folder: Path, config: ModelConfig) -> dict[str, list[Part]]:
    """The parts of every canonical tensor, after names, shapes, dtypes and file sizes have all been
    checked.
    """
    entries = find_entries(folder)
    table = stored_names(config)
    wanted = {name: shape for parts in table.values() for name, shape, _ in parts}
    found = {
        name: (e.shape, e.dtype)
        for name, e in entries.items()
        if name in wanted or not IGNORED.search(name)
    }
    check_fit(folder, found, wanted)

    def part(name: str, index: Any) -> Part:
        return Part(
            DTYPES[entries[name].dtype], functools.partial(read_entry, name, entries[name]), index
        )

    return {ours: [part(name, index) for name, _, index in parts] for ours, parts in table.items()}


def stored_names(config: ModelConfig) -> dict[str, list[tuple[str, tuple[int, ...], Any]]]:
    """For each canonical tensor: (Hugging Face name, its shape there, index of the canonical tensor
    that it fills).
    """
    c = config
    h, k, g, d, e, f = (
        c.num_heads,
        c.num_kv_heads,
        c.group_size,
        c.head_dim,
        c.hidden_size,
        c.intermediate_size,
    )
    table: dict[str, list[tuple[str, tuple[int, ...], Any]]] = {
        "embed.weight": [("model.embed_tokens.weight", (c.vocab_size, e), ())],
        "norm.scale": [("model.norm.weight", (e,), ())],
        "lm_head.weight": [("lm_head.weight", (c.vocab_size, e), ())],
    }
    qkv = (("q", h * d, np.s_[:, :g]), ("k", k * d, np.s_[:, g]), ("v", k * d, np.s_[:, g + 1]))
    for i in range(c.num_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        at, mlp = f"{hf}self_attn.", f"{hf}mlp."
        table |= {
            f"{ours}input_norm.scale": [(f"{hf}input_layernorm.weight", (e,), ())],
            f"{ours}post_norm.scale": [(f"{hf}post_attention_layernorm.weight", (e,), ())],
            f"{ours}attention.qkv": [
                (f"{at}{x}_proj.weight", (n, e), index) for x, n, index in qkv
            ],
            f"{ours}attention.out": [(f"{at}o_proj.weight", (e, h * d), ())],
            f"{ours}mlp.gate_up": [
                (f"{mlp}gate_proj.weight", (f, e), 0),
                (f"{mlp}up_proj.weight", (f, e), 1),
            ],
            f"{ours}mlp.down": [(f"{mlp}down_proj.weight", (e, f), ())],
            f"{ours}attention.qkv_bias": [
                (f"{at}{x}_proj.bias", (n,), index) for x, n, index in qkv
            ],
            f"{ours}attention.out_bias": [(f"{at}o_proj.bias", (e,), ())],
            f"{ours}attention.q_norm.scale": [(f"{at}q_norm.weight", (d,), ())],
            f"{ours}attention.k_norm.scale": [(f"{at}k_norm.weight", (d,), ())],
        }
    present = flat(param_shapes(config))
    return {name: parts for name, parts in table.items() if name in present}


def find_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the files that the index names, or of the single file; nothing else in the
    folder is opened.
    """
    if not (folder / INDEX).is_file():
        return read_header(folder / SINGLE)
    weight_map = read_json(folder / INDEX, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map of tensor names to file names")
    headers = {
        file: read_header(_inside(folder, file)) for file in sorted(set(weight_map.values()))
    }
    if lost := [name for name, file in weight_map.items() if name not in headers[file]]:
        raise CheckpointError(
            f"{folder / INDEX}: {lost[0]} is not in {weight_map[lost[0]]} ({len(lost)} "
            "such tensors)"
        )
    unlisted = {name: entry for header in headers.values() for name, entry in header.items()}
    return unlisted | {name: headers[file][name] for name, file in weight_map.items()}


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; CheckpointError if its header and its size do not agree to
    the byte.
    """
    try:
        with file.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            lead = f.read(8)
            length = int.from_bytes(lead, "little")
            if lead == b"version ":
                raise CheckpointError(
                    f"{file}: is a Git LFS pointer, not the weights (git lfs pull fetches them)"
                )
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: truncated or not safetensors (a header of {length} bytes in {size})"
                )
            header = json.loads(f.read(length))
        entries = {
            name: _entry(file, 8 + length, info)
            for name, info in header.items()
            if name != "__metadata__"
        }
    except OSError as e:
        raise CheckpointError(f"{file}: {e.strerror or e}") from e
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{file}: damaged safetensors header ({type(e).__name__}: {e})"
        ) from e
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise CheckpointError(
                f"{file}: damaged safetensors header ({name} at byte {entry.start}, expected {end})"
            )
        end += entry.nbytes
    if end != size:
        raise CheckpointError(
            f"{file}: {size} bytes where its header needs {end}; the file is truncated or damaged"
        )
    return entries


def read_entry(name: str, entry: Entry, out: np.ndarray) -> None:
    """Fill a view, contiguous or not, with a tensor of as many elements; no more than a slab is
    held besides.
    """
    dtype = DTYPES[entry.dtype]
    try:
        with entry.file.open("rb") as f:
            f.seek(entry.start)
            for block in _blocks(out):
                slab = block if block.dtype == dtype else np.empty(block.shape, dtype)
                if (
                    f.readinto(slab.view(np.uint8)) < slab.nbytes
                ):  # less than asked for means the end
                    raise EOFError("the file ends early")
                if slab is not block:
                    store(name, slab, block)
    except (OSError, EOFError) as e:
        raise CheckpointError(f"{entry.file}: {name}: {e}") from e


def _entry(file: Path, data: int, info: dict[str, Any]) -> Entry:
    code, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape}, offsets {[begin, end]}")
    dtype: str = DTYPE_NAMES.get(code, str(code))
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{code} of shape {shape} in {end - begin} bytes")
    return Entry(file, data + begin, end - begin, tuple(shape), dtype)


def _inside(folder: Path, file: str) -> Path:
    """A file that the index names. Links are followed: Hugging Face's own cache links snapshots to
    blobs elsewhere.
    """
    parts = PurePosixPath(file.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in file or parts.suffix != ".safetensors":
        raise CheckpointError(
            f"{folder / INDEX}: names {file!r}, which is not a .safetensors file inside the folder"
        )
    return folder / file


def _blocks(out: np.ndarray) -> Iterator[np.ndarray]:
    """Flat writable views that cover an array in C order, a slab each at most."""
    if out.flags.c_contiguous:
        line = out.reshape(-1)
        step = SLAB_BYTES // out.itemsize
        yield from (line[i : i + step] for i in range(0, line.size, step))
    else:
        for row in out:
            yield from _blocks(row)
