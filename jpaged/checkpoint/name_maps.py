"""params_from makes Params of the weights of other projects' models, by a name map.

A name map gives for every tensor of ours, or every part of a fused one (`PARTS`), its path in the
other tree and its axes there: {"layers.{i}.mlp.gate": ("layers.{i}.mlp.gate_proj.kernel", "E F"),
...}. Paths join keys by dots; {i} is the number of the layer. Axes are letters: V vocabulary, E
embed, F ffn, K KV heads, G query heads a KV head, D head dim, X experts, I the width of an expert,
L layers (stacked, for scanned models). "(K G)" is one axis of size K*G, "(L)" one of all layers in
a tensor that is of no layer; "V*" may be longer than V, and its padding is cut off; a number takes
that index of its axis: ("wi.kernel", "E 0 F") is half of a fused gate and up. Where layers differ,
"layers.3.attention.k" is of that layer alone and comes before "layers.{i}.attention.k". The
dimensions of a head are in our order: rotated pairs are (i, i + R/2), in models of every family.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.checkpoint.vision_maps import vision_map
from jpaged.checkpoint.whole_tensors import Whole
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.param_spec import ParamSpec, Part
from jpaged.models.params import Params, all_parts, check_leaf, nest, param_table
from jpaged.models.trees import imported, is_module, to_tree

LAYER_NUMBER = re.compile(r"(?<=^layers)\.\d+\.")
TOKEN = re.compile(r"\([A-Z ]+\)|[A-Z]\*?|\d+")  # one axis
OF_IMAGES = ("vision_encoder.", "embedder.mm_")  # paths in the trees of both projects

BUILT = (
    "tunix_qwen3",
    "tunix_qwen2",
    "tunix_llama3",
    "tunix_gemma3",
    "tunix_gemma4",
    "maxtext_qwen3",
    "maxtext_qwen3_5",
    "maxtext_gemma3",
    "maxtext_gemma4",
    "maxtext_gpt_oss",
)

# A third entry, (divisor, minus): the other tree's numbers are ours times the one, plus the other.
Entry = tuple[str, str] | tuple[str, str, tuple[float, float]]
NameMap = Mapping[str, Entry]

# What a name map gives, with our order of its axes. Which of them are needed follows from the
# config.
PARTS = {name: " ".join(re.findall("[A-Z]", part.axes)) for name, part in all_parts().items()}

LAYERS = {  # of a layer's parts: the axes that both projects have, tunix's path and MaxText's
    "input_norm.scale": ("E", "input_layernorm.w", "pre_self_attention_layer_norm.scale"),
    "attention.q": ("E (K G) D", "attn.q_proj.w", "self_attention.query.kernel"),
    "attention.k": ("E K D", "attn.k_proj.w", "self_attention.key.kernel"),
    "attention.v": ("E K D", "attn.v_proj.w", "self_attention.value.kernel"),
    "attention.q_bias": ("(K G) D", None, "self_attention.query.bias"),
    "attention.k_bias": ("K D", None, "self_attention.key.bias"),
    "attention.v_bias": ("K D", None, "self_attention.value.bias"),
    "attention.q_norm.scale": ("D", "attn.q_norm.w", "self_attention.query_norm.scale"),
    "attention.k_norm.scale": ("D", "attn.k_norm.w", "self_attention.key_norm.scale"),
    "attention.out": ("(K G) D E", "attn.o_proj.w", "self_attention.out.kernel"),
    "post_norm.scale": (
        "E",
        "post_attention_layernorm.w",
        "post_self_attention_layer_norm.scale",
    ),
    "mlp.gate": ("E F", "mlp.gate_proj.kernel", "mlp.wi_0.kernel"),
    "mlp.up": ("E F", "mlp.up_proj.kernel", "mlp.wi_1.kernel"),
    "mlp.down": ("F E", "mlp.down_proj.kernel", "mlp.wo.kernel"),
    "mlp.router": ("E X", "mlp.router.kernel", "moe_block.gate.kernel"),
    "mlp.experts.gate": ("X E I", "mlp.gate_proj", "moe_block.wi_0"),
    "mlp.experts.up": ("X E I", "mlp.up_proj", "moe_block.wi_1"),
    "mlp.experts.down": ("X I E", "mlp.down_proj", "moe_block.wo"),
}
# tunix's Qwen 2 and 3 and Llama 3 call alike what they share; its Qwen 2 has biases, in one axis.
TUNIX_QWEN3: NameMap = {
    "embed.weight": ("embedder.input_embedding", "V E"),
    **{
        f"layers.{{i}}.{ours}": (f"layers.{{i}}.{path}", axes)
        for ours, (axes, path, _) in LAYERS.items()
        if path
    },
    "layers.{i}.attention.q_bias": ("layers.{i}.attn.q_bias", "(K G D)"),
    "layers.{i}.attention.k_bias": ("layers.{i}.attn.k_bias", "(K D)"),
    "layers.{i}.attention.v_bias": ("layers.{i}.attn.v_bias", "(K D)"),
    "norm.scale": ("final_norm.w", "E"),
    "lm_head.weight": ("lm_head.w", "E V"),
}


def maxtext_qwen3(*, scanned: bool = True, scan_axis: int = 1) -> NameMap:
    """Return the name map of MaxText's Qwen3, dense or of experts, whose layers are stacked on
    `scan_axis` (its param_scan_axis) or, unscanned, are nodes of their own.

    Its options fused_qkv and fused_mlp must be off, as in its Qwen3 configs.
    """

    def stack(axes: str) -> str:
        tokens = TOKEN.findall(axes)
        return " ".join([*tokens[:scan_axis], "L", *tokens[scan_axis:]])

    layer = "decoder.layers." if scanned else "decoder.layers_{i}."
    return {
        "embed.weight": ("token_embedder.embedding", "V* E"),
        **{
            f"layers.{{i}}.{ours}": (layer + path, stack(axes) if scanned else axes)
            for ours, (axes, _, path) in LAYERS.items()
        },
        "norm.scale": ("decoder.decoder_norm.scale", "E"),
        "lm_head.weight": ("decoder.logits_dense.kernel", "E V*"),
    }


NORMS = {  # Gemma's: the paths of tunix and of MaxText
    "input_norm.scale": ("pre_attention_norm.scale", "pre_self_attention_norm.scale"),
    "attention_post_norm.scale": ("post_attention_norm.scale", "post_self_attention_norm.scale"),
    "post_norm.scale": ("pre_ffw_norm.scale", "pre_ffw_norm.scale"),
    "mlp_post_norm.scale": ("post_ffw_norm.scale", "post_ffw_norm.scale"),
}


def tunix_gemma3(*, fused: bool = False) -> NameMap:
    """Return the name map of tunix's Gemma 3, text. fused: it has as many KV heads as query heads,
    and q, k and v are one tensor.
    """
    heads = {"q": "(K G) E D", "k": "K E D", "v": "K E D"}
    if fused:
        paths = {x: ("qkv_einsum.w", f"{i} {axes}") for i, (x, axes) in enumerate(heads.items())}
    else:
        paths = {x: ("kv_einsum.w", f"{i} {heads[x]}") for i, x in enumerate("kv")}
        paths["q"] = ("q_einsum.w", heads["q"])
    layer: dict[str, tuple[str, str]] = {
        **{f"attention.{x}": (f"attn.{path}", axes) for x, (path, axes) in paths.items()},
        "attention.out": ("attn.attn_vec_einsum.w", "(K G) D E"),
        "attention.q_norm.scale": ("attn._query_norm.scale", "D"),
        "attention.k_norm.scale": ("attn._key_norm.scale", "D"),
        **{ours: (path, "E") for ours, (path, _) in NORMS.items()},
        **{f"mlp.{x}": (LAYERS[f"mlp.{x}"][1] or "", axes) for x, axes in MLP.items()},
    }
    return {
        "embed.weight": ("embedder.input_embedding", "V E"),
        **{
            f"layers.{{i}}.{ours}": (f"layers.{{i}}.{p}", axes) for ours, (p, axes) in layer.items()
        },
        "norm.scale": ("final_norm.scale", "E"),
    }


MLP = {"gate": "E F", "up": "E F", "down": "F E"}
# Of tunix's Gemma 4, of a layer: beside what its Gemma 3 has.
GEMMA4 = {
    "scalar": ("skip_scale", "0"),
    "per_layer.gate": ("per_layer_input_gate.w", "E P"),
    "per_layer.out": ("per_layer_projection.w", "P E"),
    "per_layer.norm.scale": ("post_per_layer_input_norm.scale", "E"),
    "mlp.dense_post_norm.scale": ("dense_post_ffw_norm.scale", "E"),
    "mlp.experts_norm.scale": ("moe_pre_ffw_norm.scale", "E"),
    "mlp.experts_post_norm.scale": ("moe_post_ffw_norm.scale", "E"),
    "mlp.router_norm.scale": ("moe.router_scale", "E"),
    "mlp.router": ("moe.router_logits", "E X"),
    "mlp.expert_scales": ("moe.per_expert_scale", "X"),
    "mlp.experts.gate": ("moe.gating_einsum", "X 0 I E"),
    "mlp.experts.up": ("moe.gating_einsum", "X 1 I E"),
    "mlp.experts.down": ("moe.linear", "X I E"),
}


def tunix_gemma4(model: ModelConfig, *, is_flat: bool = True) -> NameMap:
    """Return the name map of tunix's Gemma 4, text. Layers whose values are their keys have one
    tensor for both. is_flat: the per-layer embeddings of a token are one axis, as from tunix 0.1.8
    on.
    """
    per_layer = "(L P)" if is_flat else "(L) P"
    table = {
        **tunix_gemma3(),
        **{f"layers.{{i}}.{x}": (f"layers.{{i}}.{p}", axes) for x, (p, axes) in GEMMA4.items()},
        "per_layer.table": ("embedder.per_layer_input_embedding", f"V {per_layer}"),
        "per_layer.projection": ("embedder.per_layer_model_projection.w", f"E {per_layer}"),
        "per_layer.norm.scale": ("embedder.per_layer_projection_norm.scale", "P"),
    }
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.value_is_key:
            table[f"layers.{i}.attention.k"] = (f"layers.{i}.attn.k_einsum.w", "K E D")
    return table


def _unread(family: str | NameMap, model: ModelConfig) -> set[str]:
    """Return the paths of leaves that tunix's Gemma 4 has and never reads: what would make keys and
    values in the layers that read those of another.
    """
    if family != "tunix_gemma4":
        return set()
    sharing = [
        i
        for i, layer in enumerate(model.layers)
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.keys_of is not None
    ]
    made = ("kv_einsum.w", "k_einsum.w", "_key_norm.scale")
    return {f"layers.{i}.attn.{name}" for i in sharing for name in made}


def maxtext_gemma3(hidden_size: int) -> NameMap:
    """Return the name map of MaxText's Gemma 3, text, with unscanned layers. Its tree holds scaled
    embeddings, and 1 + scale of norms.
    """
    scale = float(jnp.bfloat16(hidden_size**0.5))  # as MaxText rounds it
    norms = {**NORMS, "attention.q_norm.scale": LAYERS["attention.q_norm.scale"][1:]}
    norms["attention.k_norm.scale"] = LAYERS["attention.k_norm.scale"][1:]
    parts = ("q", "k", "v", "out")
    weights = [*(f"attention.{x}" for x in parts), *(f"mlp.{x}" for x in MLP)]
    layer: dict[str, Any] = {
        **{
            ours: (path, LAYERS.get(ours, ("E",))[0], (1.0, 1.0))
            for ours, (_, path) in norms.items()
        },
        **{ours: (LAYERS[ours][2], LAYERS[ours][0]) for ours in weights},
    }
    return {
        "embed.weight": ("token_embedder.embedding", "V* E", (scale, 0.0)),
        **{
            f"layers.{{i}}.{ours}": (f"decoder.layers_{{i}}.{path}", *rest)
            for ours, (path, *rest) in layer.items()
        },
        "norm.scale": ("decoder.decoder_norm.scale", "E", (1.0, 1.0)),
    }


def _maxtext(layer: Mapping[str, Entry], embed: Entry) -> dict[str, Entry]:
    """Return the name map of a model of MaxText with unscanned layers. layer: the entries of a
    layer's parts, with paths below the layer.
    """
    entries: dict[str, Any] = {
        "embed.weight": embed,
        **{
            f"layers.{{i}}.{ours}": (f"decoder.layers_{{i}}.{path}", *rest)
            for ours, (path, *rest) in layer.items()
        },
        "norm.scale": ("decoder.decoder_norm.scale", "E"),
        "lm_head.weight": ("decoder.logits_dense.kernel", "E V*"),
    }
    return entries


GPT_OSS = {  # MaxText's: the paths of a layer's parts, and their axes
    "input_norm.scale": ("pre_self_attention_layer_norm.scale", "E"),
    "post_norm.scale": ("post_self_attention_layer_norm.scale", "E"),
    "attention.q": ("GptOssAttention.query.kernel", "E (K G) D"),
    "attention.k": ("GptOssAttention.key.kernel", "E K D"),
    "attention.v": ("GptOssAttention.value.kernel", "E K D"),
    "attention.q_bias": ("GptOssAttention.query.bias", "(K G) D"),
    "attention.k_bias": ("GptOssAttention.key.bias", "K D"),
    "attention.v_bias": ("GptOssAttention.value.bias", "K D"),
    "attention.out": ("GptOssAttention.out.kernel", "(K G) D E"),
    "attention.out_bias": ("GptOssAttention.out.bias", "E"),
    "attention.sinks": ("GptOssAttention.sinks", "(K G)"),
    "mlp.router": ("GptOssMlp.gate.kernel", "E X"),
    "mlp.router_bias": ("GptOssMlp.gate.bias", "X"),
    "mlp.experts.gate": ("GptOssMlp.wi_0", "X E I"),
    "mlp.experts.up": ("GptOssMlp.wi_1", "X E I"),
    "mlp.experts.down": ("GptOssMlp.wo", "X I E"),
    "mlp.experts.gate_bias": ("GptOssMlp.wi_0_bias", "X I"),
    "mlp.experts.up_bias": ("GptOssMlp.wi_1_bias", "X I"),
    "mlp.experts.down_bias": ("GptOssMlp.wo_bias", "X E"),
}
MAXTEXT_GEMMA4 = {  # of its layers of experts; a dense one has "mlp.wi_0.kernel" and its like
    "mlp.dense_post_norm.scale": ("mlp.post_feedforward_layernorm_1.scale", "E"),
    "mlp.experts_norm.scale": ("mlp.pre_feedforward_layernorm_2.scale", "E"),
    "mlp.experts_post_norm.scale": ("mlp.post_feedforward_layernorm_2.scale", "E"),
    "mlp.router_norm.scale": ("mlp.pre_forward_scale_2", "E"),
    "mlp.router": ("mlp.moe_block.MoeBlock_0.gate.kernel", "E X"),
    "mlp.expert_scales": ("mlp.moe_block.MoeBlock_0.per_expert_scale", "X"),
    "mlp.experts.gate": ("mlp.moe_block.MoeBlock_0.wi_0", "X E I"),
    "mlp.experts.up": ("mlp.moe_block.MoeBlock_0.wi_1", "X E I"),
    "mlp.experts.down": ("mlp.moe_block.MoeBlock_0.wo", "X I E"),
}


def maxtext_gemma4(hidden_size: int, *, has_experts: bool) -> NameMap:
    """Return the name map of MaxText's Gemma 4, text, of the sizes without per-layer embeddings,
    with unscanned layers. Its tree holds scaled embeddings; norms are as they are.
    """
    parts = ("q", "k", "v", "q_norm.scale", "k_norm.scale", "out")
    attention = {f"attention.{x}": LAYERS[f"attention.{x}"] for x in parts}
    mlp = "mlp.moe_block.shared_experts" if has_experts else "mlp"
    layer: dict[str, Entry] = {
        **{ours: (path, axes) for ours, (axes, _, path) in attention.items()},
        **{ours: (path, "E") for ours, (_, path) in NORMS.items()},
        "mlp.gate": (f"{mlp}.wi_0.kernel", "E F"),
        "mlp.up": (f"{mlp}.wi_1.kernel", "E F"),
        "mlp.down": (f"{mlp}.wo.kernel", "F E"),
        "scalar": ("layer_scalar", "0"),
        **MAXTEXT_GEMMA4,
    }
    scale = float(np.float32(hidden_size**0.5))
    return _maxtext(layer, ("token_embedder.embedding", "V* E", (scale, 0.0)))


QWEN3_5 = {  # MaxText's, of the parts that are tensors of their own
    "input_norm.scale": ("input_layernorm.scale", "E"),
    "post_norm.scale": ("post_attention_layernorm.scale", "E"),
    "attention.q_norm.scale": ("attention.attention.query_norm.scale", "D"),
    "attention.k_norm.scale": ("attention.attention.key_norm.scale", "D"),
    "attention.out": ("attention.attention.out.kernel", "(K G) D E"),
    "delta.log_decay": ("attention.A_log", "(N J)"),
    "delta.dt_bias": ("attention.dt_bias", "(N J)"),
    "delta.norm.scale": ("attention.norm.rms_norm.scale", "Y"),
    "delta.out": ("attention.out_proj.kernel", "(N U) E"),
    "mlp.router": ("mlp.routed_experts.gate.kernel", "E X"),
    "mlp.experts.gate": ("mlp.routed_experts.wi_0", "X E I"),
    "mlp.experts.up": ("mlp.routed_experts.wi_1", "X E I"),
    "mlp.experts.down": ("mlp.routed_experts.wo", "X I E"),
    "mlp.shared.gate": ("mlp.shared_expert.wi_0.kernel", "E R"),
    "mlp.shared.up": ("mlp.shared_expert.wi_1.kernel", "E R"),
    "mlp.shared.down": ("mlp.shared_expert.wo.kernel", "R E"),
    "mlp.shared_gate": ("mlp.shared_expert_gate.kernel", "E 0"),
}


def _whole(family: str | NameMap, model: ModelConfig) -> dict[str, Whole]:
    """Return our tensors that no name map describes, by their names: those of vision towers, and of
    MaxText's Qwen 3.5, whose fused tensors have the parts of a head, of several sizes, side by
    side.
    """
    whole: dict[str, Whole] = {}
    if isinstance(family, str) and model.vision is not None:
        whole |= vision_map(family, model.vision)[1]
    if family != "maxtext_qwen3_5":
        return whole
    for i, layer in enumerate(model.layers):
        above, ours = f"decoder.layers_{i}.attention", f"layers.{i}"
        if isinstance(layer.mixer, DeltaConfig):
            taps = Whole((f"{above}.conv1d.kernel",), _taps, layer.mixer.key_dim)
            whole[f"{ours}.delta.qkvz"] = Whole((f"{above}.in_proj_qkvz.kernel",), _transposed)
            whole[f"{ours}.delta.ba"] = Whole((f"{above}.in_proj_ba.kernel",), _transposed)
            whole[f"{ours}.delta.conv"] = taps
        else:
            paths = [f"{above}.attention.{name}.kernel" for name in ("query", "key", "value")]
            whole[f"{ours}.attention.qkv"] = Whole(tuple(paths), _gated_qkv)
    return whole


def _transposed(shape: tuple[int, ...], _: int, x: jax.Array) -> jax.Array:
    """Return [E, rows] as [..., E]: the rows of a key head are together in both."""
    return x.T.reshape(shape)


def _taps(shape: tuple[int, ...], key_dim: int, x: jax.Array) -> jax.Array:
    """Return the convolution [W, 1, channels] of all queries, then all keys, then all values as
    [N, channels of a key head, 1, W].
    """
    heads, size = shape[0], shape[0] * key_dim
    parts = jnp.split(x[:, 0].T, [size, 2 * size])
    return jnp.concatenate([part.reshape(heads, -1, 1, shape[-1]) for part in parts], 1)


def _gated_qkv(
    shape: tuple[int, ...], _: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Return queries [E, H, 2 D], each with its gate behind it, keys and values [E, K, D] as
    [K, G queries and gates in turn, key and value, D, E].
    """
    heads, _, width, size = shape
    q = q.reshape(size, heads, -1, width).transpose(1, 2, 3, 0)
    parts = [x.transpose(1, 2, 0)[:, None] for x in (k, v)]
    return jnp.concatenate([q, *parts], 1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _made(
    make: Callable[..., jax.Array], size: int, shape: tuple[int, ...], leaves: list[jax.Array]
) -> jax.Array:
    """Return a tensor of this shape that is made of others'."""
    return make(shape, size, *leaves)


def params_from(
    tree: Any,
    family: str | NameMap,
    *,
    config: Any,
    lora_scale: float | None = None,
    images: bool = False,
) -> Params:
    """Return Params of the weights of another project's model: tensors are renamed, transposed and
    unstacked, heads are split, parts fused.

    tree: an nnx Module or State, a linen {"params": ...} dict or a plain dict; arrays on one device
    or sharded. family: "tunix_qwen3" (dense or of experts), "tunix_qwen2", "tunix_llama3",
    "tunix_gemma3", "tunix_gemma4", "maxtext_qwen3" (dense or of experts, scanned or not),
    "maxtext_qwen3_5" (of experts), "maxtext_gemma3", "maxtext_gemma4" (without per-layer
    embeddings), "maxtext_gpt_oss" (all four unscanned), or a name map in the form that this
    module describes. config: ModelConfig, Hugging Face dict or folder. lora_scale: alpha / rank of
    the tree's LoRA parts (leaves named NAME_lora_a and NAME_lora_b beside NAME, as qwix has them),
    which are merged: W + lora_scale * A @ B. images: with the vision tower, as for load_params; a
    ModelConfig says it itself. The maps of Gemma 3 and 4 and MaxText's of Qwen 3 (for Qwen3-VL) and
    3.5 have their towers. Tensors that need no change are the tree's arrays. The
    rest is made on the devices by functions that are compiled once for all weights of the same
    shapes. Raises ConfigError that names the first path that does not fit, leaves that the map does
    not take, and LoRA parts without a lora_scale.
    """
    model = ModelConfig.coerce(config, images=images)
    if images and model.vision is None:
        raise ConfigError(
            "images=True: this ModelConfig has no vision tower; ModelConfig.from_hf(..., "
            "images=True) reads one"
        )
    leaves = dict(find_leaves(tree))
    table, whole = name_map(family, leaves, model), _whole(family, model)
    source = _Source(model, table, leaves, lora_scale, whole)
    out = {name: source.tensor(name, spec) for name, spec in param_table(model).items()}
    read = source.taken | _unread(family, model)
    if left := [path for path in leaves if path not in read]:
        lora = (
            " (a LoRA part without a weight that it could be merged into)"
            if "_lora_" in left[0]
            else ""
        )
        more = f" and {len(left) - 1} more" if left[1:] else ""
        of_images = model.vision is None and left[0].startswith(OF_IMAGES)
        advice = ": pass images=True to have the vision tower, too" if of_images else ""
        raise ConfigError(
            f"the tree holds {left[0]}{lora}{more}, which the name map of {model.family} "
            f"does not take{advice}"
        )
    return Params(nest(out), model, Path(config) if isinstance(config, str | Path) else None)


@dataclasses.dataclass(frozen=True)
class _View:
    """The layout of a part of one of our tensors in the other tree."""

    theirs: tuple[str, ...]  # tokens of their axes
    ours: tuple[str, ...]  # letters of our axes
    sizes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]  # of the part in our tensor
    lora_scale: float = 0.0
    divisor: float = 1.0
    minus: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Source:
    """The other project's leaves by path. whole: see `_whole`. taken: the paths that our tensors
    have used.
    """

    model: ModelConfig
    table: NameMap
    leaves: Mapping[str, Any]
    lora_scale: float | None
    whole: Mapping[str, Whole]
    taken: set[str] = dataclasses.field(default_factory=set)

    def tensor(self, name: str, spec: ParamSpec) -> Any:
        """Return one tensor of ours."""
        if name in self.whole:
            return self._made(name, self.whole[name], spec.shape)
        parts = [self._part(spec, part) for part in spec.parts]
        views, arrays = zip(*parts, strict=True)
        if len(arrays) == len(arrays[0]) == 1 and _is_ours(views[0], arrays[0][0].shape):
            return arrays[0][0]
        if len(dtypes := {str(leaves[0].dtype) for leaves in arrays}) > 1:
            raise ConfigError(
                f"the parts of {name} are in {' and '.join(sorted(dtypes))}: cast them to one dtype"
            )
        stacked = any("L" in view.theirs for view in views)
        layer = np.int32(spec.layer) if stacked and spec.layer is not None else None
        return _assemble(views, spec.concat_axis, arrays, layer)

    def _part(self, spec: ParamSpec, part: Part) -> tuple[_View, tuple[Any, ...]]:
        """Return a part's view and its leaves: the weight, or the weight with LoRA's A and B."""
        if (entry := entry_of(self.table, spec, part)) is None:
            raise ConfigError(f"the name map lacks {part.name!r}, which this config needs")
        path, axes, *change = entry
        view = _view(spec, part, axes, self.model.num_layers)
        if change:
            view = dataclasses.replace(view, divisor=change[0][0], minus=change[0][1])
        leaves = [self._leaf(path)]
        _check_shape(path, leaves[0].shape, part.name, view)
        lora = [f"{path}_lora_a", f"{path}_lora_b"]
        if lora[0] in self.leaves and "L" not in view.theirs:
            if self.lora_scale is None:
                raise ConfigError(
                    f"the tree holds {lora[0]}: pass lora_scale= (alpha / rank) to have it merged"
                )
            leaves += map(self._leaf, lora)
            _check_lora(path, *(x.shape for x in leaves))
            view = dataclasses.replace(view, lora_scale=self.lora_scale)
        return view, tuple(leaves)

    def _made(self, name: str, whole: Whole, shape: tuple[int, ...]) -> Any:
        """Return a tensor that a function makes; ConfigError where the leaves do not fit."""
        leaves, cause = [self._leaf(path) for path in whole.paths], None
        for path, leaf, wanted in zip(whole.paths, leaves, whole.shapes, strict=False):
            if leaf.shape != wanted:
                raise ConfigError(
                    f"{path} is of shape {tuple(leaf.shape)}; for {name} the config says {wanted}"
                )
        try:
            made = _made(whole.make, whole.size, shape, leaves)
        except (TypeError, ValueError) as e:
            made, cause = None, e
        if made is None or made.shape != shape:
            theirs = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            said = f"{whole.paths[0]} is of shape {theirs}; {name} of this config is of {shape}"
            raise ConfigError(said) from cause
        return made

    def _leaf(self, path: str) -> Any:
        if path not in self.leaves:
            alone = self.leaves and all("_lora_" in path for path in self.leaves)
            only = " (it holds LoRA parts alone: they need their base weights)" if alone else ""
            raise ConfigError(f"the tree lacks {path}{only}")
        check_leaf(path, self.leaves[path], "params_from")
        self.taken.add(path)
        return self.leaves[path]


