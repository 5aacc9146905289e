"""Exact: a dense forward pass with the bits of deterministic serving, and XLA's gradient.

Where deterministic serving needs no steps of one size, a row's bits depend on that row alone in
every product, norm and attention (docs/research.md). So whole sequences, multiplied and attended to
by the same C++ kernels, have the bits that decode and prefill gave their tokens. The kernels have
no derivative: that of each layer is the derivative of XLA's layer at the same input.

Shapes beside those of jpaged/__init__.py: B sequences, L their tokens, T = B * L; M blocks of one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.models.forward import IN_TRAINING, Forward, Unembedding
from jpaged.models.kv_view import DenseKV, Place
from jpaged.models.layers.heads import Heads, LatentHeads
from jpaged.models.layers.layer import Layer, Stream
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.per_layer import PerLayerInputs
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.params import Params, nest, param_table
from jpaged.models.quantized import is_quantized
from jpaged.models.rows import Rows, Slots, State
from jpaged.runtime.attention import Kernel
from jpaged.runtime.logprobs import TEMPERED, token_logprobs
from jpaged.runtime.mesh import Placement
from jpaged.runtime.resolve import resolve
from kernels_pallas.paged_attention.interface import AttentionOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact:
    """What computes a step of deterministic serving, for sequences at hand; `exact_for` makes it.

    context: what layers take beside x. kernels: of attention, for each of kv_groups(model); None of
    one that keeps states. dtype: that weights are served in.
    """

    context: StepContext
    kernels: tuple[Kernel | None, ...]
    dtype: Any

    @property
    def in_training(self) -> StepContext:
        """What the same layers take in training."""
        return dataclasses.replace(IN_TRAINING, max_len=self.context.max_len)

    def served(self, params: Params) -> Params:
        """Return the params in the dtype that they are served in."""
        specs = nest(param_table(params.config))

        def cast(spec: Any, leaf: Array) -> Array:
            return leaf.astype(jnp.float32 if spec.in_f32 else self.dtype)

        return Params(jax.tree.map(cast, specs, dict(params)), params.config)

    def model(self, model: Forward) -> Forward:
        """Return a model whose layers have the bits of serving."""
        layers: Any = tuple(ExactLayer(layer, self) for layer in model.layers)
        inputs: Any = model.per_layer and ExactInputs(model.per_layer, self)
        return dataclasses.replace(model, layers=layers, per_layer=inputs)

    def logprobs(
        self,
        unembedding: Unembedding,
        x: Array,
        targets: Array,
        tau_B: Array,
        with_entropy: bool,
        kept: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return logprobs and entropies [B, C] of targets [B, C] after x [B, C, E], with the bits
        of a draw; zeros in place of entropies that are not asked for. kept: the ids that each
        target was drawn from, int32 [B, C, K], -1 past the last; None is all.
        """
        tokens_T = targets.reshape(-1)
        # A number, not a constant: XLA would multiply by the reciprocal of that.
        tau_T = jax.lax.optimization_barrier(jnp.repeat(tau_B, targets.shape[1]))
        x_TE = x.reshape(-1, x.shape[-1])
        kept_TK = None if kept is None else kept.reshape(-1, kept.shape[-1])

        def logits(x: tuple[Array, Array | None]) -> Array:
            x_TE, kept_TK = x
            z_TV = unembedding(x_TE, self.context)
            return z_TV if kept_TK is None else _only(z_TV, kept_TK)

        told = token_logprobs(
            logits,
            (x_TE, kept_TK),
            tokens_T,
            tau_T,
            jnp.full(tokens_T.shape, TEMPERED),
            with_entropy=with_entropy,
            tile=max(tokens_T.shape[0], 1),
        )
        return told.logprob_T.reshape(targets.shape), told.entropy_T.reshape(targets.shape)


def _only(z_TV: Array, kept_TK: Array) -> Array:
    """Return logits, -inf for all tokens that are not named."""
    kept = jnp.take_along_axis(z_TV, jnp.maximum(kept_TK, 0), axis=1)
    at_TK = jnp.where(kept_TK >= 0, kept_TK, z_TV.shape[1])
    rows_T1 = jnp.arange(z_TV.shape[0])[:, None]
    return jnp.full_like(z_TV, -jnp.inf).at[rows_T1, at_TK].set(kept, mode="drop")


