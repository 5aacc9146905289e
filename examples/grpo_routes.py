"""GRPO of a mixture of experts whose trainer takes the experts that the rollout took:
`python examples/grpo_routes.py`.

A rollout and a trainer sum in different orders, and in bfloat16 a router's two best scores are
often so close that the sums decide which expert a token takes. Then the two have different
probabilities for the same weights, and a clipped ratio starts from another number than 1. With
`routed_experts=True` outputs say which experts each token took, and `jpaged.logprobs(routed=True)`
takes these; how they are weighed, and the gradient, are the router's as it is now
(docs/rollouts.md). The mixture has random weights and learns which tokens are even. Each line has
the mean distance of the ratio from 1 before the update, with the routes and without.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpaged
from jpaged.models.params import random_params

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "eos_token_id": 63,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}
PROMPTS = [[3 * i + 1, 2 * i + 5, i + 9] for i in range(8)]
SAMPLES, TOKENS = 8, 16


def reward(tokens: list[int]) -> float:
    """The share of even tokens."""
    return float(np.mean([token % 2 == 0 for token in tokens]))


@jax.jit
def mismatch(params: Any, arrays: Any) -> tuple[jax.Array, jax.Array]:
    """How far from 1 the ratio of probabilities is, with the rollout's routes and without."""
    drawn = arrays["completion_mask"]

    def distance(routed: bool) -> jax.Array:
        new = jpaged.logprobs(params, arrays, routed=routed)
        away = jnp.abs(jnp.exp(new - arrays["logprobs"]) - 1)
        return jnp.sum(away * drawn) / jnp.sum(drawn)

    return distance(True), distance(False)


def make_update(optimizer: optax.GradientTransformation) -> Any:
    """update(params, state, arrays, advantages [B]) -> params, state."""

    def loss_of(params: Any, arrays: Any, advantages: jax.Array) -> jax.Array:
        new = jpaged.logprobs(params, arrays, routed=True)
        ratio = jnp.exp(new - arrays["logprobs"])
        gain = jnp.minimum(
            ratio * advantages[:, None], jnp.clip(ratio, 0.8, 1.2) * advantages[:, None]
        )
        return -jnp.sum(gain * arrays["completion_mask"]) / jnp.sum(arrays["completion_mask"])

    @jax.jit
    def update(params: Any, state: Any, arrays: Any, advantages: jax.Array) -> tuple[Any, Any]:
        changes, state = optimizer.update(jax.grad(loss_of)(params, arrays, advantages), state)
        return optax.apply_updates(params, changes), state

    return update


def train(updates: int, *, seed: int = 0) -> list[dict[str, float]]:
    """The loop; one record an update."""
    config = jpaged.ModelConfig.from_hf(MODEL)
    params: Any = random_params(config, dtype="bfloat16", seed=seed)
    # As far apart as those of a trained model: what experts give is no small part of a state.
    params = jax.tree.map(lambda x: x * jnp.asarray(8, x.dtype) if x.ndim > 1 else x, params)
    engine = jpaged.EngineConfig(routed_experts=True, max_num_seqs=64, seq_buckets=(64,))
    sampling = jpaged.SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True)
    optimizer = optax.adam(3e-3)
    state, update = optimizer.init(params), make_update(optimizer)
    history = []
    for step in range(updates):
        outs = jpaged.generate(
            params, PROMPTS, sampling, engine_config=engine, seed=step, use_tqdm=False
        )
        arrays = jpaged.to_arrays(outs, max_prompt_len=3, max_completion_len=TOKENS)
        rewards = np.array([[reward(c.token_ids) for c in out.outputs] for out in outs])
        with_routes, without = mismatch(params, arrays)
        away = rewards - rewards.mean(axis=1, keepdims=True)
        advantages = (away / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)
        params, state = update(params, state, arrays, advantages.reshape(-1))
        record = {"update": step, "reward": float(rewards.mean())}
        history.append(record | {"routes": float(with_routes), "no_routes": float(without)})
    return history


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=20)
    history = train(parser.parse_args(argv).updates)
    for record in history[:: max(len(history) // 10, 1)]:
        print(
            "update {update:3d}  reward {reward:.3f}  |ratio - 1| with routes {routes:.4f}, "
            "without {no_routes:.4f}".format(**record)
        )
    return history


if __name__ == "__main__":
    main()