def entry_of(table: NameMap, spec: ParamSpec, part: Part) -> Entry | None:
    """Return a map's entry of a part, with the path in this layer; None if there is none."""
    entry = table.get(spec.at(part.name)) or table.get(part.name)
    if entry is None:
        return None
    path = spec.at(entry[0])
    return (path, entry[1]) if len(entry) == 2 else (path, entry[1], entry[2])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _assemble(
    views: tuple[_View, ...], axis: int, arrays: tuple[tuple[jax.Array, ...], ...], layer: Any
) -> jax.Array:
    """Return one of our tensors from the leaves of its parts: tuples (weight,) or (weight, LoRA's
    A, LoRA's B).
    """
    parts = [_part(view, layer, *leaves) for view, leaves in zip(views, arrays, strict=True)]
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
    for axis in reversed(range(x.ndim)):  # from the right: taking an index drops its axis
        token = view.theirs[axis]
        if token == "L":
            x = jax.lax.dynamic_index_in_dim(x, layer, axis, keepdims=False)
        elif token.isdecimal():
            x = jax.lax.index_in_dim(x, int(token), axis, keepdims=False)
        elif token.endswith("*"):
            x = jax.lax.slice_in_dim(x, 0, sizes[token[0]], axis=axis)
    letters = _letters(view.theirs)
    x = x.reshape([sizes[letter] for letter in letters])
    if (view.divisor, view.minus) != (1.0, 0.0):
        x = ((x.astype(jnp.float32) - view.minus) / view.divisor).astype(x.dtype)
    return x.transpose([letters.index(letter) for letter in view.ours]).reshape(view.shape)


