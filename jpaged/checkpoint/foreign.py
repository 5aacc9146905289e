"""params_from: the weights of other projects' models, by a name map, as Params.

A name map says for each of our tensors, or each part of a fused one (`PARTS`), where it lies in the
other tree and what its axes are there: {"layers.{i}.mlp.gate": ("layers.{i}.mlp.gate_proj.kernel",
"E F"), ...}. Paths join keys by dots; {i} is the number of the layer. Axes are letters: V
vocabulary, E embed, F ffn, K KV heads, G query heads a KV head, D head dim, L layers (stacked, for
scanned models). "(K G)" is one axis of size K*G; "V*" may be longer, and what is beyond V (padding)
is cut; a number takes that index of its axis: ("wi.kernel", "E 0 F") is half of a fused gate and
up.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from jax.core import Tracer

from jpaged.checkpoint.tensors import flat
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.params import Params, param_shapes, param_specs

TOKEN = re.compile(r"\([A-Z ]+\)|[A-Z]\*?|\d+")  # one axis

NameMap = Mapping[str, tuple[str, str]]

# What a name map gives, with our order of its axes. Which of them are needed follows from the
# config.
PARTS = {
    "embed.weight": "V E",
    "layers.{i}.input_norm.scale": "E",
    "layers.{i}.attention.q": "K G D E",
    "layers.{i}.attention.k": "K D E",
    "layers.{i}.attention.v": "K D E",
    "layers.{i}.attention.q_bias": "K G D",
    "layers.{i}.attention.k_bias": "K D",
    "layers.{i}.attention.v_bias": "K D",
    "layers.{i}.attention.q_norm.scale": "D",
    "layers.{i}.attention.k_norm.scale": "D",
    "layers.{i}.attention.out": "E K G D",
    "layers.{i}.attention.out_bias": "E",
    "layers.{i}.post_norm.scale": "E",
    "layers.{i}.mlp.gate": "F E",
    "layers.{i}.mlp.up": "F E",
    "layers.{i}.mlp.down": "E F",
    "norm.scale": "E",
    "lm_head.weight": "V E",
}
# Tensors of ours that are several parts side by side: the parts, and the axis that they follow each
# other on.
FUSED = {
    "layers.{i}.attention.qkv": (("q", "k", "v"), 1),
    "layers.{i}.attention.qkv_bias": (("q_bias", "k_bias", "v_bias"), 1),
    "layers.{i}.mlp.gate_up": (("gate", "up"), 0),
}

TUNIX_QWEN3: NameMap = {
    "embed.weight": ("embedder.input_embedding", "V E"),
    "layers.{i}.input_norm.scale": ("layers.{i}.input_layernorm.w", "E"),
    "layers.{i}.attention.q": ("layers.{i}.attn.q_proj.w", "E (K G) D"),
    "layers.{i}.attention.k": ("layers.{i}.attn.k_proj.w", "E K D"),
    "layers.{i}.attention.v": ("layers.{i}.attn.v_proj.w", "E K D"),
    "layers.{i}.attention.q_norm.scale": ("layers.{i}.attn.q_norm.w", "D"),
    "layers.{i}.attention.k_norm.scale": ("layers.{i}.attn.k_norm.w", "D"),
    "layers.{i}.attention.out": ("layers.{i}.attn.o_proj.w", "(K G) D E"),
    "layers.{i}.post_norm.scale": ("layers.{i}.post_attention_layernorm.w", "E"),
    "layers.{i}.mlp.gate": ("layers.{i}.mlp.gate_proj.kernel", "E F"),
    "layers.{i}.mlp.up": ("layers.{i}.mlp.up_proj.kernel", "E F"),
    "layers.{i}.mlp.down": ("layers.{i}.mlp.down_proj.kernel", "F E"),
    "norm.scale": ("final_norm.w", "E"),
    "lm_head.weight": ("lm_head.w", "E V"),
}


def maxtext_qwen3(*, scanned: bool = True, scan_axis: int = 1) -> NameMap:
    """The name map of MaxText's dense Qwen3: its layers stacked on `scan_axis` (its
    param_scan_axis), or each its own.

    Of its options, fused_qkv and fused_mlp must be off, as its Qwen3 configs have them.
    """
    layer = "decoder.layers." if scanned else "decoder.layers_{i}."
    names = {
        "input_norm.scale": ("pre_self_attention_layer_norm.scale", "E"),
        "attention.q": ("self_attention.query.kernel", "E (K G) D"),
        "attention.k": ("self_attention.key.kernel", "E K D"),
        "attention.v": ("self_attention.value.kernel", "E K D"),
        "attention.q_bias": ("self_attention.query.bias", "(K G) D"),
        "attention.k_bias": ("self_attention.key.bias", "K D"),
        "attention.v_bias": ("self_attention.value.bias", "K D"),
        "attention.q_norm.scale": ("self_attention.query_norm.scale", "D"),
        "attention.k_norm.scale": ("self_attention.key_norm.scale", "D"),
        "attention.out": ("self_attention.out.kernel", "(K G) D E"),
        "post_norm.scale": ("post_self_attention_layer_norm.scale", "E"),
        "mlp.gate": ("mlp.wi_0.kernel", "E F"),
        "mlp.up": ("mlp.wi_1.kernel", "E F"),
        "mlp.down": ("mlp.wo.kernel", "F E"),
    }
    table = {
        f"layers.{{i}}.{ours}": (layer + path, _stack(axes, scan_axis) if scanned else axes)
        for ours, (path, axes) in names.items()
    }
    table["embed.weight"] = ("token_embedder.embedding", "V* E")
    table["norm.scale"] = ("decoder.decoder_norm.scale", "E")
    table["lm_head.weight"] = ("decoder.logits_dense.kernel", "E V*")
    return table


def params_from(
    tree: Any, family: str | NameMap, *, config: Any, lora_scale: float | None = None
) -> Params:
    """Params from the weights of another project's model: renamed, transposed, heads split, parts
    fused, unstacked.

    tree: an nnx Module or State, a linen {"params": ...} dict or a plain dict; arrays on one device
    or sharded. family: "tunix_qwen3", "maxtext_qwen3" (scanned or not), or a name map in the form
    that this module describes. config: ModelConfig, Hugging Face dict or folder. lora_scale: alpha
    / rank of the tree's LoRA parts (leaves named NAME_lora_a and NAME_lora_b beside NAME, as qwix
    has them), which are merged: W + lora_scale * A @ B. Tensors that need no change are the tree's
    own arrays. The rest is made on the devices by functions compiled once a form, so that new
    weights of the same shapes compile nothing. Raises ConfigError naming the first path that does
    not fit, every leaf that the map does not take, and LoRA parts without a lora_scale.
    """
    model = ModelConfig.coerce(config)
    leaves = dict(_leaves(tree))
    table = _name_map(family, leaves)
    shapes = flat(param_shapes(model))
    taken: set[str] = set()
    out = [
        _tensor(name, shape, table, leaves, model, lora_scale, taken)
        for name, shape in shapes.items()
    ]
    if left := [path for path in leaves if path not in taken]:
        lora = (
            " (a LoRA part without a weight that it could be merged into)"
            if "_lora_" in left[0]
            else ""
        )
        more = f" and {len(left) - 1} more" if left[1:] else ""
        raise ConfigError(
            f"the tree holds {left[0]}{lora}{more}, which the name map of {model.family} "
            "does not take"
        )
    source = Path(config) if isinstance(config, str | Path) else None
    return Params(
        jax.tree.unflatten(jax.tree.structure(param_specs(model, None)), out), model, source
    )


@dataclasses.dataclass(frozen=True)
class _View:
    """A part of one of our tensors as it lies in the other tree."""

    theirs: tuple[str, ...]  # their axes, a token each
    ours: tuple[str, ...]  # our axes, a letter each
    sizes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]  # of the part in our tensor
    lora_scale: float = 0.0


def _tensor(
    name: str,
    shape: tuple[int, ...],
    table: NameMap,
    leaves: dict[str, Any],
    model: ModelConfig,
    lora_scale: float | None,
    taken: set[str],
) -> Any:
    """One tensor of ours."""
    number = re.search(r"(?<=^layers\.)\d+", name)
    generic = name if number is None else "layers.{i}" + name[number.end() :]
    parts, axis = FUSED.get(generic, ((), 0))
    prefix = generic.rpartition(".")[0]
    views, arrays = [], []
    for part in [f"{prefix}.{part}" for part in parts] or [generic]:
        if part not in table:
            raise ConfigError(f"the name map lacks {part!r}, which this config needs")
        path, axes = table[part]
        path = path.replace("{i}", number.group() if number else "")
        view = _view(part, axes, shape, axis if parts else None, model)
        found = [_leaf(path, leaves)]
        _check_shape(path, found[0].shape, part, view)
        if (lora := [f"{path}_lora_{x}" for x in "ab"])[0] in leaves and "L" not in view.theirs:
            if lora_scale is None:
                raise ConfigError(
                    f"the tree holds {lora[0]}: pass lora_scale= (alpha / rank) to have it merged"
                )
            found += [_leaf(x, leaves) for x in lora]
            _check_lora(path, *(x.shape for x in found))
            view = dataclasses.replace(view, lora_scale=lora_scale)
            taken.update(lora)
        taken.add(path)
        views.append(view)
        arrays.append(tuple(found))
    if len(arrays) == len(arrays[0]) == 1 and _is_ours(views[0], arrays[0][0].shape):
        return arrays[0][0]
    if len(dtypes := {str(part[0].dtype) for part in arrays}) > 1:
        raise ConfigError(
            f"the parts of {name} are in {' and '.join(sorted(dtypes))}: cast them to one dtype"
        )
    stacked = any("L" in view.theirs for view in views)
    layer = np.int32(number.group()) if stacked and number else None
    return _assemble(tuple(views), axis, tuple(arrays), layer)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _assemble(
    views: tuple[_View, ...], axis: int, arrays: tuple[tuple[jax.Array, ...], ...], layer: Any
) -> jax.Array:
    """One of our tensors from the leaves of its parts, each (weight,) or (weight, LoRA A, LoRA
    B).
    """
    parts = [_part(view, layer, *found) for view, found in zip(views, arrays, strict=True)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _part(view: _View, layer: Any, x: jax.Array, *lora: jax.Array) -> jax.Array:
    sizes = dict(view.sizes)
    if lora:
        rank = lora[0].shape[-1]
        a, b = (
            m.astype(jnp.float32).reshape(s)
            for m, s in zip(lora, ((-1, rank), (rank, -1)), strict=True)
        )
        delta = jnp.matmul(a, b, precision="highest").reshape(x.shape)
        x = (x.astype(jnp.float32) + view.lora_scale * delta).astype(x.dtype)
    for at in reversed(range(x.ndim)):  # from the right: taking an index drops its axis
        token = view.theirs[at]
        if token == "L":
            x = jax.lax.dynamic_index_in_dim(x, layer, at, keepdims=False)
        elif token.isdecimal():
            x = jax.lax.index_in_dim(x, int(token), at, keepdims=False)
        elif token.endswith("*"):
            x = jax.lax.slice_in_dim(x, 0, sizes[token[0]], axis=at)
    letters = [
        letter for token in view.theirs for letter in token if letter in sizes and letter != "L"
    ]
    x = x.reshape([sizes[letter] for letter in letters])
    return x.transpose([letters.index(letter) for letter in view.ours]).reshape(view.shape)


def _is_ours(view: _View, shape: tuple[int, ...]) -> bool:
    """Whether their array is our tensor already."""
    return shape == view.shape and tuple(token.rstrip("*") for token in view.theirs) == view.ours


def _view(
    part: str, axes: str, shape: tuple[int, ...], axis: int | None, model: ModelConfig
) -> _View:
    """A part's axes read and checked; `axis` is the one that the parts of a fused tensor follow
    each other on.
    """
    sizes = {
        "V": model.vocab_size,
        "E": model.hidden_size,
        "F": model.intermediate_size,
        "D": model.head_dim,
        "K": model.num_kv_heads,
        "G": model.group_size,
        "L": model.num_layers,
    }
    ours = PARTS[part].split()
    theirs = TOKEN.findall(axes)
    letters = [letter for token in theirs for letter in token if letter.isalpha() and letter != "L"]
    if sorted(letters) != sorted(ours) or theirs.count("L") > 1 or TOKEN.sub("", axes).strip():
        raise ConfigError(
            f"axes {axes!r} of {part}: must hold {', '.join(ours)} once each (and L if it "
            "is stacked)"
        )
    if axis is not None:  # a part that is one slice of its fused axis lacks that axis
        length = sizes["G"] if "G" in ours else 1
        shape = (*shape[:axis], length, *shape[axis + 1 :])
    return _View(tuple(theirs), tuple(ours), tuple(sizes.items()), shape)


def _name_map(family: str | NameMap, leaves: Mapping[str, Any]) -> NameMap:
    if isinstance(family, Mapping):
        if unknown := sorted(set(family) - set(PARTS)):
            raise ConfigError(
                f"the name map gives {unknown[0]!r}, which is not one of {', '.join(PARTS)}"
            )
        return family
    if family == "tunix_qwen3":
        return TUNIX_QWEN3
    if family == "maxtext_qwen3":
        return maxtext_qwen3(
            scanned=not any(path.startswith("decoder.layers_0.") for path in leaves)
        )
    raise ConfigError(f"family={family!r}: must be 'tunix_qwen3', 'maxtext_qwen3' or a name map")


def _leaf(path: str, leaves: Mapping[str, Any]) -> Any:
    if path not in leaves:
        only = (
            " (it holds LoRA parts alone: they need their base weights)"
            if _lora_alone(leaves)
            else ""
        )
        raise ConfigError(f"the tree lacks {path}{only}")
    leaf = leaves[path]
    if isinstance(leaf, Tracer):
        raise ConfigError(
            f"{path} is a tracer: params_from is host Python and cannot run under jit, grad or vmap"
        )
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ConfigError(f"{path} is a {type(leaf).__name__}, not an array")
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ConfigError(f"{path} is of dtype {leaf.dtype}: weights are floating point")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigError(f"{path} is a deleted array: was it donated to a training step?")
    return leaf


def _check_shape(path: str, shape: tuple[int, ...], part: str, view: _View) -> None:
    sizes = dict(view.sizes)
    wanted = [math.prod(sizes[x] for x in token if x.isalpha()) for token in view.theirs]
    fits = len(shape) == len(wanted) and all(
        n > int(token) if token.isdecimal() else n >= size if token.endswith("*") else n == size
        for n, size, token in zip(shape, wanted, view.theirs, strict=True)
    )
    if not fits:
        said = ", ".join(
            "any" if t.isdecimal() else f"{t} = {n}"
            for t, n in zip(view.theirs, wanted, strict=True)
        )
        raise ConfigError(f"{path} is of shape {tuple(shape)}; for {part} the config says ({said})")


def _check_lora(path: str, w: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """A is [contracted axes..., rank] and B [rank, other axes...], where the contracted axes lead
    in W.
    """
    leading = [math.prod(w[:n]) for n in range(len(w) + 1)]
    fits = (
        math.prod(a[:-1]) in leading
        and a[-1:] == b[:1]
        and math.prod(a[:-1]) * math.prod(b[1:]) == math.prod(w)
    )
    if not fits:
        raise ConfigError(
            f"{path}_lora_a {a} and {path}_lora_b {b} cannot be merged into {path} of shape {w}"
        )


def _lora_alone(leaves: Mapping[str, Any]) -> bool:
    return bool(leaves) and all("_lora_" in path for path in leaves)


def _stack(axes: str, scan_axis: int) -> str:
    """The axes with L put in."""
    tokens = TOKEN.findall(axes)
    return " ".join([*tokens[:scan_axis], "L", *tokens[scan_axis:]])


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """(path, array) of every weight; an nnx tree's other variables (random keys, counters) are
    none.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    while isinstance(tree, Mapping) and set(tree) == {"params"}:
        tree = tree["params"]
    return _walk(tree, ())


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, nnx.Variable):
        if isinstance(node, nnx.Param):
            yield ".".join(path), node.get_value()
    elif isinstance(node, meta.AxisMetadata):
        yield ".".join(path), node.unbox()
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _walk(child, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for key, child in enumerate(node):
            yield from _walk(child, (*path, str(key)))
    else:
        yield ".".join(path), node
