"""The form in which several devices serve a model: one that divides, with equal results.

A model of K KV heads with G query heads each is also one of K * r KV heads with G / r query heads
each, of which r neighbours are equal; and a vocabulary may end in tokens that never come. So a mesh
serves a model of a config of its own, made from the canonical parameters once a weight version.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.params import SPLIT, ParamSpec

VOCAB_TILE = 128  # tokens that are drawn together; no tile lies on two devices


def served_config(model: ModelConfig, devices: int) -> ModelConfig:
    """What so many devices of a tensor axis serve: KV heads repeated and the vocabulary padded to
    whole tiles until both divide; the model itself on one. ConfigError where heads cannot divide.
    """
    if devices == 1:
        return model
    heads, kv_heads, vocab = model.num_heads, model.num_kv_heads, model.vocab_size
    if kv_heads % devices:
        if devices % kv_heads or heads % devices:
            raise ConfigError(
                f"num_heads={heads} and num_kv_heads={kv_heads} do not split over {devices} "
                "devices: take a number that divides one and is divided by or divides the other"
            )
        kv_heads = devices
    tiles = -(-vocab // (VOCAB_TILE * devices)) * devices
    return dataclasses.replace(model, num_kv_heads=kv_heads, vocab_size=tiles * VOCAB_TILE)


def share_of(model: ModelConfig, devices: int) -> ModelConfig:
    """What each of so many devices has, as a model: what a bound on its memory takes."""
    if devices == 1:
        return model
    served = served_config(model, devices)
    widths = ("intermediate_size", "expert_size", "shared_expert_size")
    whole = {name: getattr(served, name) for name in widths}
    shares = {name: n if n % devices else n // devices for name, n in whole.items()}
    return dataclasses.replace(
        served,
        num_heads=served.num_heads // devices,
        num_kv_heads=served.num_kv_heads // devices,
        vocab_size=served.vocab_size // devices,
        **shares,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """From a canonical parameter to the served one; compared by value, so that a compiled function
    of one serves the next version too.

    axes: as ParamSpec spells them. repeats: how often each KV head is held. rows: of padding after
    the vocabulary. dtype: what it is cast to.
    """

    axes: tuple[str, ...]
    dtype: str
    repeats: int = 1
    rows: int = 0

    @classmethod
    def of(cls, spec: ParamSpec, model: ModelConfig, served: ModelConfig, dtype: Any) -> "Change":
        """Of one parameter of a model."""
        letter = SPLIT.get(spec.sharding or "")
        return cls(
            axes=tuple(spec.axes.replace(",", " ").split()),
            dtype=str(jnp.dtype(dtype)),
            repeats=served.num_kv_heads // model.num_kv_heads if letter == "K" else 1,
            rows=served.vocab_size - model.vocab_size if letter == "V" else 0,
        )

    def is_needed(self, leaf: Any) -> bool:
        """Whether it changes anything."""
        return self.repeats > 1 or self.rows > 0 or str(leaf.dtype) != self.dtype

    def __call__(self, leaf: Any) -> Any:
        """The served parameter: a numpy array of a numpy array, a jax one of a jax one."""
        xp = jnp if isinstance(leaf, jax.Array) else np
        out = leaf.astype(self.dtype)
        if self.repeats > 1:
            out = self._repeated(out, xp)
        if self.rows:
            at = self.axes.index("V")
            widths = [(0, self.rows if i == at else 0) for i in range(out.ndim)]
            out = xp.pad(out, widths)
        return out

    def _repeated(self, x: Any, xp: Any) -> Any:
        """Each KV head several times over, its query heads dealt out to the copies in order."""
        at = self.axes.index("K")
        group, _, others = self.axes[at + 1].partition("+")
        if group != "G":
            return xp.repeat(x, self.repeats, axis=at)
        num_query = x.shape[at + 1] - int(others or 0)
        q, kv = xp.split(x, [num_query], axis=at + 1)
        dealt = (x.shape[at] * self.repeats, num_query // self.repeats)
        q = q.reshape(*x.shape[:at], *dealt, *x.shape[at + 2 :])
        return xp.concatenate([q, xp.repeat(kv, self.repeats, axis=at)], axis=at + 1)
