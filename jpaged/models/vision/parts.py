"""Parts of vision towers: parameters by name, layer norms, rotation by rows and columns, attention
within images.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.param_spec import Init, Parameters, ParamSpec, Part
from jpaged.models.vision.tower import PREFIX, Patches

SCORES = 2**25  # f32 scores that attention holds at once, of all heads
QUERIES, KEYS = 256, 1024  # patches of a tile of attention on a CPU


class Specs:
    """Collects the parameters of a tower. sizes: of its axes by their letters."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.specs: list[ParamSpec] = []

    def add(
        self,
        name: str,
        axes: str,
        source: str | tuple[Part, ...],
        *,
        init: Init = "normal",
        split: str | None = None,
    ) -> None:
        """Add a parameter. name: without the prefix of towers. source, split: as of ParamSpec."""
        spec = ParamSpec(PREFIX + name, axes, source, init, split)
        self.specs.append(spec.placed(self.sizes))

    def linear(
        self,
        name: str,
        outputs: str,
        inputs: str,
        source: str,
        *,
        bias: bool = True,
        split: str | None = None,
    ) -> None:
        """Add the weight and the bias of a product. source: without .weight and .bias."""
        self.add(f"{name}.weight", f"{outputs}, {inputs}", f"{source}.weight", split=split)
        if bias:
            of_bias = split if split in outputs.split() else None
            self.add(f"{name}.bias", outputs, f"{source}.bias", init="zeros", split=of_bias)

    def norm(self, name: str, axis: str, source: str, *, bias: bool = True) -> None:
        """Add the scale and the bias of a norm."""
        self.add(f"{name}.scale", axis, f"{source}.weight", init="ones")
        if bias:
            self.add(f"{name}.bias", axis, f"{source}.bias", init="zeros")


def linear_of(weights: Parameters, name: str) -> Linear:
    """Return the product of parameters that Specs.linear added."""
    name = PREFIX + name
    return Linear.of(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Layer norm (arXiv:1607.06450) over the last axis of x, in f32 and rounded once."""

    scale: Array
    bias: Array
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})

    @classmethod
    def of(cls, weights: Parameters, name: str, eps: float = 1e-6) -> Self:
        """Return the norm of parameters that Specs.norm added."""
        scale, bias = (weights[f"{PREFIX}{name}.{x}"].value for x in ("scale", "bias"))
        return cls(scale=scale, bias=bias, eps=eps)

    def __call__(self, x: Array) -> Array:
        """x [..., W] normed, in its dtype."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.float32(self.eps))
        scale, bias = (w.astype(jnp.float32)[None] for w in (self.scale, self.bias))
        return (y * scale + bias).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLayers:
    """Two products with a GELU between them. exact: by the error function, otherwise by tanh."""

    first: Linear
    second: Linear
    exact: bool = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array, step: StepContext) -> Array:
        """[..., outputs] of x [..., inputs]."""
        h = jax.nn.gelu(self.first(x, step, jnp.float32), approximate=not self.exact)
        return self.second(h.astype(x.dtype), step)


def scratch_of(
    patches: int, *, features: int, width: int, heads: int, head_dim: int, mlp: int
) -> int:
    """Return bytes that XLA takes at most for a block of a tower and what is before it, for so many
    patches. features: C. mlp: numbers that the first product of an MLP gives a patch. Arrays are
    counted in f32, in which products give them.
    """
    numbers = 3 * features + 6 * width + 8 * heads * head_dim + 3 * mlp
    scores = min(max(SCORES, heads * patches), heads * patches**2)
    return 4 * (patches * numbers + 3 * scores)


