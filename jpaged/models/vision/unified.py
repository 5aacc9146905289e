"""Gemma 4 12B (gemma4_unified): no tower. A patch of 48 x 48 pixels is one row of embeddings, by
two products and norms.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.param_spec import Parameters, ParamSpec
from jpaged.models.vision.parts import LayerNorm, Specs, linear_of, of_patches
from jpaged.models.vision.tower import PREFIX, Encoded, ImageTokens, Patches

SOFT_TOKENS = (70, 140, 280, 560, 1120)  # rows that a processor may make of an image
LN_EPS = 1e-5  # of torch's LayerNorm, which the model takes as it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedVisionConfig:
    """patch_size: the side of a patch in pixels, after `pooling` x `pooling` smaller ones are put
    together. width: of the first product. num_positions: rows of the tables of positions.
    """

    tokens: ImageTokens
    hidden_size: int
    patch_size: int = 48
    pooling: int = 3
    width: int = 3840
    num_positions: int = 1120
    eps: float = 1e-6

    merge = 1
    in_blocks = False
    on_axes = False
    buckets = SOFT_TOKENS

    @classmethod
    def read(cls, hf: dict[str, Any], hidden_size: int) -> "UnifiedVisionConfig":
        """Return what a config.json says, with the defaults of its model filled in."""
        vision = hf["vision_config"]
        return cls(
            tokens=ImageTokens(hf["image_token_id"], hf["boi_token_id"], hf["eoi_token_id"]),
            hidden_size=hidden_size,
            patch_size=vision["patch_size"] * vision["pooling_kernel_size"],
            pooling=vision["pooling_kernel_size"],
            width=vision["mm_embed_dim"],
            num_positions=vision["mm_posemb_size"],
            eps=vision["rms_norm_eps"],
        )

    def write(self) -> dict[str, Any]:
        """See VisionConfig."""
        names = ("image_token_id", "boi_token_id", "eoi_token_id")
        vision = {
            "model_type": "gemma4_unified_vision",
            "patch_size": self.patch_size // self.pooling,
            "pooling_kernel_size": self.pooling,
            "mm_embed_dim": self.width,
            "mm_posemb_size": self.num_positions,
            "rms_norm_eps": self.eps,
            "output_proj_dims": self.width,
        }
        return {**dict(zip(names, self.tokens, strict=True)), "vision_config": vision}

    @property
    def num_features(self) -> int:
        """C: numbers of a patch, in order of row, column and channel."""
        return 3 * self.patch_size**2

    def params(self) -> tuple[ParamSpec, ...]:
        """See VisionConfig."""
        sizes = {"C": self.num_features, "W": self.width, "N": self.num_positions}
        specs, node = Specs(sizes | {"E": self.hidden_size}), "model.embed_vision."
        specs.norm("patch_norm", "C", f"{node}patch_ln1")
        specs.linear("patch", "W", "C", f"{node}patch_dense", split="W")
        specs.norm("width_norm", "W", f"{node}patch_ln2")
        specs.add("positions", "N | 2 | W", f"{node}pos_embedding")
        specs.norm("position_norm", "W", f"{node}pos_norm")
        source = f"{node}embedding_projection"
        specs.linear("projection", "E", "W", source, bias=False, split="E")
        return tuple(specs.specs)

    def scratch(self, num_rows: int) -> int:
        """See VisionConfig."""
        return 4 * num_rows * (3 * self.num_features + 6 * self.width + 2 * self.hidden_size)

    def build(self, weights: Parameters) -> "UnifiedVision":
        """See VisionConfig."""
        return UnifiedVision(
            patch_norm=LayerNorm.of(weights, "patch_norm", LN_EPS),
            patch=linear_of(weights, "patch"),
            width_norm=LayerNorm.of(weights, "width_norm", LN_EPS),
            positions=weights[f"{PREFIX}positions"].value,
            position_norm=LayerNorm.of(weights, "position_norm", LN_EPS),
            projection_norm=RMSNorm(scale=None, config=NormConfig(eps=self.eps)),
            projection=linear_of(weights, "projection"),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedVision:
    """positions: [N, 2, W], of columns and of rows."""

    patch_norm: LayerNorm
    patch: Linear
    width_norm: LayerNorm
    positions: Array
    position_norm: LayerNorm
    projection_norm: RMSNorm
    projection: Linear

    def __call__(self, patches: Patches, step: StepContext) -> Encoded:
        """See Tower."""
        step = of_patches(step, patches)
        x = patches.values_NC.astype(self.positions.dtype)
        x = self.width_norm(self.patch(self.patch_norm(x), step))
        row_N, column_N = patches.position_N2.T
        for axis, at in enumerate((column_N, row_N)):
            x = x + jnp.take(self.positions[:, axis], at, axis=0, mode="clip")
        x = self.position_norm(x)
        return Encoded(rows_RE=self.projection(self.projection_norm(x), step))
