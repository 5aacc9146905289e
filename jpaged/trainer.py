"""logprobs: the trainer's half of a rollout, log-probabilities that a loss differentiates.

Shapes beside those of jpaged/__init__.py: B rows of arrays, C their columns that may be drawn, L
tokens of a row, N tokens whose logits are made at once.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jpaged.checks import TEMPERATURES, check_real, check_whole, is_scalar
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.models.forward import IN_TRAINING, Unembedding, bind
from jpaged.models.kv_view import KVView, Place
from jpaged.models.layers.layer import Layer
from jpaged.models.layers.linear import StepContext
from jpaged.models.layers.rope import RopeConfig, Rotary
from jpaged.models.params import Params
from jpaged.request.image_arrays import ImageArrays
from jpaged.runtime.exact import Exact, exact_for
from jpaged.runtime.weights import as_params
from jpaged.types import ModelLike, PyTree

COMPLETIONS = ("prompt_ids", "prompt_lens", "completion_ids", "completion_mask")
DIALOGS = ("tokens", "loss_mask")


@overload
def logprobs(
    params: PyTree,
    arrays: Mapping[str, ArrayLike],
    *,
    temperature: ArrayLike = 1.0,
    entropy: Literal[False] = False,
    chunk: int = 512,
    remat: bool = False,
    sampling_mask: bool = False,
    routed: bool = False,
    exact: bool = False,
    images: ImageArrays | None = None,
    engine_config: EngineConfig | None = None,
    config: ModelLike | None = None,
) -> Array: ...


@overload
def logprobs(
    params: PyTree,
    arrays: Mapping[str, ArrayLike],
    *,
    temperature: ArrayLike = 1.0,
    entropy: Literal[True],
    chunk: int = 512,
    remat: bool = False,
    sampling_mask: bool = False,
    routed: bool = False,
    exact: bool = False,
    images: ImageArrays | None = None,
    engine_config: EngineConfig | None = None,
    config: ModelLike | None = None,
) -> tuple[Array, Array]: ...


def logprobs(
    params: PyTree,
    arrays: Mapping[str, ArrayLike],
    *,
    temperature: ArrayLike = 1.0,
    entropy: bool = False,
    chunk: int = 512,
    remat: bool = False,
    sampling_mask: bool = False,
    routed: bool = False,
    exact: bool = False,
    images: ImageArrays | None = None,
    engine_config: EngineConfig | None = None,
    config: ModelLike | None = None,
) -> Array | tuple[Array, Array]:
    """Return log p(token | all before it) under log_softmax(logits / temperature) of each token
    that was drawn: float32 [B, C], where the `logprobs` of the arrays are, and 0 where these are
    masked. A pure function of jax, to be called under jit and differentiated in reverse.

    params: Params, or any other tree with config= as in generate; under jit Params alone, which
    params_from makes. arrays: of to_arrays ([B, C] are completions) or dialog_arrays (C is L).
    temperature: one for all, or [B]; 0 counts as 1, as in a draw.

    entropy: also returns the entropy of each of these distributions, in nats, float32 [B, C], to be
    differentiated too. chunk: about so many tokens have their logits [chunk, V] in memory at once,
    forwards and backwards, and at least one of each row. remat: the backward pass computes each
    layer again from its input, in place of keeping all that is within. sampling_mask: distributions
    are of the tokens alone that each one was drawn from, arrays["sampling_mask"]; so is `logprobs`
    of the arrays where logprobs_mode was "processed". routed: each token takes the experts that it
    took in the rollout, arrays["routed_experts"], which the router as it is now weighs.

    exact: the very bits of the rollout, and of score, where serving is `deterministic` without
    steps of one size: bf16 on a CPU. So exp(new - old) is 1 until the weights change. The forward
    pass is by serving's kernels; each layer's derivative is that of XLA's layer at the same input,
    which it computes again: there is nothing more for remat to save, and the two together are a
    ConfigError. engine_config: of the rollout, for exact alone.

    images: those of the prompts, and their embeddings, as image_arrays makes them of the outputs
    that to_arrays has the completions of, or of the dialogs of dialog_arrays. Rows of embeddings
    are computed by the vision tower of these params, so that it has a gradient too; a ConfigError
    with exact. Raises ConfigError, RequestError and UnsupportedError.
    """
    params = loaded_params("logprobs", params, config)
    check_whole("chunk", chunk, 1)
    if exact and remat:
        raise ConfigError("remat=True with exact=True: exact computes each layer again as it is")
    if exact and images is not None:
        raise ConfigError("images= with exact=True: a loss computes towers by XLA, not as served")
    if engine_config is not None and not exact:
        raise ConfigError("engine_config without exact=True: XLA's forward pass does not read it")
    by = exact_for(params, engine_config) if exact else None
    drawn = _drawn(arrays)
    if not drawn.mask_BC.shape[0]:  # a step whose rows were all dropped
        none = jnp.zeros(drawn.mask_BC.shape, jnp.float32)
        return (none, none) if entropy else none
    params = params if by is None else by.served(params)
    architecture = params.config.keeping_choices() if routed else params.config
    model, step = bind(architecture, dict(params)), IN_TRAINING
    if by is not None:
        model, step = by.model(model), by.in_training
    elif remat:
        layers: Any = tuple(map(Rematerialized, model.layers))
        model = dataclasses.replace(model, layers=layers)
    taken = drawn.routes() if routed else None
    embedded = axes = None
    if images is not None:
        length = drawn.tokens_BL.shape[1]
        embedded, axes = images.embedded(model, *_prompts_of(arrays), length)
    hidden_BLE, _ = model(drawn.tokens_BL, step=step, routed=taken, embedded=embedded, axes=axes)
    # As in a step: what follows does not fuse into the last norm.
    hidden_BLE = jax.lax.optimization_barrier(hidden_BLE)
    hidden_BCE = jnp.take_along_axis(hidden_BLE, drawn.before_BC[:, :, None], axis=1)
    tau_B = _divisors(temperature, hidden_BCE.shape[0])
    logprob_BC, entropy_BC = _in_chunks(
        (by, entropy), model.unembedding, hidden_BCE, drawn.wanted(sampling_mask), tau_B, chunk
    )
    logprob_BC = jnp.where(drawn.mask_BC, logprob_BC, jnp.float32(0))
    if not entropy:
        return logprob_BC
    return logprob_BC, jnp.where(drawn.mask_BC, entropy_BC, jnp.float32(0))


def loaded_params(function: str, params: PyTree, config: ModelLike | None) -> Params:
    """Return what a pure function of jax takes as params; ConfigError, which names the function,
    for a folder, and under jit for another tree than Params.
    """
    if isinstance(params, str | Path):
        raise ConfigError(
            f"params={str(params)!r}: {function} takes loaded params: see load_params"
        )
    if isinstance(params, Params):
        return params
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        kind = type(params).__name__
        raise ConfigError(f"params of type {kind} under jit: make Params by params_from first")
    return as_params(params, config)


class _Drawn(NamedTuple):
    """Sequences from their first token on, and which of their tokens were drawn.

    before_BC: the place in tokens_BL after which a target comes. kept_BCK: ids that each target was
    drawn from, -1 past the last; None where nobody said. routed_BLRA: the experts that each token
    took in each layer R that has any, likewise.
    """

    tokens_BL: Array
    targets_BC: Array
    before_BC: Array
    mask_BC: Array
    kept_BCK: Array | None
    routed_BLRA: Array | None

    def routes(self) -> Array:
        """Return the experts that tokens took; RequestError where the arrays do not say it."""
        if self.routed_BLRA is None:
            raise RequestError(
                "arrays lack 'routed_experts': those of an engine with routed_experts=True have it"
            )
        return self.routed_BLRA.astype(jnp.int32)

    def wanted(self, sampling_mask: bool) -> "_Wanted":
        """Return the targets, with what they were drawn from where that is asked for; RequestError
        where the arrays do not say it.
        """
        if not sampling_mask:
            return _Wanted(self.targets_BC, None)
        if self.kept_BCK is None:
            raise RequestError(
                "arrays lack 'sampling_mask': requests with sampling_mask=True have it"
            )
        return _Wanted(self.targets_BC, self.kept_BCK)


class _Wanted(NamedTuple):
    """Tokens whose log-probabilities are wanted, and the ids that each was drawn from, of shape
    [..., K]: -1 past the last, None is all.
    """

    targets: Array
    kept: Array | None


def _drawn(arrays: Mapping[str, ArrayLike]) -> _Drawn:
    """Return what to_arrays or dialog_arrays say; RequestError for other arrays."""
    names = DIALOGS if "tokens" in arrays else COMPLETIONS
    if missing := [name for name in names if name not in arrays]:
        raise RequestError(
            f"arrays lack {missing[0]!r}: logprobs takes those of to_arrays or dialog_arrays"
        )
    taken = [jnp.asarray(arrays[name]) for name in names]
    kept = arrays.get("sampling_mask")
    kept = None if kept is None else jnp.asarray(kept)
    routed = arrays.get("routed_experts")
    routed = None if routed is None else jnp.asarray(routed)
    if names is DIALOGS:
        tokens_BL, mask_BL = taken
        before_L = np.maximum(np.arange(tokens_BL.shape[1], dtype=np.int32) - 1, 0)
        before_BL = jnp.broadcast_to(before_L, tokens_BL.shape)
        return _Drawn(tokens_BL, tokens_BL, before_BL, mask_BL, kept, routed)
    prompt_BP, lens_B, targets_BC, mask_BC = taken
    padding_B = prompt_BP.shape[1] - lens_B
    tokens_BL = jnp.concatenate([prompt_BP, targets_BC], axis=1)
    # Prompts are padded on the left: what is there begins at 0, and the padding comes last.
    shifted = jax.vmap(lambda row, n: jnp.roll(row, -n, axis=0))
    tokens_BL = shifted(tokens_BL, padding_B)
    routed = None if routed is None else shifted(routed, padding_B)
    at_C = np.arange(targets_BC.shape[1], dtype=np.int32)
    before_BC = lens_B[:, None] - 1 + at_C[None]
    return _Drawn(tokens_BL, targets_BC, before_BC, mask_BC, kept, routed)


def _prompts_of(arrays: Mapping[str, ArrayLike]) -> tuple[Array, Array | None]:
    """Return the number of each row's prompt and how many of the prompt's tokens it has, int32 [B];
    of dialogs their places in the list, and None.
    """
    names = ("index",) if "tokens" in arrays else ("group_ids", "prompt_lens")
    if missing := [name for name in names if name not in arrays]:
        raise RequestError(
            f"images=: arrays lack {missing[0]!r}: pass those of to_arrays or dialog_arrays"
        )
    if "tokens" in arrays:
        return jnp.asarray(arrays["index"]), None
    return jnp.asarray(arrays["group_ids"]), jnp.asarray(arrays["prompt_lens"])


def _divisors(temperature: ArrayLike, rows: int) -> Array:
    """Return what each row's logits are divided by, f32 [B]: see SamplingParams.divisor."""
    if is_scalar(temperature, int | float, "iufV") and not isinstance(temperature, Tracer):
        check_real("temperature", temperature, 0.0)
    tau = jnp.asarray(temperature, jnp.float32)
    if tau.shape not in ((), (rows,)):
        raise RequestError(f"temperature of shape {list(tau.shape)}: must be a number or [{rows}]")
    tau = jnp.where(tau > 0, jnp.clip(tau, *TEMPERATURES), jnp.float32(1))
    return jnp.broadcast_to(tau, (rows,))


