"""The router of a mixture of experts: from a token's scores to its experts and their weights."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jpaged.checks import at_least, positive
from jpaged.errors import ConfigError
from jpaged.models.layers.arithmetic import Apply, apply_by_xla, sum_of_last
from jpaged.models.layers.norm import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How experts are chosen and weighed.

    score: what the logits of all experts become: their softmax, the sigmoid of each, or the root of
    the softplus of each. has_bias: a parameter is added to the scores where experts are chosen, and
    not where they are weighed. num_groups: neighbouring experts are in one group; experts are
    chosen out of the chosen_groups whose two best scores have the highest sums. normalized: the
    weights of a token's experts are divided by their sum, to which eps is added and which is
    least_sum at least. scale: a factor on all weights. norm: what the router sees is normed, with a
    scale, and divided by the root of its width. has_expert_scales: the weight of each expert is
    multiplied by a parameter.
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    normalized: bool = False
    eps: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    norm: NormConfig | None = None
    has_expert_scales: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "num_groups", "chosen_groups")
        positive(routed_scaling_factor=self.scale)
        for name in ("eps", "least_sum"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name}={value!r} of a router: must be a number of at least 0")
        if self.chosen_groups > self.num_groups:
            raise ConfigError(f"topk_group={self.chosen_groups} of n_group={self.num_groups}")

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """ConfigError unless so many experts can be chosen out of so many."""
        if num_experts % self.num_groups:
            raise ConfigError(f"n_group={self.num_groups} does not divide {num_experts} experts")
        size = num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            raise ConfigError(f"n_group={self.num_groups} of {num_experts} experts: two a group")
        if experts_per_token > size * self.chosen_groups:
            raise ConfigError(
                f"experts_per_token={experts_per_token} of {size * self.chosen_groups} experts in "
                f"topk_group={self.chosen_groups} groups"
            )


PLAIN_ROUTER = RouterConfig()


def route(
    config: RouterConfig,
    logits_TX: Array,
    bias_X: Array | None,
    experts_per_token: int,
    forced_TA: Array | None = None,
    apply: Apply = apply_by_xla,
) -> tuple[Array, Array]:
    """Return the experts of each token, int32 [T, A], and their weights, f32 [T, A].

    logits_TX: f32. forced_TA: int32, the experts that a token takes whatever their scores are,
    which weigh them; -1 where it chooses. bias_X: of config.has_bias. apply: what computes
    functions. Of equal scores, of experts and of groups, that of the lowest index is taken;
    transformers leaves open which.
    """
    scores_TX = _scores(config, logits_TX, apply)
    choosing_TX = scores_TX
    if bias_X is not None:
        choosing_TX = scores_TX + bias_X.astype(jnp.float32)[None, :]
    if config.num_groups > 1:
        choosing_TX = _in_best_groups(config, choosing_TX)
    weight_TA, chosen_TA = jax.lax.top_k(choosing_TX, experts_per_token)
    if forced_TA is not None:
        chosen_TA = jnp.where(forced_TA >= 0, forced_TA, chosen_TA)
    if bias_X is not None or forced_TA is not None:
        weight_TA = jnp.take_along_axis(scores_TX, chosen_TA, axis=-1)
    if config.normalized:
        total_T1 = sum_of_last(weight_TA) + jnp.float32(config.eps)
        weight_TA = weight_TA / jnp.maximum(total_T1, jnp.float32(config.least_sum))
    if config.scale != 1.0:
        weight_TA = weight_TA * jnp.float32(config.scale)
    return chosen_TA, weight_TA


def _scores(config: RouterConfig, logits_TX: Array, apply: Apply) -> Array:
    if config.score == "softmax":
        most_T1 = jax.lax.stop_gradient(jnp.max(logits_TX, axis=-1, keepdims=True))
        scores_TX = apply("exp", logits_TX - most_T1)
        return scores_TX / sum_of_last(scores_TX)
    if config.score == "sigmoid":
        return apply("sigmoid", logits_TX)
    return jnp.sqrt(apply("softplus", logits_TX))


def _in_best_groups(config: RouterConfig, scores_TX: Array) -> Array:
    """Return the scores with those of other groups than the best ones at -inf."""
    groups_TNX = scores_TX.reshape(*scores_TX.shape[:-1], config.num_groups, -1)
    best_TN = jnp.sum(jax.lax.top_k(groups_TNX, 2)[0], axis=-1)
    _, taken = jax.lax.top_k(best_TN, config.chosen_groups)
    is_taken_TN = jnp.any(jax.nn.one_hot(taken, config.num_groups, dtype=jnp.bool_), axis=-2)
    return jnp.where(is_taken_TN[..., None], groups_TNX, -jnp.inf).reshape(scores_TX.shape)
