"""Where the parameters of vision towers lie in tunix's and in MaxText's trees: entries of a name
map, and what no name map can say.

Paths and axes are those of the projects' modules of August 2026: tunix/models/gemma3/vision.py and
gemma4/vision.py; maxtext/models/gemma3.py, gemma4_vision.py and qwen3.py (Qwen3OmniMoeVision*, of
which the encoders of Qwen3-VL and Qwen 3.5 are subclasses).
"""

from collections.abc import Callable
from typing import Any

from jpaged.checkpoint.whole_tensors import (
    Whole,
    joined_heads,
    of_kernel,
    reshaped,
    with_axes_first,
)
from jpaged.errors import ConfigError
from jpaged.models.vision.gemma4 import BOUNDS, Gemma4VisionConfig
from jpaged.models.vision.qwen import Qwen3VisionConfig
from jpaged.models.vision.siglip import SiglipVisionConfig
from jpaged.models.vision.tower import PREFIX, VisionConfig

type Entries = dict[str, Any]  # of a name map, by names without the prefix of towers
type Wholes = dict[str, Whole]

THEIRS = {"q": "query", "k": "key", "v": "value"}  # MaxText's names
BOTH = ("scale", "bias")  # of a layer norm


def vision_map(family: str, vision: VisionConfig) -> tuple[Entries, Wholes]:
    """Return the entries of a tower's parameters in the name map of this name, and the tensors that
    are made whole, both by full names. ConfigError for a tower that the other project does not
    have.
    """
    kind, make = MAPS.get(family, (None, None))
    if make is None or kind is not type(vision):
        raise ConfigError(
            f"{family!r} has no map of the vision tower {type(vision).__name__}: pass a config "
            "without one, or a name map"
        )
    entries, wholes = make(vision)
    return ({PREFIX + k: x for k, x in entries.items()}, {PREFIX + k: x for k, x in wholes.items()})


def _norm(ours: str, path: str) -> Entries:
    return {f"{ours}.{x}": (f"{path}.{x}", "W") for x in BOTH}


def _product(ours: str, path: str, axes: str, bias: str) -> Entries:
    return {f"{ours}.weight": (f"{path}.kernel", axes), f"{ours}.bias": (f"{path}.bias", bias)}


def _siglip_ends(vision: SiglipVisionConfig, node: str) -> tuple[Entries, Wholes]:
    """Return what stands before the blocks, which both projects have alike."""
    side, width = vision.patch_size, vision.width
    kernel, table = (side, side, 3, width), (1, vision.side**2, width)
    wholes = {
        "patch.weight": Whole((f"{node}.embedding.kernel",), of_kernel, shapes=(kernel,)),
        "positions": Whole((f"{node}.pos_embedding",), reshaped, shapes=(table,)),
    }
    return {"patch.bias": (f"{node}.embedding.bias", "W")}, wholes


def tunix_siglip(vision: SiglipVisionConfig) -> tuple[Entries, Wholes]:
    """Return the map of tunix's Gemma 3."""
    node = "vision_encoder.siglip_encoder"
    entries, wholes = _siglip_ends(vision, node)
    for i in range(vision.num_layers):
        ours, path = f"blocks.{i}", f"{node}.transformer.blocks.{i}"
        entries |= _norm(f"{ours}.attention_norm", f"{path}.ln1")
        for x, theirs in THEIRS.items():
            name = f"{path}.attn.{theirs}_proj"
            entries[f"{ours}.attention.qkv.{x}"] = (f"{name}.kernel", "W (H D)")
            entries[f"{ours}.attention.qkv.{x}_bias"] = (f"{name}.bias", "(H D)")
        entries |= _product(f"{ours}.attention.out", f"{path}.attn.out_proj", "(H D) W", "W")
        entries |= _norm(f"{ours}.mlp_norm", f"{path}.ln2")
        entries |= _product(f"{ours}.mlp.up", f"{path}.mlp.fc1", "W F", "F")
        entries |= _product(f"{ours}.mlp.down", f"{path}.mlp.fc2", "F W", "W")
    entries |= _norm("norm", f"{node}.transformer.encoder_norm")
    entries["projection_norm.scale"] = ("embedder.mm_soft_embedding_norm.scale", "W")
    entries["projection"] = ("embedder.mm_input_projection.w", "W E")
    return entries, wholes