def _is_ours(view: _View, shape: tuple[int, ...]) -> bool:
    """Return whether their array is our tensor already."""
    if (view.divisor, view.minus) != (1.0, 0.0):
        return False
    return shape == view.shape and tuple(_letters(view.theirs)) == view.ours


def _letters(theirs: tuple[str, ...]) -> list[str]:
    """Return the letters of their axes, in order, without that of stacked layers."""
    return [x for token in theirs if token != "L" for x in token if x.isalpha()]


def _view(spec: ParamSpec, part: Part, axes: str, num_layers: int) -> _View:
    """Return the view of a part whose axes have this spelling; ConfigError if they do not fit."""
    ours, theirs = re.findall("[A-Z]", part.axes), TOKEN.findall(axes)
    if (
        sorted(_letters(tuple(theirs))) != sorted(ours)
        or theirs.count("L") > 1
        or TOKEN.sub("", axes).strip()
    ):
        raise ConfigError(
            f"axes {axes!r} of {part.name}: must hold {', '.join(ours)} once each (and L if it "
            "is stacked)"
        )
    sizes = (*spec.sizes, ("L", num_layers))
    return _View(tuple(theirs), tuple(ours), sizes, spec.shape_of(part.axes))


def name_map(family: str | NameMap, leaves: Mapping[str, Any], model: ModelConfig) -> NameMap:
    """Return a name map by its name, for the variant that a tree's leaves show; ConfigError if it
    is not known.
    """
    table = _text_map(family, leaves, model)
    if isinstance(family, str) and model.vision is not None:
        return {**table, **vision_map(family, model.vision)[0]}
    return table