def exact_for(params: Params, config: EngineConfig | None) -> Exact:
    """Return what computes the steps of an engine that serves these params. config: its own, None
    is the default. UnsupportedError where bits depend on the batch or on the mesh, or where weights
    or keys are rounded.
    """
    asked = config or EngineConfig()
    dtype = jnp.dtype(asked.dtype or params["embed"]["weight"].dtype)
    check_combination(Facts(no_exact=_reason_against(params, asked)))
    asked = dataclasses.replace(asked, deterministic=True, decode_steps=None, speculative=None)
    place = Placement(mesh=None, axis=None, device=jax.devices()[0])
    with jax.ensure_compile_time_eval():  # a loss asks for it while it is traced
        resolved, choices = resolve(params.config, asked, place, dtype)
    if not choices.is_batch_invariant:
        reason = f"{dtype.name} on {place.device.platform}: bits of this model's rows depend on"
        check_combination(Facts(no_exact=f"{reason} the batch (docs/research.md)"))
    context = StepContext(
        max_len=resolved.max_model_len,
        products=choices.products,
        experts=choices.experts,
        delta=choices.delta,
        scan=choices.scan,
    )
    return Exact(context=context, kernels=choices.attention, dtype=dtype)


def _reason_against(params: Params, config: EngineConfig) -> str:
    """Return why the bits of serving are not those of these params; "" where nothing is known."""
    if any(is_quantized(x) for x in jax.tree.leaves(dict(params), is_leaf=is_quantized)):
        return "weights are loaded in 8 or 4 bits"
    for name in ("quantization", "kv_cache_dtype"):
        if (value := getattr(config, name)) is not None:
            return f"engine_config has {name}={value!r}"
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if (getattr(config, name) or 1) > 1:
            return f"engine_config has {name}={getattr(config, name)}"
    return "engine_config has deterministic=False" if config.deterministic is False else ""


