"""Hugging Face folders: which safetensors files hold the weights, and what each tensor fills of the
canonical tree.

The safetensors library checks the files, but tensors are read past it: it maps a file into memory,
and pages that were read through a map stay in the process's share until the file is closed, which
would double the peak.
"""

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jpaged.checkpoint.quantized import quantized_piece, reader_of
from jpaged.checkpoint.stacked import stacked_pieces
from jpaged.checkpoint.tensors import DTYPES, SLAB_BYTES, check_fit, first_line
from jpaged.checks import read_json
from jpaged.errors import CheckpointError, UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.draft_head import HeadConfig, MTPConfig
from jpaged.models.families import FAMILIES
from jpaged.models.hf_config import format_of
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import param_table
from jpaged.models.sentence import dense_folders
from jpaged.models.weight import Index, Piece, Weight, store

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
RAW = {  # by a file's code, or numpy's name where this project reads it as plain weights
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    **{"U8": np.dtype(np.uint8), "I8": np.dtype(np.int8)},
    **{"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)},
}
# Not wanted, and no misfit either. Old checkpoints hold the first, which is computed; some tied
# ones hold the second; the last are scales of activations, which stay as they are.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$|\.(input|activation)_scale$")
# Names of two versions of transformers for the parts of a model of text and images.
# And of images and sound.
OF_IMAGES = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|mm_projector|visual|vision_embedder|embed_vision"
    r"|audio_tower|embed_audio)\."
)
OF_TEXT = re.compile(r"^(?:language_model\.(?=model\.|lm_head)|(model\.)language_model\.)")
log = logging.getLogger("jpaged")

MXFP4_ENDS = ("_blocks", "_scales")  # of names of experts' tensors


class Entry(NamedTuple):
    """One tensor of one file. start: the place of its first byte."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: str  # numpy's name where this project reads it, else the file's code


def hf_weights(folder: Path, config: ModelConfig) -> dict[str, Weight]:
    """Return every canonical parameter as the pieces that the folder's files hold, by its name.

    Names, shapes, dtypes and file sizes have all been checked then, and no tensor has been read.
    """
    entries = find_entries(folder)
    head = config.draft_head
    if isinstance(head, HeadConfig):
        entries = head_entries(entries)
    elif head is not None:
        entries = mtp_entries(folder, entries, config, head)
    elif "fc.weight" in entries:
        raise UnsupportedError(
            f"{folder}: with its fc.weight it is a head of EAGLE 1 or 2: of heads that guess, "
            "EAGLE-3's are supported"
        )
    elif FAMILIES[config.family].text_of is not None:
        entries = _text_entries(entries)
    entries = {plain_name(name, config): entry for name, entry in entries.items()}
    entries = _of_a_base_model(entries) | _dense_entries(folder, config)
    family, unread = FAMILIES[config.family], _unread(config)
    if unread is not None and head is None:
        entries = {name: e for name, e in entries.items() if not unread.match(name)}
    names = stored_names(config)
    stacked: dict[str, list[Piece]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    is_one_by_one = any(".experts.0." in name for name in entries)  # both forms are in use
    if family.stacked_experts is not None and not is_one_by_one:
        stacked, wanted = stacked_pieces(entries, config, family.stacked_experts)
        names = {ours: tensors for ours, tensors in names.items() if ours not in stacked}
    for stored in (stored for tensors in names.values() for stored in tensors):
        rows = stored.first + stored.shape[0]  # the last part of a tensor ends it
        wanted[stored.name] = max((rows, *stored.shape[1:]), wanted.get(stored.name, ()))
    raw = read_json(folder / "config.json", CheckpointError)
    quantization = None if isinstance(head, HeadConfig) else format_of(raw)
    allowed: dict[str, tuple[str, ...]] = {
        name: ("U8",) for name in wanted if name.endswith(MXFP4_ENDS)
    }
    sizes: dict[str, tuple[int, ...]] = {}  # of weights in 8 or 4 bits
    for name, shape in list(wanted.items()):
        if quantization is None or not name.endswith(".weight") or len(shape) != 2:
            continue
        tensors = quantization.tensors(name.removesuffix(".weight"), *shape, entries)
        if tensors is not None:
            sizes[name] = wanted.pop(name)
            wanted |= {key: size for key, (size, _) in tensors.items()}
            allowed |= {key: codes for key, (_, codes) in tensors.items()}
    held: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, entry in entries.items():
        if name in wanted or not IGNORED.search(name):
            is_read = entry.dtype in allowed.get(name, ())
            shape = _squeezed(entry.shape, wanted.get(name))
            held[name] = shape, "bfloat16" if is_read else entry.dtype
    check_fit(folder, held, wanted)
    reader = reader_of(quantization, entries, read_raw) if quantization else None

    def piece(stored: Stored) -> Piece:
        if reader is not None and stored.name in sizes:
            whole = reader(stored.name, *sizes[stored.name])
            return quantized_piece(stored.name, whole, stored.rows, stored.fills)
        entry = entries[stored.name]
        skipped = stored.first * math.prod(stored.shape[1:]) * DTYPES[entry.dtype].itemsize
        entry = entry._replace(start=entry.start + skipped)
        read = functools.partial(read_entry, stored.name, entry)
        view = functools.partial(map_entry, entry)
        if stored.order is not None:
            read = functools.partial(read_reordered, stored, read, DTYPES[entry.dtype])
            view = functools.partial(view_reordered, stored, view)
        return Piece(DTYPES[entry.dtype], read, view, stored.fills)

    pieces = {ours: [piece(stored) for stored in tensors] for ours, tensors in names.items()}
    pieces |= stacked
    return {
        name: Weight(spec=spec, source=tuple(pieces[name]), folder=folder)
        for name, spec in param_table(config).items()
    }


def _of_a_base_model(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return tensors under their names in a model with a head, where a file was written of the
    model without one.
    """
    if "embed_tokens.weight" not in entries:
        return entries
    heads = ("score.", "lm_head.")
    return {n if n.startswith(heads) else f"model.{n}": entry for n, entry in entries.items()}