def _text_map(family: str | NameMap, leaves: Mapping[str, Any], model: ModelConfig) -> NameMap:
    if isinstance(family, Mapping):
        specs = () if model.vision is None else model.vision.params()
        known = {*all_parts(), *(part.name for spec in specs for part in spec.parts)}
        if unknown := sorted(x for x in family if LAYER_NUMBER.sub(".{i}.", x) not in known):
            raise ConfigError(
                f"the name map gives {unknown[0]!r}, which is not one of {', '.join(PARTS)}"
            )
        return family
    is_scanned = any(path.startswith("decoder.layers.") for path in leaves)
    if family in ("tunix_qwen3", "tunix_qwen2", "tunix_llama3"):
        return TUNIX_QWEN3
    if family == "tunix_gemma3":
        return tunix_gemma3(fused=any("qkv_einsum" in path for path in leaves))
    if family == "tunix_gemma4":
        table = leaves.get("embedder.per_layer_input_embedding")
        return tunix_gemma4(model, is_flat=table is None or table.ndim == 2)
    if family == "maxtext_qwen3":
        return maxtext_qwen3(
            scanned=not any(path.startswith("decoder.layers_0.") for path in leaves)
        )
    if isinstance(family, str) and family.startswith("maxtext_") and family in BUILT:
        is_scanned |= any(path.startswith("decoder.scanned_blocks.") for path in leaves)
        if is_scanned:
            raise ConfigError(f"{family}: scanned layers; pass a tree with scan_layers=False")
    if family == "maxtext_gemma3":
        return maxtext_gemma3(model.hidden_size)
    if family == "maxtext_gemma4":
        has_experts = any(".moe_block." in path for path in leaves)
        return maxtext_gemma4(model.hidden_size, has_experts=has_experts)
    if family == "maxtext_gpt_oss":
        return _maxtext(GPT_OSS, ("token_embedder.embedding", "V* E"))
    if family == "maxtext_qwen3_5":
        return _maxtext(QWEN3_5, ("token_embedder.embedding", "V* E"))
    built = ", ".join(map(repr, BUILT))
    raise ConfigError(f"family={family!r}: must be {built} or a name map")


