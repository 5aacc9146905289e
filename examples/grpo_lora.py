"""GRPO of an adapter alone, on the embedded model: `python examples/grpo_lora.py`.

The loop of grpo.py with the base weights frozen. What is trained is a tree of pairs (A, B), which
jpaged.generate takes as it is after every update: nothing is merged, nothing compiles, and the base
weights stay where they are. jpaged.score with and without the adapter gives how far it has moved
from the base, by the same engine.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
import optax
from grpo import COMPILED, PROMPTS, Settings, reward

import jpaged
from jpaged.demo import MODEL_PATH


def make_update(params: Any, optimizer: optax.GradientTransformation, settings: Settings) -> Any:
    """update(lora, state, arrays, advantages [B]) -> lora, state, loss. The trainer alone merges,
    inside its own differentiable forward.
    """

    def loss_of(lora: Any, arrays: Any, advantages: jax.Array) -> jax.Array:
        merged = jpaged.merged(params, lora)
        new = jpaged.logprobs(merged, arrays, temperature=settings.temperature)
        ratio = jax.numpy.exp(new - arrays["logprobs"])
        clipped = jax.numpy.clip(ratio, 1 - settings.clip, 1 + settings.clip)
        gain = jax.numpy.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        mask = arrays["completion_mask"]
        return -jax.numpy.sum(gain * mask) / jax.numpy.sum(mask)

    @jax.jit
    def update(lora: Any, state: Any, arrays: Any, advantages: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(lora, arrays, advantages)
        changes, state = optimizer.update(grads, state)
        return optax.apply_updates(lora, changes), state, loss

    return update


def train(settings: Settings, rank: int = 8) -> list[dict[str, float]]:
    """The loop; one record an update: mean reward, compiles, and the mean of log p(adapter) - log
    p(base) of what was sampled.
    """
    params = jpaged.load_params(MODEL_PATH, dtype="float32")
    tokenizer = jpaged.LLM(MODEL_PATH).tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    rows = len(prompts) * settings.samples
    engine = jpaged.EngineConfig(
        max_model_len=64,
        max_num_seqs=rows,
        seq_buckets=(-(-rows // 4), rows),
        max_loras=1,
        max_lora_rank=rank,
    )
    sampling = jpaged.SamplingParams(
        n=settings.samples,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        stop="\n",
        include_stop_str_in_output=True,
        logprobs_mode="tempered",
    )
    parts = [f"attention.{x}" for x in ("q", "k", "v", "out")]
    parts += [f"mlp.{x}" for x in ("gate", "up", "down")]
    lora = jpaged.initial_lora(params.config, rank, jax.random.key(settings.seed), parts=parts)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))
    state, update = optimizer.init(lora), make_update(params, optimizer, settings)
    sizes: Any = {
        "max_prompt_len": max(map(len, prompts)),
        "max_completion_len": settings.max_tokens,
    }
    how: Any = {"tokenizer": tokenizer, "engine_config": engine}
    compiles: list[str] = []

    def count(event: str, duration_secs: float, **about: Any) -> None:
        compiles.extend([str(about.get("fun_name"))] if event == COMPILED else [])

    jax.monitoring.register_event_duration_secs_listener(count)
    history = []
    for step in range(settings.updates):
        compiles.clear()
        began = time.perf_counter()
        outs = jpaged.generate(params, prompts, sampling, lora=lora, seed=step, **how)
        samples = [out.prompt_token_ids + c.token_ids for out in outs for c in out.outputs]
        scored = [jpaged.score(params, samples, lora=x, engine_config=engine) for x in (lora, None)]
        moved = np.mean([np.mean(a - b) for a, b in zip(*scored, strict=True)])
        texts = [(PROMPTS[i], c.text or "") for i, out in enumerate(outs) for c in out.outputs]
        rewards = np.array([reward(*text) for text in texts], np.float32).reshape(len(prompts), -1)
        spread = rewards.std(axis=1, keepdims=True) + 1e-4
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
        arrays = jpaged.to_arrays(outs, **sizes)
        lora, state, loss = update(lora, state, arrays, advantages.reshape(-1))
        record = {
            "update": step,
            "reward": float(rewards.mean()),
            "moved": float(moved),
            "loss": float(loss),
            "compiles": len(compiles),
            "seconds": time.perf_counter() - began,
        }
        history.append(record)
        if step % 5 == 0 or step == settings.updates - 1:
            print("  ".join(f"{name} {value:.3f}" for name, value in record.items()))
    jax.monitoring.unregister_event_duration_listener(count)
    jpaged.release(compiled=True)
    return history


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=Settings.updates)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    args = parser.parse_args(argv)
    asked = {"updates": args.updates, "learning_rate": args.learning_rate, "seed": args.seed}
    history = train(Settings(**asked), args.rank)
    edge = max(len(history) // 8, 1)
    first, last = (
        float(np.mean([x["reward"] for x in part])) for part in (history[:edge], history[-edge:])
    )
    print(f"mean reward of the first {edge} updates {first:.3f}, of the last {last:.3f}")
    return history


if __name__ == "__main__":
    main()