def frequencies(theta: float, width: int) -> Array:
    """Return the frequencies of `width` / 2 pairs, f32."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    return 1.0 / jnp.power(jnp.float32(theta), exponents)


def angles_of(position_N: Array, theta: float, width: int) -> Array:
    """Return the angles [N, width / 2] of positions along one axis, f32."""
    return position_N.astype(jnp.float32)[:, None] * frequencies(theta, width)[None]


def rotated(x_NHD: Array, angles_NF: Array) -> Array:
    """x with each pair (i, i + D / 2) of a head rotated by its angle, in f32: F = D / 2."""
    cos, sin = jnp.cos(angles_NF)[:, None], jnp.sin(angles_NF)[:, None]
    low, high = jnp.split(x_NHD.astype(jnp.float32), 2, axis=-1)
    y = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return y.astype(x_NHD.dtype)


def of_patches(step: StepContext, patches: Patches) -> StepContext:
    """Return the step that knows how many patches are real, for products which leave padding out;
    XLA's do not.
    """
    if step.products is None:
        return step
    return dataclasses.replace(step, num_rows=jnp.sum(patches.image_N >= 0, dtype=jnp.int32))


def of_rows(step: StepContext, patches: int) -> StepContext:
    """Return a step of patches as one of rows of embeddings. patches: of a row."""
    if step.num_rows is None:
        return step
    return dataclasses.replace(step, num_rows=step.num_rows // jnp.int32(patches))


def attend(
    q_NHD: Array,
    k_NJD: Array,
    v_NJD: Array,
    groups_GN: Array,
    scale: float,
    step: StepContext,
) -> Array:
    """Full attention within groups of patches, [N, H, D]: a query sees the keys whose numbers are
    its own in all G groups, as those of its image and of its window. Padding has a negative number
    in the first, and its results mean nothing.

    By XLA on a CPU the keys of many patches are taken in tiles too, and a tile that holds nothing
    that is seen is not computed: other images of a call, other windows, and padding cost nothing.
    Elsewhere a branch costs more than it saves.
    """
    if step.group_attention is not None and step.group_attention.supported(q_NHD):
        return step.group_attention.attend(q_NHD, k_NJD, v_NJD, groups_GN, scale)
    if len(k_NJD) <= KEYS:
        return _attend_all(q_NHD, k_NJD, v_NJD, groups_GN, scale)
    return jax.lax.platform_dependent(
        q_NHD,
        k_NJD,
        v_NJD,
        groups_GN,
        cpu=functools.partial(_attend_tiles, scale=scale),
        default=functools.partial(_attend_all, scale=scale),
    )


def _attend_tiles(
    q_NHD: Array, k_NJD: Array, v_NJD: Array, groups_GN: Array, scale: float
) -> Array:
    """Attend as `attend` does, in tiles of queries and keys, by the running softmax of
    FlashAttention (arXiv:2205.14135) in f32. What padding gets is finite, and means nothing.
    """
    num, heads, _ = q_NHD.shape
    kv_heads, padding = k_NJD.shape[1], -num % KEYS
    total = num + padding
    far = jnp.iinfo(jnp.int32).max  # the image of padding: after all others, as it lies
    groups_GN = jnp.where(groups_GN < 0, far, groups_GN)
    groups_GN = jnp.pad(groups_GN, ((0, 0), (0, padding)), constant_values=far)

    def tiled(x: Array, size: int) -> Array:
        x = jnp.pad(x.astype(jnp.float32), ((0, padding), (0, 0), (0, 0)))
        return x.reshape(total // size, size, kv_heads, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)

    def tiles_of(size: int) -> tuple[Array, Array, Array]:
        groups = groups_GN.reshape(len(groups_GN), -1, size).swapaxes(0, 1)
        return groups, groups.min(axis=2), groups.max(axis=2)

    q, k, v = tiled(q_NHD, QUERIES), tiled(k_NJD, KEYS)[:, :, 0], tiled(v_NJD, KEYS)[:, :, 0]
    of_queries, low, high = tiles_of(QUERIES)
    of_keys, least, most = tiles_of(KEYS)
    meet = (low[:, None] <= most[None]) & (least[None] <= high[:, None])
    is_needed = meet.all(axis=2) & (low[:, :1] != far)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(args: tuple[Array, Array, Array]) -> Array:
        q_JGTD, groups_GT, needed = args
        form = q_JGTD.shape[:3]

        def seen(carry: tuple[Array, Array, Array], keys: tuple[Array, Array, Array]) -> Any:
            top, total, o = carry
            k_JKD, v_JKD, groups_GK = keys
            scores = jnp.einsum("jgtd,jkd->jgtk", q_JGTD, k_JKD) * jnp.float32(scale)
            is_seen = (groups_GT[:, :, None] == groups_GK[:, None]).all(axis=0)
            scores = jnp.where(is_seen, scores, -jnp.inf)
            above = jax.lax.stop_gradient(jnp.maximum(top, scores.max(axis=-1)))
            base = jnp.where(jnp.isfinite(above), above, 0.0)
            weights = jnp.exp(scores - base[..., None])
            kept = jnp.exp(top - base)
            o = o * kept[..., None] + jnp.einsum("jgtk,jkd->jgtd", weights, v_JKD)
            return above, total * kept + weights.sum(axis=-1), o

        def step(carry: Any, keys: Any) -> tuple[Any, None]:
            need, *rest = keys
            return jax.lax.cond(need, seen, lambda carry, _: carry, carry, tuple(rest)), None

        top = jnp.full(form, -jnp.inf, jnp.float32)
        empty = jnp.zeros(form, jnp.float32), jnp.zeros((*form, v.shape[-1]), jnp.float32)
        (_, total, o), _ = jax.lax.scan(step, (top, *empty), (needed, k, v, of_keys))
        return o / jnp.where(total > 0, total, 1.0)[..., None]

    o = jax.lax.map(one, (q, of_queries, is_needed))
    o = o.transpose(0, 3, 1, 2, 4).reshape(total, heads, v.shape[-1])
    return o[:num].astype(q_NHD.dtype)


def _attend_all(q_NHD: Array, k_NJD: Array, v_NJD: Array, groups_GN: Array, scale: float) -> Array:
    """Attend as `attend` does, to all keys at once.

    Queries are taken in tiles, so that no more than SCORES scores are held at once, of all heads.
    Its gradient computes the scores again.
    """
    num, heads, width = q_NHD.shape
    tile = min(num, max(1, SCORES // (heads * num)))
    padding = -num % tile
    queries = heads // k_NJD.shape[1]
    q = jnp.pad(q_NHD, ((0, padding), (0, 0), (0, 0)))
    q = q.reshape(-1, tile, k_NJD.shape[1], queries, width)
    of_queries = jnp.pad(groups_GN, ((0, 0), (0, padding)), mode="edge")
    of_queries = of_queries.reshape(len(groups_GN), -1, tile).swapaxes(0, 1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(args: tuple[Array, Array]) -> Array:
        q_TJGD, groups_GT = args
        scores = jnp.einsum("tjgd,njd->jgtn", q_TJGD, k_NJD, preferred_element_type=jnp.float32)
        is_seen = (groups_GT[:, :, None] == groups_GN[:, None]).all(axis=0)
        scores = jnp.where(is_seen, scores * jnp.float32(scale), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_NJD.dtype)
        o = jnp.einsum("jgtn,njd->tjgd", weights, v_NJD, preferred_element_type=jnp.float32)
        return o.astype(q_NHD.dtype)

    o = jax.lax.map(one, (q, of_queries))
    return o.reshape(-1, heads, v_NJD.shape[-1])[:num]


def pooled(x_NW: Array, row_N: Array, num_rows: int, patches: int) -> Array:
    """Return the mean of the patches of each row, f32 [num_rows, W]. patches: of a row. A patch of
    padding is in no row.
    """
    sums = jax.ops.segment_sum(x_NW.astype(jnp.float32), row_N, num_segments=num_rows + 1)
    return sums[:num_rows] / jnp.float32(patches)
