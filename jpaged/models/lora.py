"""Low-rank adapters of a model (arXiv:2106.09685): their form, how a tree is read, and how they are
merged into the weights.

An adapter has for some weights a pair: A [rank, *inputs] and B [*outputs, rank]; the weight counts
as W + scale * B A. Weights are named as in models/params.py; a fused one has a pair for each of its
parts ("layers.0.attention.q"), or one for all of them ("layers.0.attention.qkv").

The embedding's pair is as PEFT has it: A [rank, V] and B [E, rank], whose product transposed it
gains. Experts have pairs of their own: A [rank, X, *inputs] and B [X, *outputs, rank]. The head of
a model that ties it to its embedding can have a pair nonetheless: it is the head's alone.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jpaged.errors import ConfigError
from jpaged.models.config import LM_HEAD, ModelConfig
from jpaged.models.param_spec import ParamSpec, Part
from jpaged.models.params import Params, check_leaf, nest, param_table
from jpaged.models.trees import to_tree

# The weights that can have adapters, as names within a layer.
ADAPTED = (
    *("attention.qkv", "attention.v", "attention.out", "delta.qkvz", "delta.out"),
    *("mamba.zx", "mamba.bc", "mamba.dt", "mamba.out"),
    *("kda.qkvz", "kda.qkv", "kda.out"),
    *("latent.q_a", "latent.q", "latent.kv", "latent.up", "latent.out"),
    *("latent.index.q", "latent.index.k", "latent.index.weights"),
    *("mlp.gate_up", "mlp.down", "mlp.latent_in", "mlp.latent_out"),
    *("mlp.shared.gate_up", "mlp.shared.down"),
)
# Those that an engine has tables for only where it is asked, by the name of what they are.
EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
EXPERTS = ("mlp.experts.gate_up", "mlp.experts.down")
EXTRA = {"embedding": (EMBEDDING,), "head": (HEAD,), "experts": EXPERTS}
SIDE = re.compile(r"(.+)\.(?:(a|A|lora_a|lora_A|0)|b|B|lora_b|lora_B|1)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A tree of pairs with their scale, usually alpha / rank. A pytree, as is the bare tree: where
    that is passed, its scale is 1.

    weights: nested or flat, by our names: a pair (A, B), or {"a": A, "b": B}, of each weight.
    """

    weights: Any
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})


class Pair(NamedTuple):
    """The adapter of one part of a weight: a [rank, *inputs], and b [*outputs, rank] scaled."""

    a: Any
    b: Any

    @property
    def rank(self) -> int:
        return self.a.shape[0]


Pairs = dict[str, Pair]  # by the part's name, "layers.0.attention.q"


class Target(NamedTuple):
    """A part of a weight that can have an adapter: the weight's spec, the part, and its place in
    the weight.
    """

    spec: ParamSpec
    part: Part
    place: tuple[slice, ...]

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the part's outputs and inputs."""
        outputs, _, inputs = self.part.axes.partition(",")
        return self.spec.shape_of(outputs), self.spec.shape_of(inputs)


def targets(config: ModelConfig, extra: Collection[str] = ()) -> dict[str, Target]:
    """Return what can have adapters in a model, by the names of the parts; extra: kinds of EXTRA
    too.
    """
    by_part = {}
    for spec in adapted_specs(config, extra).values():
        for part, index in spec.places:
            by_part[spec.at(part.name)] = Target(spec, part, index)
    return by_part


def adapted_specs(config: ModelConfig, extra: Collection[str] = ()) -> dict[str, ParamSpec]:
    """The weights that can have adapters, by name, with the axes that their pairs have.

    extra: kinds of EXTRA too.
    """
    wanted = {*ADAPTED, *(name for kind in extra for name in EXTRA[kind])}
    table = param_table(config) | {HEAD: LM_HEAD.placed(config.sizes)}
    return {name: _adapted(spec) for name, spec in table.items() if _short(spec.name) in wanted}


