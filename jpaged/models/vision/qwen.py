"""The vision towers of Qwen3-VL (with deepstack), Qwen 3.5 and 3.6, and Qwen2.5-VL (with windows).

Squares of `merge` x `merge` patches follow each other, and the merger makes one row of embeddings
of each. A frame of a video is an image of its own.
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
    LayerNorm,
    Specs,
    TwoLayers,
    angles_of,
    attend,
    linear_of,
    of_patches,
    of_rows,
    rotated,
    scratch_of,
)
from jpaged.models.vision.tower import PREFIX, Encoded, ImageTokens, Patches

NODE = "model.visual."
RMS = NormConfig(eps=1e-6)
BUCKETS = (64, 256, 1024, 4096)  # rows: 256 to 16384 patches
TOKEN_NAMES = ("image_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """What the towers of Qwen have in common. hidden_size: E, of the text model. width: of its own
    hidden states. patch_size: the side of a patch in pixels, frames: how many a patch has of it.
    video_token: the id of rows of a video.
    """

    tokens: ImageTokens
    video_token: int
    model_type: str
    hidden_size: int
    width: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    frames: int
    merge: int
    theta: float

    in_blocks = True
    on_axes = True
    buckets = BUCKETS

    def __post_init__(self) -> None:
        if self.width % self.num_heads or self.head_dim % 4:
            raise ConfigError(
                f"vision_config: hidden_size={self.width} with num_heads={self.num_heads}: heads "
                "must have a width that 4 divides, for rows and columns"
            )

    @property
    def head_dim(self) -> int:
        """D of the tower."""
        return self.width // self.num_heads

    @property
    def num_features(self) -> int:
        """C: numbers of a patch, in order of channel, frame, row and column."""
        return 3 * self.frames * self.patch_size**2

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes by their letters. M: a square of patches; P is the same as an axis
        of inputs.
        """
        merged = self.width * self.merge**2
        sizes = {"C": self.num_features, "W": self.width, "H": self.num_heads, "D": self.head_dim}
        sizes |= {"F": self.intermediate_size, "M": merged, "P": merged}
        return sizes | {"E": self.hidden_size}

    def attention_params(self, specs: Specs, name: str, source: str) -> None:
        """Add the parameters of the attention of a block."""
        specs.linear(f"{name}.qkv", "3 H D", "W", f"{source}.qkv", split="H")
        specs.linear(f"{name}.out", "W", "H D", f"{source}.proj", split="H")

    def scratch(self, num_rows: int) -> int:
        """See VisionConfig."""
        squares, merged = self.merge**2, self.sizes["M"]
        block = scratch_of(
            num_rows * squares,
            features=self.num_features,
            width=self.width,
            heads=self.num_heads,
            head_dim=self.head_dim,
            mlp=2 * self.intermediate_size,
        )
        return block + 4 * num_rows * (3 * merged + (2 + 2 * self.num_deep) * self.hidden_size)

    @property
    def num_deep(self) -> int:
        """J: how many layers of the text model take rows of their own."""
        return 0

    def token_ids(self) -> dict[str, int | None]:
        """Return what a config.json says of ids."""
        named = dict(zip(TOKEN_NAMES, self.tokens, strict=True))
        return {**named, "video_token_id": self.video_token}

    def written(self) -> dict[str, Any]:
        """Return what a config.json says of all of these towers."""
        return {
            "model_type": self.model_type,
            "depth": self.num_layers,
            "hidden_size": self.width,
            "num_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "patch_size": self.patch_size,
            "temporal_patch_size": self.frames,
            "spatial_merge_size": self.merge,
            "out_hidden_size": self.hidden_size,
            "rope_parameters": {"rope_type": "axial", "rope_theta": self.theta},
        }


