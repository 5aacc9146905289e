"""One dense decoder for Qwen3, Qwen2, Llama 3 and Mistral: it trains (dense, causal) and serves
(paged).

Without a cache, `Decoder` takes tokens [..., T] and attends causally within them: differentiable,
for training and tests. With a PagedCache it takes one packed row of tokens [T]; each layer first
writes its keys and values into the pool, then attends through the block table. Everything else is
the same code.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.layout import param_shapes
from jpaged.models.rope import rotate, rotation
from jpaged.runtime.attention import PagedCache
from kernels_cpu import linear as cpu


def linear(
    x: Array, weight: Array, count: Array | int | None = None, dtype: DTypeLike = jnp.float32
) -> Array:
    """x [..., E] times weight [out, E] transposed, accumulated in f32: [..., out] in dtype.

    count: only so many rows of x [T, E] are wanted, the others are padding whose results may be
    anything (serving); None: all are, and the product can be differentiated.
    """

    def plain(x: Array, weight: Array, _: Any) -> Array:
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32).astype(
            dtype
        )

    if count is None or not cpu.supported(x, weight):
        return plain(x, weight, None)
    native = functools.partial(cpu.linear, dtype=dtype)
    return jax.lax.platform_dependent(x, weight, jnp.int32(count), cpu=native, default=plain)


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467) over the last axis, computed in f32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(
            jnp.mean(x32 * x32, axis=-1, keepdims=True) + jnp.float32(self.eps)
        )
        return x32.astype(x.dtype) * self.scale[...].reshape(
            (1,) * (x.ndim - 1) + x.shape[-1:]
        ).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245); the projections of one KV head and its G query
    heads lie together.
    """

    def __init__(
        self, config: ModelConfig, shapes: dict[str, Any], *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        c = config
        self.qkv = _normal(rngs, shapes["qkv"], dtype)
        self.out = _normal(rngs, shapes["out"], dtype, scale=(2 * c.num_layers) ** -0.5)
        if c.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(shapes["qkv_bias"], dtype))
        if c.out_bias:
            self.out_bias = nnx.Param(jnp.zeros(shapes["out_bias"], dtype))
        if c.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype) for _ in "qk"
            )
        self.config = c

    def __call__(
        self,
        x: Array,
        rope: tuple[Array, Array],
        cache: PagedCache | None,
        layer: Array | int,
        window: int | None,
    ):
        weight = self.qkv[...]
        heads, group, dim, embed = (
            weight.shape[0],
            weight.shape[1] - 2,
            weight.shape[2],
            weight.shape[3],
        )
        lead = (1,) * (x.ndim - 1)
        count, f32 = None if cache is None else cache.num_tokens, jnp.float32
        with jax.named_scope("qkv"):
            qkv = linear(
                x, weight.reshape(-1, embed), count, f32 if self.config.qkv_bias else x.dtype
            )
            qkv = qkv.reshape(*x.shape[:-1], heads, group + 2, dim)
        if self.config.qkv_bias:
            qkv = qkv + self.qkv_bias[...].astype(jnp.float32).reshape(lead + weight.shape[:3])
        qkv = qkv.astype(x.dtype)
        q, k, v = (
            qkv[..., :group, :],
            qkv[..., group, :],
            qkv[..., group + 1, :],
        )  # [K, G, D], [K, D], [K, D]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            q, k = rotate(q, *rope), rotate(k, *rope)
        q = q.reshape(*x.shape[:-1], heads * group, dim)
        scale = dim**-0.5
        if cache is None:
            # jax's reference attention: f32 softmax, causal by index, differentiable. It mixes bf16
            # with f32.
            local = None if window is None else (window - 1, 0)
            with jax.numpy_dtype_promotion("standard"):
                o = jax.nn.dot_product_attention(
                    q, k, v, scale=scale, is_causal=True, local_window_size=local
                )
        else:
            cache = cache.write(layer, k, v)
            o = cache.attend(layer, q, scale=scale, sliding_window=window)
        with jax.named_scope("out"):
            whole = not self.config.out_bias and (cache is None or cache.tensor_axis is None)
            o = o.reshape(*x.shape[:-1], heads * group * dim)
            out = linear(o, self.out[...].reshape(embed, -1), count, x.dtype if whole else f32)
        out = out if cache is None else cache.sum_over_heads(out)
        if self.config.out_bias:
            out = out + self.out_bias[...].astype(jnp.float32).reshape((*lead, embed))
        return out.astype(x.dtype), cache