type _Told = tuple[Exact | None, bool]  # who computes logprobs (None: XLA); entropy is asked for


def _in_chunks(
    told: _Told,
    unembedding: Unembedding,
    hidden_BCE: Array,
    wanted: _Wanted,
    tau_B: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """Return logprobs and entropies [B, C]; of the logits there are [B, columns, V] at a time.

    A chunk has some columns of every row, so that a mesh which splits rows splits each chunk.
    """
    rows, length, _ = hidden_BCE.shape
    columns = min(max(chunk // max(rows, 1), 1), max(length, 1))
    count = -(-length // columns)

    def chunked(a: Array) -> Array:
        a = jnp.pad(a, [(0, 0), (0, count * columns - length)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(rows, count, columns, *a.shape[2:]), 1, 0)

    def whole(a: Array) -> Array:
        return jnp.moveaxis(a, 0, 1).reshape(rows, -1)[:, :length]

    x, wanted = jax.tree.map(chunked, (hidden_BCE, wanted))
    return jax.tree.map(whole, _of_chunks(told, unembedding, x, wanted, tau_B))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_chunks(
    told: _Told, unembedding: Unembedding, x: Array, wanted: _Wanted, tau_B: Array
) -> tuple[Array, Array]:
    """Return logprobs and entropies [chunks, B, columns] of x [chunks, B, columns, E].

    The backward pass makes the logits again, and adds up the gradient of the head in f32: what
    lax.scan would do by itself is to add in the head's dtype.
    """
    by, with_entropy = told

    def one(args: tuple[Array, _Wanted]) -> tuple[Array, Array]:
        x, wanted = args
        if by is None:
            return _of_logits(with_entropy, unembedding, x, wanted, tau_B)
        kept = None if wanted.kept is None else _with_targets(wanted)
        return by.logprobs(unembedding, x, wanted.targets, tau_B, with_entropy, kept)

    return jax.lax.map(one, (x, wanted))


def _chunks_forward(
    told: _Told, unembedding: Unembedding, x: Array, wanted: _Wanted, tau_B: Array
) -> tuple[tuple[Array, Array], PyTree]:
    kept = unembedding, x, wanted, tau_B
    return _of_chunks(told, *kept), kept


def _chunks_backward(told: _Told, kept: PyTree, grads: tuple[Array, Array]) -> PyTree:
    unembedding, x, wanted, tau_B = kept
    _, with_entropy = told

    def one(total: PyTree, args: PyTree) -> tuple[PyTree, Array]:
        x, wanted, grads = args

        def forward(unembedding: Unembedding, x: Array, tau_B: Array) -> tuple[Array, Array]:
            return _of_logits(with_entropy, unembedding, x, wanted, tau_B)

        _, backward = jax.vjp(forward, unembedding, x, tau_B)
        of_head, of_x, of_tau = backward(grads)
        return jax.tree.map(_plus, total, (of_head, of_tau)), of_x

    head = unembedding, tau_B
    total, of_x = jax.lax.scan(one, jax.tree.map(_zeros, head), (x, wanted, grads))
    of_head, of_tau = jax.tree.map(_like, total, head)
    return of_head, of_x, None, of_tau


_of_chunks.defvjp(_chunks_forward, _chunks_backward)


def _zeros(x: Array) -> Array | np.ndarray:
    """Return zeros in which gradients of x are added up."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, jnp.float32)
    return np.zeros(x.shape, jax.dtypes.float0)  # integers have none


def _plus(total: Array, grad: Array) -> Array:
    return total if total.dtype == jax.dtypes.float0 else total + grad.astype(jnp.float32)


def _like(total: Array, x: Array) -> Array:
    return total if total.dtype == jax.dtypes.float0 else total.astype(x.dtype)


def _of_logits(
    with_entropy: bool, unembedding: Unembedding, x: Array, wanted: _Wanted, tau_B: Array
) -> tuple[Array, Array]:
    """Return logprobs and entropies [B, columns] of x [B, columns, E]; zeros in place of entropies
    that are not asked for.
    """
    logits = unembedding(x) / tau_B[:, None, None]
    if wanted.kept is not None:
        picked, entropy = _among(logits, wanted)
        return picked, entropy if with_entropy else jnp.zeros_like(picked)
    logp = jax.nn.log_softmax(logits)
    picked = _pick(logp, wanted.targets)
    if not with_entropy:
        return picked, jnp.zeros_like(picked)
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=2)


def _among(logits: Array, wanted: _Wanted) -> tuple[Array, Array]:
    """Return logprobs of tokens among those that they were drawn from, and the entropies of these
    distributions. logits: [..., V], divided by the temperature.
    """
    kept = _with_targets(wanted)
    logits_K = jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1)
    total = jax.nn.logsumexp(logits_K, axis=-1, where=kept >= 0)
    logp_K = jnp.where(kept >= 0, logits_K - total[..., None], jnp.float32(0))
    p_K = jnp.where(kept >= 0, jnp.exp(logp_K), jnp.float32(0))
    return _pick(logits, wanted.targets) - total, -jnp.sum(p_K * logp_K, axis=-1)


def _pick(a: Array, targets: Array) -> Array:
    return jnp.take_along_axis(a, targets[..., None], axis=-1)[..., 0]


def _with_targets(wanted: _Wanted) -> Array:
    """Return the ids that targets were drawn from; the target itself where there are none, as where
    arrays are padded.
    """
    assert wanted.kept is not None
    is_none = jnp.all(wanted.kept < 0, axis=-1)
    first = jnp.where(is_none, wanted.targets, wanted.kept[..., 0])
    return wanted.kept.at[..., 0].set(first)


def masked_logprobs(
    logits: Array, tokens: Array, sampling_mask: Array, *, temperature: ArrayLike = 1.0
) -> Array:
    """Return log-probabilities of tokens among those alone that each was drawn from, float32 [...];
    0 where none is named, as where arrays are padded. A pure function of jax, to be differentiated.

    logits: [..., V], before the token. tokens: int32 [...]. sampling_mask: int32 [..., K], as
    to_arrays has it. temperature: one for all, or an array that broadcasts to [...]; 0 counts as 1.
    """
    wanted = _Wanted(jnp.asarray(tokens), jnp.asarray(sampling_mask))
    shapes = logits.shape[:-1], wanted.targets.shape, sampling_mask.shape[:-1]
    if len(set(shapes)) > 1:
        raise RequestError(
            f"logits {list(logits.shape)}, tokens {list(tokens.shape)} and sampling_mask "
            f"{list(sampling_mask.shape)}: all but the last axis of logits and masks must be equal"
        )
    tau = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), tokens.shape)
    tau = jnp.where(tau > 0, jnp.clip(tau, *TEMPERATURES), jnp.float32(1))
    scaled = logits.astype(jnp.float32) / tau[..., None]
    return _among(scaled, wanted)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rematerialized:
    """A layer of which nothing but its input is kept for the backward pass, which computes the rest
    again (arXiv:1604.06174).
    """

    layer: Layer

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that it takes."""
        return self.layer.rope

    def __call__(
        self,
        x: Array,
        step: StepContext,
        rotary: Rotary | None,
        kv: KVView,
        places: tuple[Place, ...],
        inputs: Array | None = None,
    ) -> tuple[Array, KVView]:
        """See Layer."""
        return jax.checkpoint(Layer.__call__)(self.layer, x, step, rotary, kv, places, inputs)