def _with_gradient_of(train: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the values of `serve` and the derivative of `train`, at the same
    arguments, of which all are pytrees.
    """

    @jax.custom_vjp
    def function(*args: Any) -> Any:
        return serve(*args)

    def forward(*args: Any) -> tuple[Any, Any]:
        return serve(*args), args

    def backward(args: Any, grads: Any) -> Any:
        return jax.vjp(train, *args)[1](grads)

    function.defvjp(forward, backward)
    return function


def _packed(tree: Any) -> Any:
    """Return arrays [B, L, ...] as packed tokens [T, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactLayer:
    """A layer with the bits of serving. Its input alone is kept for the backward pass."""

    layer: Layer
    by: Exact = dataclasses.field(metadata={"static": True})

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that it takes."""
        return self.layer.rope

    def __call__(
        self,
        stream: Stream,
        step: StepContext,
        rotary: Rotary | None,
        kv: DenseKV,
        places: tuple[Place, ...],
        inputs: Array | None = None,
    ) -> tuple[Stream, DenseKV]:
        """See Layer; x [B, L, E]. Nothing is left to be added, so that one array is kept."""

        def serve(layer: Layer, x: Array, rotary: Any, kv: DenseKV, places: Any, inputs: Any):
            view: Any = ExactKV(dense=kv, by=self.by, batch=(x.shape[0], x.shape[1]))
            packed = _packed((x, rotary, inputs))
            stream = Stream(packed[0])
            stream, view = layer(stream, self.by.context, packed[1], view, places, packed[2])
            return stream.sum.reshape(x.shape), view.dense

        def train(layer: Layer, x: Array, rotary: Any, kv: DenseKV, places: Any, inputs: Any):
            stream, view = layer(Stream(x), step, rotary, kv, places, inputs)
            return stream.sum, view

        with_gradient = _with_gradient_of(train, serve)
        y, view = with_gradient(self.layer, stream.sum, rotary, kv, places, inputs)
        return Stream(y), view


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactInputs:
    """What tokens have for all layers, with the bits of serving."""

    inputs: PerLayerInputs
    by: Exact = dataclasses.field(metadata={"static": True})

    def __call__(self, tokens: Array, x: Array, step: StepContext) -> Array:
        """See PerLayerInputs; tokens [B, L]."""

        def serve(inputs: PerLayerInputs, tokens: Array, x: Array) -> Array:
            packed_tokens, packed_x = _packed((tokens, x))
            y = inputs(packed_tokens, packed_x, self.by.context)
            return y.reshape(*tokens.shape, *y.shape[1:])

        def train(inputs: PerLayerInputs, tokens: Array, x: Array) -> Array:
            return inputs(tokens, x, step)

        return _with_gradient_of(train, serve)(self.inputs, tokens, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactKV:
    """A KVView of whole sequences, whose tokens are packed: keys and values lie where a dense
    forward has them, and the kernel of serving attends. batch: B and L.
    """

    dense: DenseKV
    by: Exact
    batch: tuple[int, int]

    def write(self, place: Place, qkv: Any, heads: Heads | LatentHeads) -> tuple[Array, Self]:
        """See KVView. Where serving prepares heads by a kernel, so does this, whose pool has no
        padding: a token's keys and values in turn, head by head.
        """
        kernel = self.by.kernels[place.group]
        if kernel is not None and kernel.writes_heads:
            T, layout = qkv.shape[0], kernel.pool_layout
            pool = jnp.zeros((1, T, layout.rows, layout.width), qkv.dtype)
            slots_T = jnp.arange(T, dtype=jnp.int32)
            q, pool = kernel.write(qkv, heads, pool, 0, slots_T, num_layers=1)
            kv = pool[0, :, 0::2], pool[0, :, 1::2]
        else:
            q, *kv = heads(qkv)
        dense = self.dense.keeping(place, *(x.reshape(*self.batch, *x.shape[1:]) for x in kv))
        return q, dataclasses.replace(self, dense=dense)

    def attend(
        self, place: Place, q: Array, options: AttentionOptions, sinks: Array | None = None
    ) -> Array:
        """See KVView: over a pool of the sequences' keys and values alone."""
        kernel = self.by.kernels[place.group]
        assert kernel is not None
        (rows, length), size = self.batch, kernel.shapes.block_size
        blocks = -(-length // size)
        kv = kernel.pool_layout.token(*self.dense.written(place))
        kv = jnp.pad(kv, [(0, 0), (0, blocks * size - length), (0, 0), (0, 0)])
        pool = kv.reshape(rows * blocks, size, *kv.shape[2:])
        table_SM = jnp.arange(rows * blocks, dtype=jnp.int32).reshape(rows, blocks)
        lens_S = jnp.full(rows, length, jnp.int32)
        starts_S1 = jnp.arange(rows + 1, dtype=jnp.int32) * length
        call = {"options": kernel.options(options, 1), "sinks_H": sinks}
        return kernel.module.prefill(q, pool, 0, table_SM, lens_S, starts_S1, None, **call)

    def rows(self, place: Place) -> Rows:
        """See KVView. No layer is told that all rows have one length: it would take the form that
        can be differentiated, where serving takes its kernel.
        """
        return dataclasses.replace(self.dense.rows(place), length=None)

    def state(self, place: Place) -> State:
        """See KVView."""
        return self.dense.state(place)

    def with_state(self, place: Place, new: State) -> Self:
        """See KVView."""
        return dataclasses.replace(self, dense=self.dense.with_state(place, new))

    def slots(self, place: Place) -> Slots:
        """See KVView."""
        return self.dense.slots(place)

    def with_slots(self, place: Place, pool: State) -> Self:
        """See KVView."""
        return dataclasses.replace(self, dense=self.dense.with_slots(place, pool))

    def with_replayed(self, place: Place, tokens: State) -> Self:
        """See KVView: nothing is kept."""
        return self

    def forced_experts(self, place: Place) -> Array | None:
        """See KVView."""
        return self.dense.forced_experts(place)

    def with_experts(self, place: Place, chosen: Array) -> Self:
        """See KVView: nothing is kept."""
        return self
