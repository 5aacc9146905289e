"""Gemma 3: SigLIP's tower, whose images all have one size, and the projector, which takes the means
of squares of patches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.errors import ConfigError
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.param_spec import Parameters, ParamSpec, Part
from jpaged.models.vision.parts import (
    LayerNorm,
    Specs,
    TwoLayers,
    attend,
    linear_of,
    of_patches,
    pooled,
    scratch_of,
)
from jpaged.models.vision.tower import PREFIX, Encoded, ImageTokens, Patches

NODE = "model.vision_tower."
TOKEN_NAMES = ("image_token_index", "boi_token_index", "eoi_token_index")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig:
    """side: of an image in patches, of patch_size x patch_size pixels each. width: of its own
    hidden states.
    """

    tokens: ImageTokens
    hidden_size: int
    side: int
    patch_size: int
    merge: int
    width: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    eps: float = 1e-6

    in_blocks = False
    on_axes = False

    @classmethod
    def read(cls, hf: dict[str, Any], hidden_size: int) -> "SiglipVisionConfig":
        """Return what a config.json says, with the defaults of its model filled in."""
        vision = hf["vision_config"]
        for name, value in {
            "hidden_act": "gelu_pytorch_tanh",
            "num_channels": 3,
            "vision_use_head": False,
        }.items():
            if vision[name] != value:
                raise ConfigError(f"vision_config: {name}={vision[name]!r} must be {value!r}")
        side, rows = vision["image_size"] // vision["patch_size"], hf["mm_tokens_per_image"]
        merge = side // int(rows**0.5)
        if not merge or (side // merge) ** 2 != rows or side % merge:
            raise ConfigError(
                f"mm_tokens_per_image={rows}: {side} x {side} patches are no such number of squares"
            )
        if vision["hidden_size"] % vision["num_attention_heads"]:
            raise ConfigError(
                f"vision_config: hidden_size={vision['hidden_size']} is no multiple of "
                f"num_attention_heads={vision['num_attention_heads']}"
            )
        return cls(
            tokens=ImageTokens(*(hf[name] for name in TOKEN_NAMES)),
            hidden_size=hidden_size,
            side=side,
            patch_size=vision["patch_size"],
            merge=merge,
            width=vision["hidden_size"],
            num_layers=vision["num_hidden_layers"],
            num_heads=vision["num_attention_heads"],
            intermediate_size=vision["intermediate_size"],
            eps=vision["layer_norm_eps"],
        )

    def write(self) -> dict[str, Any]:
        """See VisionConfig."""
        vision = {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
            "image_size": self.side * self.patch_size,
            "patch_size": self.patch_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "layer_norm_eps": self.eps,
        }
        return {
            **dict(zip(TOKEN_NAMES, self.tokens, strict=True)),
            "mm_tokens_per_image": self.rows_of_an_image,
            "vision_config": vision,
        }

    @property
    def rows_of_an_image(self) -> int:
        """Rows of embeddings that every image has."""
        return (self.side // self.merge) ** 2

    @property
    def buckets(self) -> tuple[int, ...]:
        """See VisionConfig: 1, 2, 4 and 8 images."""
        return tuple(self.rows_of_an_image * n for n in (1, 2, 4, 8))

    @property
    def num_features(self) -> int:
        """C: numbers of a patch, in order of channel, row and column."""
        return 3 * self.patch_size**2

    def params(self) -> tuple[ParamSpec, ...]:
        """See VisionConfig."""
        sizes = {"C": self.num_features, "W": self.width, "N": self.side**2}
        sizes |= {"H": self.num_heads, "D": self.width // self.num_heads}
        sizes |= {"F": self.intermediate_size, "E": self.hidden_size}
        specs = Specs(sizes)
        specs.linear("patch", "W", "C", f"{NODE}embeddings.patch_embedding")
        specs.add("positions", "N | W", f"{NODE}embeddings.position_embedding.weight")
        for i in range(self.num_layers):
            block, source = f"blocks.{i}", f"{NODE}encoder.layers.{i}"
            specs.norm(f"{block}.attention_norm", "W", f"{source}.layer_norm1")
            names = [(x, f"{source}.self_attn.{x}_proj") for x in "qkv"]
            parts = tuple(Part(x, "1 H D, W", f"{name}.weight") for x, name in names)
            specs.add(f"{block}.attention.qkv.weight", "3 H D, W", parts, split="H")
            parts = tuple(Part(f"{x}_bias", "1 H D", f"{name}.bias") for x, name in names)
            specs.add(f"{block}.attention.qkv.bias", "3 H D", parts, init="zeros", split="H")
            specs.linear(
                f"{block}.attention.out", "W", "H D", f"{source}.self_attn.out_proj", split="H"
            )
            specs.norm(f"{block}.mlp_norm", "W", f"{source}.layer_norm2")
            specs.linear(f"{block}.mlp.up", "F", "W", f"{source}.mlp.fc1", split="F")
            specs.linear(f"{block}.mlp.down", "W", "F", f"{source}.mlp.fc2", split="F")
        specs.norm("norm", "W", f"{NODE}post_layernorm")
        projector = "model.multi_modal_projector."
        specs.add("projection_norm.scale", "W", f"{projector}mm_soft_emb_norm.weight", init="zeros")
        # Inputs first in the file, so that it is no weight of a Linear.
        specs.add("projection", "W | E", f"{projector}mm_input_projection_weight")
        return tuple(specs.specs)

    def scratch(self, num_rows: int) -> int:
        """See VisionConfig."""
        block = scratch_of(
            num_rows * self.merge**2,
            features=self.num_features,
            width=self.width,
            heads=self.num_heads,
            head_dim=self.width // self.num_heads,
            mlp=self.intermediate_size,
        )
        return block + 4 * num_rows * (2 * self.width + 2 * self.hidden_size)

    def build(self, weights: Parameters) -> "SiglipVision":
        """See VisionConfig."""

        def block(name: str) -> Block:
            qkv, out = (linear_of(weights, f"{name}.attention.{x}") for x in ("qkv", "out"))
            up, down = (linear_of(weights, f"{name}.mlp.{x}") for x in ("up", "down"))
            return Block(
                attention_norm=LayerNorm.of(weights, f"{name}.attention_norm", self.eps),
                qkv=qkv,
                out=out,
                mlp_norm=LayerNorm.of(weights, f"{name}.mlp_norm", self.eps),
                mlp=TwoLayers(first=up, second=down, exact=False),
            )

        norm = NormConfig(eps=self.eps, has_offset=True, in_f32=True)
        projection_norm = RMSNorm.of(norm, weights[f"{PREFIX}projection_norm.scale"])
        assert projection_norm is not None
        return SiglipVision(
            patch=linear_of(weights, "patch"),
            positions=weights[f"{PREFIX}positions"].value,
            blocks=tuple(block(f"blocks.{i}") for i in range(self.num_layers)),
            norm=LayerNorm.of(weights, "norm", self.eps),
            projection_norm=projection_norm,
            projection=weights[f"{PREFIX}projection"].value,
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Attention, then an MLP, each after a norm. qkv: [..., 3, H, D]."""

    attention_norm: LayerNorm
    qkv: Linear
    out: Linear
    mlp_norm: LayerNorm
    mlp: TwoLayers

    def __call__(self, x: Array, step: StepContext, groups_GN: Array) -> Array:
        """x [N, W]."""
        q, k, v = jnp.unstack(self.qkv(self.attention_norm(x), step), axis=1)
        o = attend(q, k, v, groups_GN, q.shape[-1] ** -0.5, step)
        x = x + self.out(o.reshape(len(o), -1), step)
        return x + self.mlp(self.mlp_norm(x), step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipVision:
    """positions: [side * side, W]. projection: [W, E]."""

    patch: Linear
    positions: Array
    blocks: tuple[Block, ...]
    norm: LayerNorm
    projection_norm: RMSNorm
    projection: Array
    config: SiglipVisionConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, patches: Patches, step: StepContext) -> Encoded:
        """See Tower."""
        config, at, step = self.config, patches.position_N2, of_patches(step, patches)
        x = self.patch(patches.values_NC.astype(self.positions.dtype), step)
        place_N = at[:, 0] * config.side + at[:, 1]
        x = x + jnp.take(self.positions, place_N, axis=0, mode="clip")
        for block in self.blocks:
            x = run_block(block, x, step, patches.image_N[None])
        num_rows, square = len(x) // config.merge**2, config.merge**2
        x = pooled(self.norm(x), patches.row_N, num_rows, square).astype(x.dtype)
        x = self.projection_norm(x)
        rows = jnp.einsum("rw,we->re", x, self.projection, preferred_element_type=jnp.float32)
        return Encoded(rows_RE=rows.astype(x.dtype))


@jax.jit
def run_block(block: Block, x: Array, step: StepContext, groups_GN: Array) -> Array:
    """Run a block; inside another jit, blocks of one form are traced and lowered once."""
    return block(x, step, groups_GN)
