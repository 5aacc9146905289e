"""Best of n by a reward model that is trained here: `python examples/reward_model.py`.

Samples of each prompt are labelled by Python's own parser. A head is fitted to what
`jpaged.pool` gives of them, the hidden state of the last token; with it, the embedded model is a
model of one label, as *ForSequenceClassification files are, and `jpaged.classify` rewards samples
that it has not seen. A table shows how often the sample that it prefers is Python, beside the
average sample, and beside the one that the language model finds likeliest; and how often it
prefers the better of two samples of a prompt, of which one is Python.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo import PROMPTS, reward

import jpaged
from jpaged.demo import MODEL_PATH

ENGINE = jpaged.EngineConfig(max_model_len=128, max_num_seqs=128, seq_buckets=(128,))


def sample(params: Any, prompts: list[str], n: int, seed: int) -> list[jpaged.RequestOutput]:
    """n completions of one line of every prompt."""
    sampling = jpaged.SamplingParams(n=n, max_tokens=24, stop="\n", include_stop_str_in_output=True)
    return jpaged.generate(params, prompts, sampling, engine_config=ENGINE, seed=seed)


def texts_of(outs: list[jpaged.RequestOutput]) -> list[list[int]]:
    """The tokens of every sample, its prompt before it."""
    return [[*out.prompt_token_ids, *c.token_ids] for out in outs for c in out.outputs]


def is_python(outs: list[jpaged.RequestOutput]) -> np.ndarray:
    """Whether each sample is, [prompts, n]."""
    good = [[reward(out.prompt or "", c.text or "") == 1 for c in out.outputs] for out in outs]
    return np.array(good)


def fit(states: np.ndarray, labels: np.ndarray, steps: int = 300) -> np.ndarray:
    """The head [1, E] by which a logistic regression tells the labels best."""
    x, y = jnp.asarray((states - states.mean(axis=0)) / states.std()), jnp.asarray(labels)
    optimizer = optax.adamw(0.01, weight_decay=0.1)

    def loss(head: jax.Array) -> jax.Array:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(x @ head, y))

    @jax.jit
    def step(head: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        changes, state = optimizer.update(jax.grad(loss)(head), state, head)
        return optax.apply_updates(head, changes), state

    head = jnp.zeros(x.shape[1])
    state = optimizer.init(head)
    for _ in range(steps):
        head, state = step(head, state)
    return np.asarray(head)[None] / states.std()


def with_head(params: jpaged.Params, head: np.ndarray) -> jpaged.Params:
    """The same model with a head of one label in place of its vocabulary."""
    config = dataclasses.replace(params.config, num_labels=1)
    weight = jnp.asarray(head, jax.tree.leaves(params)[0].dtype)
    return jpaged.Params({**params, "score": {"weight": weight}}, config, params.source)


def told_apart(rewards: np.ndarray, good: np.ndarray) -> float:
    """The share of pairs of a good and a bad sample of a prompt in which the good one has more."""
    pairs = [r[g][:, None] > r[~g][None] for r, g in zip(rewards, good, strict=True)]
    return float(np.concatenate([pair.reshape(-1) for pair in pairs]).mean())


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=16, help="samples of each prompt (default: 16)")
    parser.add_argument("--labelled", type=int, default=128, help="and those that are labelled")
    args = parser.parse_args(argv)
    params = jpaged.load_params(MODEL_PATH)
    known = sample(params, list(PROMPTS), args.labelled, seed=0)
    states = np.stack(jpaged.pool(params, texts_of(known), engine_config=ENGINE))
    reward_model = with_head(params, fit(states, is_python(known).reshape(-1).astype(np.float32)))
    fresh = sample(params, list(PROMPTS), args.n, seed=1)
    good, rows = is_python(fresh), np.arange(len(fresh))
    rewards = jpaged.classify(reward_model, texts_of(fresh), engine_config=ENGINE)
    rewards = rewards.reshape(good.shape)
    likely = np.array([[c.token_logprobs.mean() for c in out.outputs] for out in fresh])
    passed = {
        "an average sample": float(good.mean()),
        "the likeliest": float(good[rows, likely.argmax(axis=1)].mean()),
        "by the reward model": float(good[rows, rewards.argmax(axis=1)].mean()),
        "pairs told apart": told_apart(rewards, good),
    }
    for name, share in passed.items():
        print(f"{name:20s} {share:6.1%}")
    return passed


if __name__ == "__main__":
    main()
