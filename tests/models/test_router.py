"""The router of experts against its definition, written apart in numpy: float64, sorted, one token
at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import ConfigError
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.router import RouterConfig, route

X, A, T = 12, 3, 40
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalized": {"normalized": True},
    "sigmoid": {"score": "sigmoid", "normalized": True, "eps": 1e-20, "scale": 2.5},
    "chosen by a bias": {"score": "sigmoid", "has_bias": True, "normalized": True},
    "groups": {"score": "sigmoid", "has_bias": True, "num_groups": 4, "chosen_groups": 2},
    "one group": {"num_groups": 3, "chosen_groups": 1, "normalized": True, "eps": 0.5},
    "least sum": {"has_bias": True, "normalized": True, "least_sum": 0.6},
    "root of softplus": {"score": "sqrt_softplus", "has_bias": True, "normalized": True},
}


routed = jax.jit(route, static_argnums=(0, 3))


def expected(
    config: RouterConfig, logits: np.ndarray, bias: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """One token's experts, the best first, and their weights."""
    if config.score == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    elif config.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.sqrt(np.log1p(np.exp(logits)))
    choosing = scores + bias if config.has_bias else scores
    size = X // config.num_groups
    groups = [sorted(choosing[g * size : (g + 1) * size])[::-1] for g in range(config.num_groups)]
    best = sorted(range(config.num_groups), key=lambda g: (-sum(groups[g][:2]), g))
    allowed = best[: config.chosen_groups] if config.num_groups > 1 else [0]
    candidates = [x for x in range(X) if x // size in allowed]
    chosen = sorted(candidates, key=lambda x: (-choosing[x], x))[:A]
    weights = scores[chosen]
    if config.normalized:
        weights = weights / max(weights.sum() + config.eps, config.least_sum)
    return chosen, weights * config.scale


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_definition(name: str) -> None:
    config, rng = RouterConfig(**CONFIGS[name]), np.random.default_rng(3)
    logits = (2 * rng.standard_normal((T, X))).astype(np.float32)
    bias = (0.3 * rng.standard_normal(X)).astype(np.float32)
    of_config = jnp.asarray(bias) if config.has_bias else None
    chosen, weights = map(np.asarray, routed(config, jnp.asarray(logits), of_config, A))
    for row in range(len(logits)):
        experts, wanted = expected(config, logits[row].astype(np.float64), bias.astype(np.float64))
        assert chosen[row].tolist() == experts
        np.testing.assert_allclose(weights[row], wanted, rtol=2e-6)


@pytest.mark.parametrize("name", ["plain", "chosen by a bias", "groups"])
def test_the_first_of_equals_is_taken(name: str) -> None:
    """All experts score the same, and so do all groups."""
    config = RouterConfig(**CONFIGS[name])
    bias = jnp.zeros(X) if config.has_bias else None
    tied = np.zeros((T, X), np.float32)
    tied[1:, 5:] = 1.0  # of groups of 3: the last two are wholly of the best, one has but one
    chosen, _ = routed(config, jnp.asarray(tied), bias, A)
    assert np.asarray(chosen)[0].tolist() == [0, 1, 2]
    rest = [6, 7, 8] if name == "groups" else [5, 6, 7]
    assert np.asarray(chosen)[1:].tolist() == [rest] * (T - 1)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    config = RouterConfig(score="sigmoid", has_bias=True)
    bias = jnp.asarray(np.where(np.arange(X) == 7, 100.0, 0.0), jnp.float32)
    chosen, weights = routed(config, jnp.zeros((1, X)), bias, 1)
    assert int(chosen[0, 0]) == 7 and float(weights[0, 0]) == 0.5


@pytest.mark.parametrize(
    ("router", "said"),
    [
        ({"num_groups": 5}, "n_group=5 does not divide 12 experts"),
        ({"num_groups": 12, "chosen_groups": 4}, "n_group=12 of 12 experts: two a group"),
        ({"num_groups": 2, "chosen_groups": 3}, "topk_group=3 of n_group=2"),
        ({"num_groups": 6, "chosen_groups": 1}, "experts_per_token=3 of 2 experts in topk_group=1"),
        ({"scale": 0.0}, r"routed_scaling_factor=0\.0"),
        ({"eps": -1.0}, r"eps=-1\.0"),
        ({"least_sum": float("nan")}, "least_sum=nan"),
    ],
)
def test_refusals(router: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ExpertsConfig(
            num_experts=X, experts_per_token=A, expert_size=4, router=RouterConfig(**router)
        )
