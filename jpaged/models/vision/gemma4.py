"""Gemma 4's tower (gemma4_vision): layers as the text model's, rotated by rows and columns, then
the means of squares of patches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.errors import ConfigError
from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.mlp import gated
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.param_spec import Parameters, ParamSpec, Part
from jpaged.models.vision.parts import (
    Specs,
    angles_of,
    attend,
    linear_of,
    of_patches,
    of_rows,
    pooled,
    rotated,
    scratch_of,
)
from jpaged.models.vision.tower import PREFIX, Encoded, ImageTokens, Patches
from jpaged.models.vision.unified import SOFT_TOKENS

NODE = "model.vision_tower."
TOKEN_NAMES = ("image_token_id", "boi_token_id", "eoi_token_id")
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
    """width: of its own hidden states. num_positions: rows of each table of positions. is_clipped:
    products bound what they take and give. standardizes: a bias and a factor of what is pooled.
    """

    tokens: ImageTokens
    hidden_size: int
    patch_size: int
    merge: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_positions: int
    theta: float
    eps: float
    is_clipped: bool = False
    standardizes: bool = False

    in_blocks = False
    on_axes = False
    buckets = SOFT_TOKENS

    @classmethod
    def read(cls, hf: dict[str, Any], hidden_size: int) -> "Gemma4VisionConfig":
        """Return what a config.json says, with the defaults of its model filled in."""
        vision = hf["vision_config"]
        for name, value in {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
        }.items():
            if vision[name] != value:
                raise ConfigError(f"vision_config: {name}={vision[name]!r} must be {value!r}")
        if vision["head_dim"] % 4:
            raise ConfigError(
                f"vision_config: head_dim={vision['head_dim']}: must be a multiple of 4, for rows "
                "and columns"
            )
        return cls(
            tokens=ImageTokens(*(hf[name] for name in TOKEN_NAMES)),
            hidden_size=hidden_size,
            patch_size=vision["patch_size"],
            merge=vision["pooling_kernel_size"],
            width=vision["hidden_size"],
            num_layers=vision["num_hidden_layers"],
            num_heads=vision["num_attention_heads"],
            num_kv_heads=vision["num_key_value_heads"],
            head_dim=vision["head_dim"],
            intermediate_size=vision["intermediate_size"],
            num_positions=vision["position_embedding_size"],
            theta=float(vision["rope_parameters"]["rope_theta"]),
            eps=vision["rms_norm_eps"],
            is_clipped=bool(vision["use_clipped_linears"]),
            standardizes=bool(vision["standardize"]),
        )

    def write(self) -> dict[str, Any]:
        """See VisionConfig."""
        vision = {
            "model_type": "gemma4_vision",
            "hidden_activation": "gelu_pytorch_tanh",
            "patch_size": self.patch_size,
            "pooling_kernel_size": self.merge,
            "hidden_size": self.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "position_embedding_size": self.num_positions,
            "rope_parameters": {"rope_type": "axial", "rope_theta": self.theta},
            "rms_norm_eps": self.eps,
            "use_clipped_linears": self.is_clipped,
            "standardize": self.standardizes,
        }
        return {**dict(zip(TOKEN_NAMES, self.tokens, strict=True)), "vision_config": vision}

    @property
    def num_features(self) -> int:
        """C: numbers of a patch, in order of row, column and channel."""
        return 3 * self.patch_size**2

    def params(self) -> tuple[ParamSpec, ...]:
        """See VisionConfig."""
        sizes = {"C": self.num_features, "W": self.width, "N": self.num_positions}
        sizes |= {"H": self.num_heads, "J": self.num_kv_heads, "D": self.head_dim}
        specs = Specs(sizes | {"F": self.intermediate_size, "E": self.hidden_size})
        specs.linear("patch", "W", "C", f"{NODE}patch_embedder.input_proj", bias=False)
        specs.add("positions", "2 | N | W", f"{NODE}patch_embedder.position_embedding_table")

        def product(name: str, outputs: str, inputs: str, source: str, split: str) -> None:
            specs.linear(name, outputs, inputs, f"{source}.linear", bias=False, split=split)
            if self.is_clipped:
                parts = tuple(Part(x, "1", f"{source}.{x}") for x in BOUNDS)
                specs.add(f"{name}.bounds", "4", parts, init="bounds")

        for i in range(self.num_layers):
            block, source = f"blocks.{i}", f"{NODE}encoder.layers.{i}"
            attention = f"{source}.self_attn"
            specs.norm(f"{block}.attention_norm", "W", f"{source}.input_layernorm", bias=False)
            for x, heads in {"q": "H", "k": "J", "v": "J"}.items():
                name = f"{block}.attention.{x}"
                product(name, f"{heads} D", "W", f"{attention}.{x}_proj", heads)
            specs.norm(f"{block}.attention.q_norm", "D", f"{attention}.q_norm", bias=False)
            specs.norm(f"{block}.attention.k_norm", "D", f"{attention}.k_norm", bias=False)
            product(f"{block}.attention.out", "W", "H D", f"{attention}.o_proj", "H")
            after = f"{source}.post_attention_layernorm"
            specs.norm(f"{block}.attention_post_norm", "W", after, bias=False)
            before = f"{source}.pre_feedforward_layernorm"
            specs.norm(f"{block}.mlp_norm", "W", before, bias=False)
            for x in ("gate", "up"):
                product(f"{block}.mlp.{x}", "F", "W", f"{source}.mlp.{x}_proj", "F")
            product(f"{block}.mlp.down", "W", "F", f"{source}.mlp.down_proj", "F")
            after = f"{source}.post_feedforward_layernorm"
            specs.norm(f"{block}.mlp_post_norm", "W", after, bias=False)
        if self.standardizes:
            specs.add("bias", "W", f"{NODE}std_bias", init="zeros")
            specs.add("scale", "W", f"{NODE}std_scale", init="ones")
        source = "model.embed_vision.embedding_projection"
        specs.linear("projection", "E", "W", source, bias=False, split="E")
        return tuple(specs.specs)

    def scratch(self, num_rows: int) -> int:
        """See VisionConfig."""
        block = scratch_of(
            num_rows * self.merge**2,
            features=self.num_features,
            width=self.width,
            heads=self.num_heads,
            head_dim=self.head_dim,
            mlp=2 * self.intermediate_size,
        )
        return block + 4 * num_rows * (3 * self.width + 2 * self.hidden_size)

    def build(self, weights: Parameters) -> "Gemma4Vision":
        """See VisionConfig."""
        config = NormConfig(eps=self.eps, in_f32=True)

        def norm(name: str) -> RMSNorm:
            made = RMSNorm.of(config, weights[f"{PREFIX}{name}.scale"])
            assert made is not None
            return made

        def product(name: str) -> Bounded:
            bounds = weights.get(f"{PREFIX}{name}.bounds")
            linear = linear_of(weights, name)
            return Bounded(linear=linear, bounds=None if bounds is None else bounds.value)

        def block(name: str) -> Block:
            q, k, v, out = (product(f"{name}.attention.{x}") for x in ("q", "k", "v", "out"))
            gate, up, down = (product(f"{name}.mlp.{x}") for x in ("gate", "up", "down"))
            return Block(
                attention_norm=norm(f"{name}.attention_norm"),
                q=q,
                k=k,
                v=v,
                q_norm=norm(f"{name}.attention.q_norm"),
                k_norm=norm(f"{name}.attention.k_norm"),
                v_norm=RMSNorm(scale=None, config=config),
                out=out,
                attention_post_norm=norm(f"{name}.attention_post_norm"),
                mlp_norm=norm(f"{name}.mlp_norm"),
                gate=gate,
                up=up,
                down=down,
                mlp_post_norm=norm(f"{name}.mlp_post_norm"),
            )

        bias, scale = (weights.get(f"{PREFIX}{x}") for x in ("bias", "scale"))
        return Gemma4Vision(
            patch=linear_of(weights, "patch"),
            positions=weights[f"{PREFIX}positions"].value,
            blocks=tuple(block(f"blocks.{i}") for i in range(self.num_layers)),
            bias=None if bias is None else bias.value,
            scale=None if scale is None else scale.value,
            projection_norm=RMSNorm(scale=None, config=config),
            projection=linear_of(weights, "projection"),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded:
    """A product. bounds: [4], the least and the largest of what it takes and of what it gives,
    which are measured and not trained; None where it has none.
    """

    linear: Linear
    bounds: Array | None

    def __call__(self, x: Array, step: StepContext) -> Array:
        """[..., outputs] of x [..., inputs]."""
        if self.bounds is None:
            return self.linear(x, step)
        bounds = jax.lax.stop_gradient(self.bounds).astype(x.dtype)
        y = self.linear(jnp.clip(x, bounds[0], bounds[1]), step)
        return jnp.clip(y, bounds[2], bounds[3])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Attention, then a gated MLP, each between two norms."""

    attention_norm: RMSNorm
    q: Bounded
    k: Bounded
    v: Bounded
    q_norm: RMSNorm
    k_norm: RMSNorm
    v_norm: RMSNorm
    out: Bounded
    attention_post_norm: RMSNorm
    mlp_norm: RMSNorm
    gate: Bounded
    up: Bounded
    down: Bounded
    mlp_post_norm: RMSNorm

    def __call__(
        self, x: Array, step: StepContext, angles: tuple[Array, Array], groups_GN: Array
    ) -> Array:
        """x [N, W]. angles: [N, D / 4] of columns, which rotate the first half of a head, and of
        rows, which rotate the second.
        """
        y = self.attention_norm(x)
        q, k = self.q_norm(self.q(y, step)), self.k_norm(self.k(y, step))
        q, k = (
            jnp.concatenate(
                [
                    rotated(half, of_half)
                    for half, of_half in zip(jnp.split(z, 2, axis=-1), angles, strict=True)
                ],
                axis=-1,
            )
            for z in (q, k)
        )
        o = attend(q, k, self.v_norm(self.v(y, step)), groups_GN, 1.0, step)
        x = x + self.attention_post_norm(self.out(o.reshape(len(o), -1), step))
        y = self.mlp_norm(x)
        gate, up = (part(y, step).astype(jnp.float32) for part in (self.gate, self.up))
        y = self.down(gated("gelu_tanh", gate, up).astype(x.dtype), step)
        return x + self.mlp_post_norm(y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Vision:
    """positions: [2, N, W], of columns and of rows. bias, scale: [W] or None."""

    patch: Linear
    positions: Array
    blocks: tuple[Block, ...]
    bias: Array | None
    scale: Array | None
    projection_norm: RMSNorm
    projection: Linear
    config: Gemma4VisionConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, patches: Patches, step: StepContext) -> Encoded:
        """See Tower."""
        config, step = self.config, of_patches(step, patches)
        values = (2 * (patches.values_NC - 0.5)).astype(self.positions.dtype)
        row_N, column_N = patches.position_N2.T
        x = self.patch(values, step)
        for table, at in zip(self.positions, (column_N, row_N), strict=True):
            x = x + jnp.take(table, at, axis=0, mode="clip")
        width = config.head_dim // 2
        angles = (
            angles_of(column_N, config.theta, width),
            angles_of(row_N, config.theta, width),
        )
        for block in self.blocks:
            x = run_block(block, x, step, angles, patches.image_N[None])
        num_rows, square = len(x) // config.merge**2, config.merge**2
        y = pooled(x, patches.row_N, num_rows, square) * jnp.float32(config.width**0.5)
        if self.bias is not None and self.scale is not None:
            bias, scale = (w.astype(jnp.float32)[None] for w in (self.bias, self.scale))
            y = (y - bias) * scale
        y = self.projection_norm(y.astype(x.dtype))
        return Encoded(rows_RE=self.projection(y, of_rows(step, square)))


@jax.jit
def run_block(
    block: Block, x: Array, step: StepContext, angles: tuple[Array, Array], groups_GN: Array
) -> Array:
    """Run a block; inside another jit, blocks of one form are traced and lowered once."""
    return block(x, step, angles, groups_GN)