def common_fields(hf: dict[str, Any], hidden_size: int, activation: str) -> dict[str, Any]:
    """Return the fields of QwenVisionConfig that a config.json says. ConfigError for an activation
    other than this one, other channels than 3, and rows of another width than the text model's.
    """
    vision = hf["vision_config"]
    for name, value in {
        "hidden_act": activation,
        "in_channels": 3,
        "out_hidden_size": hidden_size,
    }.items():
        if vision[name] != value:
            raise ConfigError(f"vision_config: {name}={vision[name]!r} must be {value!r}")
    # Files that earlier versions of transformers wrote do not say it: it was the only one.
    rope = vision.get("rope_parameters") or {}
    return {
        "tokens": ImageTokens(*(hf[name] for name in TOKEN_NAMES)),
        "video_token": hf["video_token_id"],
        "model_type": vision["model_type"],
        "hidden_size": hidden_size,
        "width": vision["hidden_size"],
        "num_layers": vision["depth"],
        "num_heads": vision["num_heads"],
        "intermediate_size": vision["intermediate_size"],
        "patch_size": vision["patch_size"],
        "frames": vision["temporal_patch_size"],
        "merge": vision["spatial_merge_size"],
        "theta": float(rope.get("rope_theta", 1e4)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(QwenVisionConfig):
    """Qwen3-VL, Qwen 3.5, Qwen 3.6. positions_side: the learned positions are a square of this
    side, stretched over each image. deepstack: the blocks after which rows are made for the text
    model's first layers.
    """

    positions_side: int
    deepstack: tuple[int, ...] = ()

    @classmethod
    def read(cls, hf: dict[str, Any], hidden_size: int) -> "Qwen3VisionConfig":
        """Return what a config.json says, with the defaults of its model filled in."""
        vision = hf["vision_config"]
        return cls(
            **common_fields(hf, hidden_size, "gelu_pytorch_tanh"),
            positions_side=int(vision["num_position_embeddings"] ** 0.5),
            deepstack=tuple(vision.get("deepstack_visual_indexes") or ()),
        )

    def write(self) -> dict[str, Any]:
        """See VisionConfig."""
        vision = self.written() | {
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": self.positions_side**2,
            "deepstack_visual_indexes": list(self.deepstack),
        }
        return {**self.token_ids(), "vision_config": vision}

    def params(self) -> tuple[ParamSpec, ...]:
        """See VisionConfig."""
        specs = Specs(self.sizes | {"N": self.positions_side**2})
        specs.linear("patch", "W", "C", f"{NODE}patch_embed.proj")
        specs.add("positions", "N | W", f"{NODE}pos_embed.weight")
        for i in range(self.num_layers):
            block, source = f"blocks.{i}", f"{NODE}blocks.{i}"
            specs.norm(f"{block}.attention_norm", "W", f"{source}.norm1")
            self.attention_params(specs, f"{block}.attention", f"{source}.attn")
            specs.norm(f"{block}.mlp_norm", "W", f"{source}.norm2")
            specs.linear(f"{block}.mlp.up", "F", "W", f"{source}.mlp.linear_fc1", split="F")
            specs.linear(f"{block}.mlp.down", "W", "F", f"{source}.mlp.linear_fc2", split="F")
        mergers = {f"deepstack.{j}": f"deepstack_merger_list.{j}" for j in range(self.num_deep)}
        for ours, theirs in {"merger": "merger", **mergers}.items():
            specs.norm(f"{ours}.norm", "W" if ours == "merger" else "M", f"{NODE}{theirs}.norm")
            specs.linear(f"{ours}.first", "M", "P", f"{NODE}{theirs}.linear_fc1", split="M")
            specs.linear(f"{ours}.second", "E", "M", f"{NODE}{theirs}.linear_fc2", split="M")
        return tuple(specs.specs)

    @property
    def num_deep(self) -> int:
        """J: how many layers of the text model take rows of their own."""
        return len(self.deepstack)

    def build(self, weights: Parameters) -> "Qwen3Vision":
        """See VisionConfig."""

        def block(name: str) -> Block:
            up, down = (linear_of(weights, f"{name}.mlp.{x}") for x in ("up", "down"))
            return Block(
                attention_norm=LayerNorm.of(weights, f"{name}.attention_norm"),
                attention=attention_of(weights, f"{name}.attention", self),
                mlp_norm=LayerNorm.of(weights, f"{name}.mlp_norm"),
                mlp=TwoLayers(first=up, second=down, exact=False),
            )

        def merger(name: str) -> Merger:
            first, second = (linear_of(weights, f"{name}.{x}") for x in ("first", "second"))
            return Merger(
                norm=LayerNorm.of(weights, f"{name}.norm"),
                layers=TwoLayers(first=first, second=second, exact=True),
                patches=self.merge**2,
                joins_first=name != "merger",
            )

        return Qwen3Vision(
            patch=linear_of(weights, "patch"),
            positions=weights[f"{PREFIX}positions"].value,
            blocks=tuple(block(f"blocks.{i}") for i in range(self.num_layers)),
            merger=merger("merger"),
            deepstack=tuple(merger(f"deepstack.{j}") for j in range(self.num_deep)),
            config=self,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25VisionConfig(QwenVisionConfig):
    """Qwen2.5-VL. window: the side of a window in patches; a patch attends within its window, but
    for the blocks in full_blocks. tokens_per_second: how far a second is on the time axis of
    positions.
    """

    window: int
    full_blocks: tuple[int, ...]
    tokens_per_second: int = 4

    @classmethod
    def read(cls, hf: dict[str, Any], hidden_size: int) -> "Qwen25VisionConfig":
        """Return what a config.json says, with the defaults of its model filled in."""
        fields, vision = common_fields(hf, hidden_size, "silu"), hf["vision_config"]
        squares = vision["window_size"] // fields["merge"] // fields["patch_size"]
        return cls(
            **fields,
            window=squares * fields["merge"],
            full_blocks=tuple(vision["fullatt_block_indexes"]),
            tokens_per_second=int(vision["tokens_per_second"]),
        )

    def write(self) -> dict[str, Any]:
        """See VisionConfig."""
        vision = self.written() | {
            "hidden_act": "silu",
            "window_size": self.window * self.patch_size,
            "fullatt_block_indexes": list(self.full_blocks),
            "tokens_per_second": self.tokens_per_second,
        }
        return {**self.token_ids(), "vision_config": vision}

    def params(self) -> tuple[ParamSpec, ...]:
        """See VisionConfig."""
        specs = Specs(self.sizes)
        specs.linear("patch", "W", "C", f"{NODE}patch_embed.proj", bias=False)
        for i in range(self.num_layers):
            block, source = f"blocks.{i}", f"{NODE}blocks.{i}"
            specs.norm(f"{block}.attention_norm", "W", f"{source}.norm1", bias=False)
            self.attention_params(specs, f"{block}.attention", f"{source}.attn")
            specs.norm(f"{block}.mlp_norm", "W", f"{source}.norm2", bias=False)
            names = [(x, f"{source}.mlp.{x}_proj") for x in ("gate", "up")]
            parts = tuple(Part(f"{x}", "1 F, W", f"{name}.weight") for x, name in names)
            specs.add(f"{block}.mlp.gate_up.weight", "2 F, W", parts, split="F")
            parts = tuple(Part(f"{x}_bias", "1 F", f"{name}.bias") for x, name in names)
            specs.add(f"{block}.mlp.gate_up.bias", "2 F", parts, init="zeros", split="F")
            specs.linear(f"{block}.mlp.down", "W", "F", f"{source}.mlp.down_proj", split="F")
        specs.norm("merger.norm", "W", f"{NODE}merger.ln_q", bias=False)
        specs.linear("merger.first", "M", "P", f"{NODE}merger.mlp.0", split="M")
        specs.linear("merger.second", "E", "M", f"{NODE}merger.mlp.2", split="M")
        return tuple(specs.specs)

    def build(self, weights: Parameters) -> "Qwen25Vision":
        """See VisionConfig."""

        def norm(name: str) -> RMSNorm:
            made = RMSNorm.of(RMS, weights[f"{PREFIX}{name}.scale"])
            assert made is not None
            return made

        def block(name: str) -> Block:
            gate_up, down = (linear_of(weights, f"{name}.mlp.{x}") for x in ("gate_up", "down"))
            return Block(
                attention_norm=norm(f"{name}.attention_norm"),
                attention=attention_of(weights, f"{name}.attention", self),
                mlp_norm=norm(f"{name}.mlp_norm"),
                mlp=GatedLayers(gate_up=gate_up, down=down),
            )

        first, second = (linear_of(weights, f"merger.{x}") for x in ("first", "second"))
        return Qwen25Vision(
            patch=linear_of(weights, "patch"),
            blocks=tuple(block(f"blocks.{i}") for i in range(self.num_layers)),
            merger=Merger(
                norm=norm("merger.norm"),
                layers=TwoLayers(first=first, second=second, exact=True),
                patches=self.merge**2,
            ),
            config=self,
        )


def attention_of(weights: Parameters, name: str, config: QwenVisionConfig) -> "Attention":
    """Return the attention of a block."""
    qkv, out = (linear_of(weights, f"{name}.{x}") for x in ("qkv", "out"))
    return Attention(qkv=qkv, out=out, scale=config.head_dim**-0.5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """qkv: [..., 3, H, D]; out takes all heads."""

    qkv: Linear
    out: Linear
    scale: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array, step: StepContext, angles_NF: Array, groups_GN: Array) -> Array:
        """x [N, W]; angles and groups: as of `rotated` and `attend`."""
        q, k, v = jnp.unstack(self.qkv(x, step), axis=1)
        q, k = rotated(q, angles_NF), rotated(k, angles_NF)
        o = attend(q, k, v, groups_GN, self.scale, step)
        return self.out(o.reshape(len(o), -1), step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedLayers:
    """An MLP with gates and biases."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Array, step: StepContext) -> Array:
        """x [N, W]."""
        gate, up = jnp.unstack(self.gate_up(x, step, jnp.float32), axis=1)
        return self.down(gated("silu", gate, up).astype(x.dtype), step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Attention, then an MLP, each after a norm."""

    attention_norm: LayerNorm | RMSNorm
    attention: Attention
    mlp_norm: LayerNorm | RMSNorm
    mlp: TwoLayers | GatedLayers

    def __call__(self, x: Array, step: StepContext, angles_NF: Array, groups_GN: Array) -> Array:
        """x [N, W]."""
        x = x + self.attention(self.attention_norm(x), step, angles_NF, groups_GN)
        return x + self.mlp(self.mlp_norm(x), step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Merger:
    """Makes rows of embeddings of squares of patches. joins_first: patches are joined before they
    are normed, not after.
    """

    norm: LayerNorm | RMSNorm
    layers: TwoLayers
    patches: int = dataclasses.field(metadata={"static": True})
    joins_first: bool = dataclasses.field(default=False, metadata={"static": True})

    def __call__(self, x: Array, step: StepContext) -> Array:
        """[N / patches, E] of x [N, W]."""
        joined = (x.shape[0] // self.patches, self.patches * x.shape[1])
        y = self.norm(x.reshape(joined)) if self.joins_first else self.norm(x).reshape(joined)
        return self.layers(y, of_rows(step, self.patches))


def angles_in(patches: Patches, config: QwenVisionConfig) -> Array:
    """Return the angles [N, D / 2] of all patches: those of rows, then those of columns."""
    angles = (angles_of(at, config.theta, config.head_dim // 2) for at in patches.position_N2.T)
    return jnp.concatenate([*angles], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Vision:
    """positions: [N, W], a square of learned positions."""

    patch: Linear
    positions: Array
    blocks: tuple[Block, ...]
    merger: Merger
    deepstack: tuple[Merger, ...]
    config: Qwen3VisionConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, patches: Patches, step: StepContext) -> Encoded:
        """See Tower."""
        step = of_patches(step, patches)
        x = self.patch(patches.values_NC.astype(self.positions.dtype), step)
        x = x + self._positions(patches).astype(x.dtype)
        angles, groups = angles_in(patches, self.config), patches.image_N[None]
        deep: list[Array] = []
        for i, block in enumerate(self.blocks):
            x = run_block(block, x, step, angles, groups)
            if i in self.config.deepstack:
                deep.append(self.deepstack[self.config.deepstack.index(i)](x, step))
        rows = self.merger(x, step)
        return Encoded(rows_RE=rows, deepstack_JRE=jnp.stack(deep) if deep else None)

    def _positions(self, patches: Patches) -> Array:
        """Return the learned positions between which each patch lies, by bilinear interpolation
        with aligned corners: f32 [N, W].
        """
        side = self.config.positions_side
        at = patches.position_N2.astype(jnp.float32) * (side - 1)
        at = at / jnp.maximum(patches.size_N2 - 1, 1).astype(jnp.float32)
        low = jnp.floor(at)
        of_high, first = at - low, low.astype(jnp.int32)
        total = jnp.zeros((len(at), self.positions.shape[1]), jnp.float32)
        for row in (0, 1):
            for column in (0, 1):
                tap = jnp.minimum(first + jnp.asarray([[row, column]], jnp.int32), side - 1)
                near = jnp.asarray([[row, column]], jnp.float32)
                weight = jnp.prod(near * of_high + (1 - near) * (1 - of_high), axis=1)
                table = jnp.take(self.positions, tap[:, 0] * side + tap[:, 1], axis=0, mode="clip")
                total = total + table.astype(jnp.float32) * weight[:, None]
        return total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25Vision:
    """Its blocks attend within windows, but for some."""

    patch: Linear
    blocks: tuple[Block, ...]
    merger: Merger
    config: Qwen25VisionConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, patches: Patches, step: StepContext) -> Encoded:
        """See Tower."""
        norm = self.blocks[0].attention_norm.scale
        assert norm is not None
        step = of_patches(step, patches)
        x = self.patch(patches.values_NC.astype(norm.dtype), step)
        angles, images = angles_in(patches, self.config), patches.image_N[None]
        windows = jnp.concatenate([images, patches.position_N2.T // self.config.window])
        for i, block in enumerate(self.blocks):
            groups = images if i in self.config.full_blocks else windows
            x = run_block(block, x, step, angles, groups)
        return Encoded(rows_RE=self.merger(x, step))


@jax.jit
def run_block(
    block: Block, x: Array, step: StepContext, angles_NF: Array, groups_GN: Array
) -> Array:
    """Run a block; inside another jit, blocks of one form are traced and lowered once."""
    return block(x, step, angles_NF, groups_GN)