def extra_of(names: Iterable[str]) -> set[str]:
    """Return the kinds of EXTRA among parts."""
    kinds = {"embedding": EMBEDDING, "head": HEAD, "experts": "mlp.experts."}
    return {kind for kind, name in kinds.items() if any(name in part for part in names)}


def _adapted(spec: ParamSpec) -> ParamSpec:
    """Return a weight in the axes of its pairs."""
    if spec.name == EMBEDDING:  # of the V inputs of a token one is 1 and the others are 0
        return dataclasses.replace(spec, axes="E, V")
    if _short(spec.name) not in EXPERTS:
        return spec
    source = spec.source
    if not isinstance(source, str):
        source = tuple(part._replace(axes=part.axes.replace(",", ", X")) for part in source)
    return dataclasses.replace(spec, axes=spec.axes.replace(",", ", X"), source=source)


def pairs_of(source: Any, config: ModelConfig, *, caller: str | None = None) -> Pairs:
    """Return the pairs of an Adapter or a tree, checked against the model. ConfigError names the
    first that does not fit. caller: who needs live arrays; None takes tracers too.
    """
    adapter = source if isinstance(source, Adapter) else Adapter(source)
    sides: dict[str, dict[str, Any]] = {}
    for path, leaf in _flat(to_tree(adapter.weights)):
        match = SIDE.fullmatch(path)
        if match is None:
            raise ConfigError(f"lora[{path!r}]: expected a pair (A, B) of a weight, by our names")
        if caller is not None:
            check_leaf(f"lora[{path!r}]", leaf, caller)
        sides.setdefault(match[1], {})["a" if match[2] else "b"] = leaf
    if not sides:
        raise ConfigError("lora has no weights")
    fused, parts = adapted_specs(config, EXTRA), targets(config, EXTRA)
    pairs: Pairs = {}
    for name, pair in sides.items():
        if missing := {"a", "b"} - pair.keys():
            raise ConfigError(f"lora[{name!r}] lacks its {missing.pop().upper()}")
        if name in parts:
            pairs[name] = shaped_pair(name, pair["a"], pair["b"], parts[name])
        elif name in fused:
            pairs |= _of_fused(name, pair["a"], pair["b"], fused[name])
        else:
            raise ConfigError(_unknown(name, config))
    return scale_pairs(pairs, adapter.scale)


def shaped_pair(name: str, a: Any, b: Any, target: Target) -> Pair:
    """Return a pair in the shapes of its part; inputs and outputs may be given as one axis."""
    outputs, inputs = target.sides
    return _shaped(name, a, b, outputs, inputs)


def scale_pairs(pairs: Pairs, scale: float) -> Pairs:
    """Return the pairs with every B multiplied by a number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ConfigError(f"scale={scale!r} of an adapter: must be a number")
    if scale == 1.0:
        return pairs
    factor = np.float32(scale)
    return {n: Pair(pair.a, pair.b.astype(np.float32) * factor) for n, pair in pairs.items()}


def merged(params: Params, lora: Any) -> Params:
    """Return Params of W + scale * B A in place of W: what an adapter stands for, differentiable in
    both.

    lora: an Adapter or a tree of pairs. Where it changes the embedding or the head of a model that
    ties them, they are two from then on.
    """
    config, pairs = params.config, pairs_of(lora, params.config)
    flat = dict(_flat(dict(params)))
    if config.tie_word_embeddings and not pairs.keys().isdisjoint((EMBEDDING, HEAD)):
        config = dataclasses.replace(config, tie_word_embeddings=False)
        flat[HEAD] = flat[EMBEDDING]
    parts = targets(config, EXTRA)
    for name, pair in pairs.items():
        target = parts[name]
        at = target.spec.at(target.spec.name)
        weight, place = flat[at], () if name == EMBEDDING else target.place
        changed = weight[place].astype(jnp.float32) + _product(name, pair)
        flat[at] = weight.at[place].set(changed.astype(weight.dtype))
    return Params(nest(flat), config, params.source)


def _product(name: str, pair: Pair) -> Array:
    """Return what a part's weight gains, f32."""
    a, b = (jnp.asarray(x, jnp.float32) for x in pair)
    if ".experts." in name:
        inputs, outputs = a.shape[1:], b.shape[:-1]
        a, b = (x.reshape(x.shape[0], inputs[0], -1) for x in (a, jnp.moveaxis(b, -1, 0)))
        return jnp.einsum("rxo,rxi->xoi", b, a).reshape(*outputs, *inputs[1:])
    delta = jnp.tensordot(b, a, axes=1)
    return delta.T if name == EMBEDDING else delta