def maxtext_siglip(vision: SiglipVisionConfig) -> tuple[Entries, Wholes]:
    """Return the map of MaxText's Gemma 3. The norm before the projection holds 1 + scale there."""
    node = "vision_encoder.Gemma3VisionEncoderLayer_0"
    entries, wholes = _siglip_ends(vision, node)
    for i in range(vision.num_layers):
        ours, path = f"blocks.{i}", f"{node}.Transformer.encoderblock_{i}"
        attention = f"{path}.MultiHeadDotProductAttention_0"
        entries |= _norm(f"{ours}.attention_norm", f"{path}.LayerNorm_0")
        for x, theirs in THEIRS.items():
            entries[f"{ours}.attention.qkv.{x}"] = (f"{attention}.{theirs}.kernel", "W H D")
            entries[f"{ours}.attention.qkv.{x}_bias"] = (f"{attention}.{theirs}.bias", "H D")
        entries |= _product(f"{ours}.attention.out", f"{attention}.out", "H D W", "W")
        entries |= _norm(f"{ours}.mlp_norm", f"{path}.LayerNorm_1")
        entries |= _product(f"{ours}.mlp.up", f"{path}.MlpBlockViT_0.Dense_0", "W F", "F")
        entries |= _product(f"{ours}.mlp.down", f"{path}.MlpBlockViT_0.Dense_1", "F W", "W")
    entries |= _norm("norm", f"{node}.Transformer.encoder_norm")
    projector = "vision_encoder.VisionEmbedder_0"
    norm = f"{projector}.mm_soft_embedding_norm.scale"
    entries["projection_norm.scale"] = (norm, "W", (1.0, 1.0))
    entries["projection"] = (f"{projector}.mm_input_projection.w", "W E")
    return entries, wholes


GEMMA4_NORMS = {
    "attention_norm": "pre_attention_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "mlp_post_norm": "post_ffw_norm",
}


def tunix_gemma4_vision(vision: Gemma4VisionConfig) -> tuple[Entries, Wholes]:
    """Return the map of tunix's Gemma 4. Keys and values, and gate and up, are one product there,
    whose bounds hold for both.
    """
    node = "vision_encoder"
    tables = (vision.num_positions, 2, vision.width)
    wholes = {"positions": Whole((f"{node}.entry.pos_emb",), with_axes_first, shapes=(tables,))}
    entries: Entries = {"patch.weight": (f"{node}.entry.input_projection.w", "C W")}
    products = {
        "attention.q": ("attn.q_einsum", "H W D"),
        "attention.k": ("attn.kv_einsum", "0 J W D"),
        "attention.v": ("attn.kv_einsum", "1 J W D"),
        "attention.out": ("attn.attn_vec_einsum", "H D W"),
        "mlp.gate": ("mlp.gating_einsum", "0 F W"),
        "mlp.up": ("mlp.gating_einsum", "1 F W"),
        "mlp.down": ("mlp.linear", "F W"),
    }
    for i in range(vision.num_layers):
        ours, path = f"blocks.{i}", f"{node}.layers.{i}"
        entries |= _gemma4_norms(ours, path, "attn")
        for x, (theirs, axes) in products.items():
            entries[f"{ours}.{x}.weight"] = (f"{path}.{theirs}.w", axes)
            if vision.is_clipped:
                for bound in BOUNDS:
                    entries[f"{ours}.{x}.{bound}"] = (f"{path}.{theirs}.clip_{bound}", "")
    if vision.standardizes:
        entries |= {x: (f"{node}.standardize.{x}", "W") for x in BOTH}
    entries["projection.weight"] = ("embedder.mm_input_projection.w", "W E")
    return entries, wholes


def _gemma4_norms(ours: str, path: str, attention: str) -> Entries:
    """Return the norms of a block of Gemma 4's tower. path, attention: names of theirs."""
    norms: Entries = {}
    for x, theirs in GEMMA4_NORMS.items():
        norms[f"{ours}.{x}.scale"] = (f"{path}.{theirs}.scale", "W")
    for x in "qk":
        norm = f"{path}.{attention}.{THEIRS[x]}_norm.scale"
        norms[f"{ours}.attention.{x}_norm.scale"] = (norm, "D")
    return norms