def _check_shape(path: str, shape: tuple[int, ...], part: str, view: _View) -> None:
    sizes = dict(view.sizes)
    wanted = [math.prod(sizes[x] for x in token if x.isalpha()) for token in view.theirs]
    fits = len(shape) == len(wanted) and all(
        n > int(token) if token.isdecimal() else n >= size if token.endswith("*") else n == size
        for n, size, token in zip(shape, wanted, view.theirs, strict=True)
    )
    if not fits:
        axes = ", ".join(
            "any" if t.isdecimal() else f"{t} = {n}"
            for t, n in zip(view.theirs, wanted, strict=True)
        )
        raise ConfigError(f"{path} is of shape {tuple(shape)}; for {part} the config says ({axes})")


def _check_lora(path: str, w: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """ConfigError unless A is [contracted axes..., rank] and B is [rank, other axes...], and the
    contracted axes are the first of W.
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


def find_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of every weight; other variables of an nnx tree (random keys, counters)
    are none.
    """
    if is_module(tree):
        tree = to_tree(tree)
    while isinstance(tree, Mapping) and set(tree) == {"params"}:
        tree = tree["params"]
    return _walk(tree, ())


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    nnx, meta = imported("flax.nnx"), imported("flax.core.meta")
    if nnx is not None and isinstance(node, nnx.Variable):
        if isinstance(node, nnx.Param):
            yield ".".join(path), node.get_value()
    elif meta is not None and isinstance(node, meta.AxisMetadata):
        yield ".".join(path), node.unbox()
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _walk(child, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for key, child in enumerate(node):
            yield from _walk(child, (*path, str(key)))
    else:
        yield ".".join(path), node
