"""Reinforcement learning on an embedded model, with jpaged.generate inside the loop: `python
examples/grpo.py`, and with `--model jpaged-demo-hybrid` on the one with recurrent layers.

GRPO (arXiv:2402.03300): a few samples of each prompt, each rewarded by a rule that a program
checks, advantages relative to the group, and one clipped policy-gradient update by optax. Here a
completion of a line of Python is worth 1 if the code parses and 0 if not, and half where the model
never came to an end of line. Everything that jax compiles is compiled in the first iteration:
prompts differ in length and weights in every update, shapes do not.
"""

import argparse
import ast
import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpaged
from jpaged.demo import MODEL_PATH

PROMPTS = (
    "def area(width, height):\n    return ",
    "def is_empty(self):\n    return ",
    "class Stack:\n    def __init__(self):\n        self.items = ",
    "def read(path):\n    with open(path",
    "import os\n\ndef size(name):\n    return os.",
    "def double(x):\n    y = ",
    "for name in ",
    "def first(items):\n    if ",
    "try:\n    value = int(text)\nexcept ",
    "print(",
    "names = [",
    "def get(self, key, default=None):\n    return ",
    "assert ",
    "def join(a, b):\n    return '%s' % ",
    "x = {",
    "while ",
)
COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Shapes and rates of a run."""

    updates: int = 40
    samples: int = 8  # of each prompt: a group
    max_tokens: int = 24
    temperature: float = 1.0
    learning_rate: float = 1e-4
    clip: float = 0.2  # of the ratio of new to old probability
    seed: int = 0


def reward(prompt: str, completion: str) -> float:
    """1 if the prompt's line, as completed, is Python (a header may lack its body), 0 if not, 0.5
    if it never ended.
    """
    if "\n" not in completion:
        return 0.5
    code = prompt + completion.split("\n")[0]
    return float(parses(code) or parses(code + "\n" + " " * 12 + "pass"))


def parses(code: str) -> bool:
    """Whether it is Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the model's strings have odd escapes
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return False
    return True


def make_update(optimizer: optax.GradientTransformation, settings: Settings) -> Any:
    """update(params, state, arrays, advantages [B]) -> params, state, loss; one compile for all of
    a run.
    """

    def loss_of(params: Any, arrays: Any, advantages: jax.Array) -> jax.Array:
        new = jpaged.logprobs(params, arrays, temperature=settings.temperature)
        ratio = jnp.exp(new - arrays["logprobs"])
        clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
        gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -jnp.sum(gain * arrays["completion_mask"]) / jnp.sum(arrays["completion_mask"])

    @jax.jit
    def update(
        params: Any, state: Any, arrays: Any, advantages: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, arrays, advantages)
        changes, state = optimizer.update(grads, state)
        return optax.apply_updates(params, changes), state, loss

    return update


def train(settings: Settings, model: str | Path = MODEL_PATH) -> list[dict[str, float]]:
    """The loop; one record an update: mean reward, seconds of its parts, compiles. model: a folder
    or a name; weights in 8 bits are trained as the plain ones that they stand for.
    """
    params, tokenizer = (
        jpaged.load_params(model, dtype="float32", dequantize=True),
        jpaged.LLM(model).tokenizer,
    )
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, prompts))
    rows = len(prompts) * settings.samples
    engine = jpaged.EngineConfig(
        max_model_len=64, max_num_seqs=rows, seq_buckets=(-(-rows // 4), rows)
    )
    sampling = jpaged.SamplingParams(
        n=settings.samples,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        stop="\n",
        include_stop_str_in_output=True,
        logprobs_mode="tempered",
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))
    state, update = optimizer.init(params), make_update(optimizer, settings)  # pyright: ignore[reportArgumentType]
    compiles: list[str] = []

    def count(event: str, duration_secs: float, **about: Any) -> None:
        compiles.extend([str(about.get("fun_name"))] if event == COMPILED else [])

    jax.monitoring.register_event_duration_secs_listener(count)
    history = []
    for step in range(settings.updates):
        compiles.clear()
        began = time.perf_counter()
        outs = jpaged.generate(
            params, prompts, sampling, tokenizer=tokenizer, engine_config=engine, seed=step
        )
        generated = time.perf_counter()
        arrays = jpaged.to_arrays(
            outs, max_prompt_len=longest, max_completion_len=settings.max_tokens
        )
        texts = [(PROMPTS[i], c.text or "") for i, out in enumerate(outs) for c in out.outputs]
        rewards = np.array([reward(*text) for text in texts], np.float32).reshape(len(prompts), -1)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (
            rewards.std(axis=1, keepdims=True) + 1e-4
        )
        params, state, loss = update(params, state, arrays, advantages.reshape(-1))
        jax.block_until_ready(loss)
        record = {
            "update": step,
            "reward": float(rewards.mean()),
            "loss": float(loss),
            "compiles": len(compiles),
        }
        record |= {"generate_s": generated - began, "update_s": time.perf_counter() - generated}
        history.append(record)
        if step % 5 == 0 or step == settings.updates - 1:
            print(
                "  ".join(
                    f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v:3d}"
                    for k, v in record.items()
                )
            )
    jax.monitoring.unregister_event_duration_listener(count)
    jpaged.release(compiled=True)
    return history


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Mean reward an update, and its mean over five."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rewards = np.array([record["reward"] for record in history])
    window = min(5, len(rewards))
    smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(rewards, color="tab:blue", alpha=0.35, label="each update")
    axes.plot(
        np.arange(window - 1, len(rewards)), smooth, color="tab:blue", label=f"mean of {window}"
    )
    axes.set(
        xlabel="update",
        ylabel="mean reward (1: the line parses)",
        title="GRPO on the embedded model",
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODEL_PATH), help="folder or name of another model")
    parser.add_argument("--updates", type=int, default=Settings.updates)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--plot", type=Path, help="write the rewards' curve here (needs matplotlib)"
    )
    parser.add_argument("--json", type=Path, help="write one record an update here")
    args = parser.parse_args(argv)
    history = train(Settings(updates=args.updates, seed=args.seed), args.model)
    edge = max(len(history) // 8, 1)
    means = [
        float(np.mean([record["reward"] for record in part]))
        for part in (history[:edge], history[-edge:])
    ]
    print(f"mean reward of the first {edge} updates {means[0]:.3f}, of the last {means[1]:.3f}")
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in history))
    if args.plot:
        plot(history, args.plot)
    return history


if __name__ == "__main__":
    main()