def _dense_entries(folder: Path, config: ModelConfig) -> dict[str, Entry]:
    """Return the tensors of the dense layers after pooling, which have files of their own."""
    if config.pooling is None or not config.pooling.dense:
        return {}
    return {
        f"dense.{i}.{name}": entry
        for i, dense in enumerate(dense_folders(folder))
        for name, entry in read_header(dense / SINGLE).items()
    }


def _unread(config: ModelConfig) -> re.Pattern[str] | None:
    """Return how names of tensors begin that no part of the model takes: those that the family
    knows of, and keys and values of layers that read others'; None where there are none.
    """
    family = FAMILIES[config.family]
    names = [family.unread.replace("{L}", str(config.num_layers))] if family.unread else []
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.keys_of is not None:
            names.append(rf"model\.layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
    return re.compile("|".join(names)) if names else None


def head_entries(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors of an EAGLE-3 head under the names of a model of one layer, without those
    that list the tokens which it can guess (see checkpoint/eagle.py).
    """
    tensors = {}
    for name, entry in entries.items():
        short = re.sub(r"^(model\.)?(midlayer|layers\.0)\.", "model.layers.0.", name)
        short = re.sub(r"^(model\.)?(embed_tokens|norm)\.", r"model.\2.", short)
        tensors[re.sub(r"^model\.(?=fc\.|lm_head\.|d2t|t2d)", "", short)] = entry
    return {name: entry for name, entry in tensors.items() if name not in ("d2t", "t2d")}


def mtp_entries(
    folder: Path, entries: dict[str, Entry], config: ModelConfig, head: MTPConfig
) -> dict[str, Entry]:
    """Return the tensors of an MTP head under the names of a model of one layer. CheckpointError
    where the files have none.
    """
    family = FAMILIES[config.family]
    assert family.mtp is not None and family.unread is not None
    if family.text_of is not None:
        entries = _text_entries(entries)
    begins = re.compile(family.unread.replace("{L}", str(head.target_layers)))
    tensors = {}
    for name, entry in entries.items():
        ours = family.mtp.ours(name, head.target_layers) if begins.match(name) else None
        if ours is not None:
            tensors[ours] = entry
    if not tensors:
        raise CheckpointError(
            f"{folder}: no tensor begins with {begins.pattern}: these files have no MTP head"
        )
    return tensors


def _text_entries(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors of the text part under their names in a model of text alone."""
    tensors = {}
    for name, entry in entries.items():
        if (image := OF_IMAGES.match(name)) is None:
            tensors[OF_TEXT.sub(r"\1", name)] = entry
        else:
            log.debug("not loaded: %s", image.string)
    if len(tensors) < len(entries):
        log.info(
            "the text part is loaded: %d tensors of images are not", len(entries) - len(tensors)
        )
    return tensors


def plain_name(name: str, config: ModelConfig) -> str:
    """Return the name of a tensor with model. in place of what the family's files have."""
    prefix = FAMILIES[config.family].prefix
    return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name


def _squeezed(shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of a file's tensor, without axes of one beside that of a vector (ERNIE's
    choosing biases and Kimi's decays have some).
    """
    if wanted is None or len(wanted) != 1 or wanted != (math.prod(shape),):
        return shape
    return wanted if max(shape) == wanted[0] else shape


class Stored(NamedTuple):
    """Where a file holds a part of a canonical tensor: the tensor's name there, the part's shape,
    the index of the canonical tensor that it fills, and the row of the file's tensor that it begins
    at. order: the number that each of our rows has in the file, from there on; None: its own.
    """

    name: str
    shape: tuple[int, ...]
    fills: Index
    first: int
    order: np.ndarray | None = None

    @property
    def rows(self) -> slice | np.ndarray:
        """The rows of the file's tensor in our order."""
        if self.order is not None:
            return self.first + self.order
        return slice(self.first, self.first + self.shape[0])


def stored_names(config: ModelConfig) -> dict[str, list[Stored]]:
    """Return for each canonical tensor its parts as a Hugging Face file has them. Parts of one
    tensor follow each other in it, also where they are of several canonical ones.
    """
    rows: dict[str, int] = {}

    def stored(spec: ParamSpec) -> Iterator[Stored]:
        for part, index in spec.places:
            name, axes = spec.at(part.hf_name), part.axes
            if "{x}" in name:  # an expert a tensor
                axes, index = axes.removeprefix("X "), (*index, *[slice(None)] * 2)[1:]
            shape = tuple(math.prod(spec.shape_of(side)) for side in re.split("[,|]", axes))
            if "{x}" in name:
                for x in range(spec.shape_of("X")[0]):
                    expert = (slice(x, x + 1), *index)
                    yield Stored(name.replace("{x}", str(x)), shape, expert, 0)
            else:
                yield Stored(name, shape, index, rows.get(name, 0), spec.row_order(part))
                rows[name] = rows.get(name, 0) + shape[0]

    return {ours: list(stored(spec)) for ours, spec in param_table(config).items()}


def find_entries(folder: Path) -> dict[str, Entry]:
    """Return every tensor of the files that the index names, or of the single file; nothing else in
    the folder is opened.
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
    """Return the tensors of a safetensors file; CheckpointError if its header and its size do not
    agree to the byte.
    """
    try:
        with file.open("rb") as f:
            if (lead := f.read(8)) == b"version ":
                raise CheckpointError(
                    f"{file}: is a Git LFS pointer, not the weights (git lfs pull fetches them)"
                )
            with safe_open(file, "numpy"):
                pass  # the library has checked the header, that no tensors overlap, and the size
            length = int.from_bytes(lead, "little")
            header: dict[str, Any] = json.loads(f.read(length))
    except OSError as e:
        raise CheckpointError(f"{file}: {e.strerror or e}") from e
    except (SafetensorError, ValueError) as e:
        raise CheckpointError(f"{file}: truncated or damaged ({first_line(e)})") from e
    return {
        name: Entry(
            file,
            8 + length + info["data_offsets"][0],
            tuple(info["shape"]),
            DTYPE_NAMES.get(info["dtype"], str(info["dtype"])),
        )
        for name, info in header.items()
        if name != "__metadata__"
    }


def read_entry(name: str, entry: Entry, out: np.ndarray) -> None:
    """Fill a view, contiguous or not, with a tensor of as many elements. It holds no more than a
    slab besides.
    """
    dtype = DTYPES[entry.dtype]
    try:
        with entry.file.open("rb") as f:
            f.seek(entry.start)
            for block in _blocks(out):
                slab = block if block.dtype == dtype else np.empty(block.shape, dtype)
                # It reads less than asked for only at the end.
                if f.readinto(slab.view(np.uint8)) < slab.nbytes:
                    raise EOFError("the file ends early")
                if slab is not block:
                    store(name, slab, block)
    except (OSError, EOFError) as e:
        raise CheckpointError(f"{entry.file}: {name}: {e}") from e


def read_reordered(
    stored: Stored, read: Callable[[np.ndarray], None], dtype: np.dtype, out: np.ndarray
) -> None:
    """Fill a view with a part whose rows lie in another order in its file; a copy of the part is
    held meanwhile.
    """
    rows = np.empty(stored.shape, dtype)
    read(rows)
    store(stored.name, rows[stored.order].reshape(out.shape), out)


def view_reordered(
    stored: Stored, view: Callable[[tuple[int, ...]], np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """Return a part whose rows lie in another order in its file, all of it read."""
    return view(stored.shape)[stored.order].reshape(shape)


def read_raw(name: str, entry: Entry) -> np.ndarray:
    """Return a tensor in the file's dtype."""
    out = np.empty(entry.shape, RAW[entry.dtype])
    try:
        with entry.file.open("rb") as f:
            f.seek(entry.start)
            if f.readinto(out.reshape(-1).view(np.uint8)) < out.nbytes:
                raise EOFError("the file ends early")
    except (OSError, EOFError) as e:
        raise CheckpointError(f"{entry.file}: {name}: {e}") from e
    return out


def map_entry(entry: Entry, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor as an array of a shape; only the pages that are used are read."""
    try:
        return np.memmap(entry.file, DTYPES[entry.dtype], "r", entry.start, shape)
    except (OSError, ValueError) as e:  # ValueError: the file ends early
        raise CheckpointError(f"{entry.file}: {e}") from e


def _inside(folder: Path, file: str) -> Path:
    """Return a file that the index names. Links are followed, since Hugging Face's cache links
    snapshots to blobs elsewhere.
    """
    parts = PurePosixPath(file.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in file or parts.suffix != ".safetensors":
        raise CheckpointError(
            f"{folder / INDEX}: names {file!r}, which is not a .safetensors file inside the folder"
        )
    return folder / file


def _blocks(out: np.ndarray) -> Iterator[np.ndarray]:
    """Yield flat writable views that cover an array in C order, each of a slab at most."""
    if out.flags.c_contiguous:
        line = out.reshape(-1)
        step = SLAB_BYTES // out.itemsize
        yield from (line[i : i + step] for i in range(0, line.size, step))
    else:
        for row in out:
            yield from _blocks(row)