def maxtext_gemma4_vision(vision: Gemma4VisionConfig) -> tuple[Entries, Wholes]:
    """Return the map of MaxText's Gemma 4, whose towers standardise and bound nothing."""
    node = "vision_encoder.Gemma4VisionEncoderLayer_0"
    path = f"{node}.vision_entry.pos_emb_param"
    tables = (vision.num_positions, 2, vision.width)
    wholes = {"positions": Whole((path,), with_axes_first, shapes=(tables,))}
    entries: Entries = {"patch.weight": (f"{node}.vision_entry.input_projection.kernel", "C W")}
    products = {
        "attention.q": ("attention.query", "W H D"),
        "attention.k": ("attention.key", "W J D"),
        "attention.v": ("attention.value", "W J D"),
        "attention.out": ("attention.out", "H D W"),
        "mlp.gate": ("mlp.wi_0", "W F"),
        "mlp.up": ("mlp.wi_1", "W F"),
        "mlp.down": ("mlp.wo", "F W"),
    }
    for i in range(vision.num_layers):
        ours, path = f"blocks.{i}", f"{node}.layer_{i}"
        entries |= _gemma4_norms(ours, path, "attention")
        for x, (theirs, axes) in products.items():
            entries[f"{ours}.{x}.weight"] = (f"{path}.{theirs}.kernel", axes)
    entries |= {x: (f"{node}.std_{x}", "W") for x in BOTH}
    projector = "vision_encoder.Gemma4VisionProjector_0"
    entries["projection.weight"] = (f"{projector}.projection.kernel", "W E")
    return entries, wholes


def maxtext_qwen(name: str) -> Callable[[Qwen3VisionConfig], tuple[Entries, Wholes]]:
    """Return what makes the map of MaxText's Qwen3-VL or Qwen 3.5. name: that of its modules."""

    def make(vision: Qwen3VisionConfig) -> tuple[Entries, Wholes]:
        node, width = f"vision_encoder.{name}VisionEncoder_0", vision.width
        kernel = (vision.frames, vision.patch_size, vision.patch_size, 3, width)
        path = f"{node}.patch_embed.proj"
        wholes = {"patch.weight": Whole((f"{path}.kernel",), of_kernel, shapes=(kernel,))}
        entries: Entries = {
            "patch.bias": (f"{path}.bias", "W"),
            "positions": (f"{node}.pos_embed_interpolate.pos_embed", "N W"),
        }
        heads = (vision.num_heads, vision.head_dim)
        for i in range(vision.num_layers):
            ours, path = f"blocks.{i}", f"{node}.blocks_{i}"
            entries |= _norm(f"{ours}.attention_norm", f"{path}.ln1")
            for kind, leaf, shape in (
                ("weight", "kernel", (width, *heads)),
                ("bias", "bias", heads),
            ):
                paths = tuple(f"{path}.attn.attn.{theirs}.{leaf}" for theirs in THEIRS.values())
                wholes[f"{ours}.attention.qkv.{kind}"] = Whole(
                    paths, joined_heads, shapes=(shape,) * 3
                )
            entries |= _product(f"{ours}.attention.out", f"{path}.attn.attn.out", "H D W", "W")
            entries |= _norm(f"{ours}.mlp_norm", f"{path}.ln2")
            entries |= _product(f"{ours}.mlp.up", f"{path}.mlp", "W F", "F")
            entries |= _product(f"{ours}.mlp.down", f"{path}.mlp_out", "F W", "W")
        mergers = {f"deepstack.{j}": f"{node}.merger_{j}" for j in range(vision.num_deep)}
        mergers["merger"] = f"vision_encoder.{name}VisionProjector_0.merger"
        for ours, path in mergers.items():
            axis = "W" if ours == "merger" else "M"
            entries |= {f"{ours}.norm.{x}": (f"{path}.ln_q.{x}", axis) for x in BOTH}
            entries |= _product(f"{ours}.first", f"{path}.mlp_0", "P M", "M")
            entries |= _product(f"{ours}.second", f"{path}.mlp_2", "M E", "E")
        return entries, wholes

    return make


# By the name of the text model's map: the tower that goes with it, and what makes its map.
MAPS: dict[str, tuple[type, Callable[[Any], tuple[Entries, Wholes]]]] = {
    "tunix_gemma3": (SiglipVisionConfig, tunix_siglip),
    "tunix_gemma4": (Gemma4VisionConfig, tunix_gemma4_vision),
    "maxtext_gemma3": (SiglipVisionConfig, maxtext_siglip),
    "maxtext_gemma4": (Gemma4VisionConfig, maxtext_gemma4_vision),
    "maxtext_qwen3": (Qwen3VisionConfig, maxtext_qwen("Qwen3VL")),
    "maxtext_qwen3_5": (Qwen3VisionConfig, maxtext_qwen("Qwen3_5Moe")),
}