def initial_lora(
    config: ModelConfig,
    rank: int,
    key: Array,
    *,
    parts: Iterable[str] = ("attention.q", "attention.k", "attention.v", "attention.out"),
    dtype: DTypeLike = jnp.float32,
) -> dict[str, Any]:
    """Return a tree of pairs to train from: A normal of deviation 1 / sqrt(inputs), B zeros, so
    that the model begins as it is. parts: names within a layer, "embed.weight" or "lm_head.weight".
    """
    parts, arrays = tuple(parts), {}
    every = targets(config, EXTRA)
    chosen = {n: t for n, t in every.items() if _short(t.part.name) in parts}
    if unknown := set(parts) - {_short(target.part.name) for target in chosen.values()}:
        raise ConfigError(f"parts={parts}: {min(unknown)!r} has no adapters in this model")
    for seed, (name, target) in zip(
        jax.random.split(key, len(chosen)), chosen.items(), strict=True
    ):
        outputs, inputs = target.sides
        a, count = jax.random.normal(seed, (rank, *inputs), dtype), math.prod(inputs)
        if name == EMBEDDING:
            count = 1
        elif ".experts." in name:
            count = inputs[-1]
        arrays[f"{name}.a"] = a * jnp.asarray(count**-0.5, dtype)
        arrays[f"{name}.b"] = jnp.zeros((*outputs, rank), dtype)
    return nest(arrays)


def _of_fused(name: str, a: Any, b: Any, spec: ParamSpec) -> Pairs:
    """Return one pair for a whole fused weight, as one for each of its parts."""
    outputs, inputs = (spec.shape_of(" ".join(side)) for side in spec.sides)
    pair = _shaped(name, a, b, outputs, inputs)
    return {spec.at(part.name): Pair(pair.a, pair.b[index]) for part, index in spec.places}


def _shaped(name: str, a: Any, b: Any, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> Pair:
    rank = a.shape[0] if a.ndim else 0
    wanted = {"A": (a, (rank, *inputs)), "B": (b, (*outputs, rank))}
    flat = {"A": (rank, math.prod(inputs)), "B": (math.prod(outputs), rank)}
    for side, (x, shape) in wanted.items():
        if rank < 1 or x.shape not in (shape, flat[side]):
            raise ConfigError(
                f"lora[{name!r}]: {side} is of shape {x.shape}; of rank {rank} it should be {shape}"
            )
    return Pair(a.reshape(rank, *inputs), b.reshape(*outputs, rank))


def _unknown(name: str, config: ModelConfig) -> str:
    if name in param_table(config):
        can = ", ".join((*ADAPTED, EMBEDDING, HEAD, *EXPERTS))
        return f"lora[{name!r}]: this weight cannot have an adapter; {can} can"
    known = sorted({_short(target.part.name) for target in targets(config).values()})
    return f"lora[{name!r}] is no weight of this model: a layer has {', '.join(known)}"


def _short(name: str) -> str:
    """Return a name within a layer."""
    return name.removeprefix("layers.{i}.")


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings and sequences by dotted path."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, child in tree.items():
        yield from _flat(child, f"{path}.{name}" if path else str(name))