class MLP(nnx.Module):
    """SwiGLU feed-forward (arXiv:2002.05202), gate and up in one weight."""

    def __init__(
        self, config: ModelConfig, shapes: dict[str, Any], *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        self.gate_up = _normal(rngs, shapes["gate_up"], dtype)
        self.down = _normal(rngs, shapes["down"], dtype, scale=(2 * config.num_layers) ** -0.5)
        self.size = config.intermediate_size

    def __call__(self, x: Array, cache: PagedCache | None) -> Array:
        weight = self.gate_up[...]
        count, shared = None if cache is None else cache.num_tokens, weight.shape[1] < self.size
        gate, up = jnp.split(linear(x, weight.reshape(-1, weight.shape[-1]), count), 2, axis=-1)
        h = (jax.nn.silu(gate) * up).astype(x.dtype)
        out = linear(h, self.down[...], count, jnp.float32 if shared else x.dtype)
        if cache is not None and shared:  # this device holds a share of the FFN
            out = cache.sum_over_heads(out)
        return out.astype(x.dtype)


class Layer(nnx.Module):
    """Pre-norm transformer layer. layer: its index; window: of its attention, or None."""

    def __init__(
        self, config: ModelConfig, shapes: dict[str, Any], *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, shapes["attention"], rngs=rngs, dtype=dtype)
        self.post_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, shapes["mlp"], rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Array,
        rope: tuple[Array, Array],
        cache: PagedCache | None,
        layer: Array | int,
        window: int | None,
    ):
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.input_norm(x), rope, cache, layer, window)
        x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_norm(x), cache), cache


class Embedding(nnx.Module):
    """A [V, E] table: rows by token id going in, logits going out."""

    def __init__(self, shapes: dict[str, Any], *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = _normal(rngs, shapes["weight"], dtype)


class Decoder(nnx.Module):
    """The language model; its parameter tree is `jpaged.models.layout.param_shapes`.

    tokens: int [..., T] (dense) or [T] (paged). Returns the final-norm hidden states [..., T, E]
    and the cache.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        shapes = param_shapes(config)
        self.config = config
        self.embed = Embedding(shapes["embed"], rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            [Layer(config, s, rngs=rngs, dtype=dtype) for s in shapes["layers"].values()]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(shapes["lm_head"], rngs=rngs, dtype=dtype)

    def __call__(
        self, tokens: Array, positions: Array | None = None, cache: PagedCache | None = None
    ):
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        rope = jax.lax.optimization_barrier(
            rotation(self.config, positions)
        )  # else layers work the angles out again
        with jax.named_scope("embed"):
            x = jnp.take(self.embed.weight[...], tokens, axis=0, mode="clip")
        for i, layer in enumerate(self.layers):
            x, cache = _run_layer(
                *nnx.split(layer), x, rope, cache, np.int32(i), self.config.sliding_window(i)
            )
        return self.norm(x), cache

    def logits(self, x: Array, count: Array | int | None = None) -> Array:
        """f32 logits [..., V] of final hidden states [..., E]; count: see linear."""
        with jax.named_scope("head"):
            return linear(
                x,
                (self.embed if self.config.tie_word_embeddings else self.lm_head).weight[...],
                count,
            )


@functools.partial(jax.jit, static_argnames=("graph", "window"))
def _run_layer(
    graph: Any, params: Any, x: Array, rope: Any, cache: Any, layer: Any, window: int | None
):
    # Inside another jit: layers of one form are traced and lowered once, not once each. XLA inlines
    # the calls.
    return nnx.merge(graph, params)(x, rope, cache, layer, window)


def bind(config: ModelConfig, tree: Any) -> Decoder:
    """The Decoder whose parameters are the arrays (or tracers) of a canonical tree; no array is
    copied.
    """
    model = nnx.merge(*_abstract(config), copy=True)
    nnx.update(model, {**tree, "layers": {int(i): layer for i, layer in tree["layers"].items()}})
    return model


@functools.cache
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def to_tree(model: Any) -> Any:
    """The canonical tree (nested dicts of bare arrays, keyed by strings) of a Decoder, an nnx.State
    or a mapping.
    """
    if isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    if isinstance(model, list | tuple):
        model = dict(enumerate(model))
    if isinstance(model, Mapping):
        return {str(key): to_tree(value) for key, value in model.items()}
    return model.get_value() if isinstance(model, nnx.Variable) else model


def _normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, scale: float = 1.0
) -> nnx.Param:
    return nnx.Param(
        jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02 * scale, dtype)
    )
