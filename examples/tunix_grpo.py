"""tunix's GRPO learner with its own sampler and with jpaged as its rollout engine: rewards over
seeds, throughput.

    python examples/tunix_grpo.py [--seeds 5] [--steps 30]    # where jpaged[clients] is installed

A random Qwen3 of a million parameters learns, on CPU, to write digits (the reward is their share of
the completion). "one key" is tunix as it comes, which draws from one key in every call and so
learns slower; "tunix" has a new key each call, as jpaged does. Exit status 1 if the reward does not
rise with both, if the 95% intervals of the last rewards do not overlap, or if jpaged makes less
than twice its sampler's tokens a second. Weights are new in each call that is timed, as in
training.
"""

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jpaged.integrations.tunix import JPagedRollout

# pyright: reportMissingImports=false
# isort: split
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

PROMPTS = ("1+1=", "count: ", "a9b8c", "the year is ")
CHARACTERS = [chr(32 + i) for i in range(95)]
EOS, PAD = 95, 96
GENERATIONS = 8
# Student's t of n samples, both sides.
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}


class OwnSampler(VanillaRollout):
    """tunix's own sampler with a new key each call. Without a seed it draws from one key for
    ever.
    """

    def __init__(
        self, *, rollout_actor: Qwen3, tokenizer: Any, mesh: Mesh, rollout_config: RolloutConfig
    ):
        c = rollout_actor.config
        cache = CacheConfig(rollout_config.kv_cache_size, c.num_layers, c.num_kv_heads, c.head_dim)
        super().__init__(rollout_actor, tokenizer, cache)
        self.calls = 0

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> Any:
        self.calls += 1
        seeded = dataclasses.replace(rollout_config, seed=jax.random.PRNGKey(self.calls))
        return super().generate(prompts, seeded, **kwargs)


ENGINES: dict[str, Any] = {"tunix": OwnSampler, "jpaged": JPagedRollout}


@dataclasses.dataclass(frozen=True)
class Run:
    """Mean reward of each step of one training run."""

    rewards: list[float]

    @property
    def first(self) -> float:
        return statistics.fmean(self.rewards[:3])

    @property
    def last(self) -> float:
        return statistics.fmean(self.rewards[-3:])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, EOS and padding."""
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)} | {"<eos>": EOS, "<pad>": PAD}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def make_model(seed: int, **sizes: Any) -> Qwen3:
    """A Qwen3 of random weights; sizes: what differs from a model of a million parameters."""
    defaults = {
        "num_layers": 4,
        "embed_dim": 128,
        "hidden_dim": 384,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    config = ModelConfig(vocab_size=97, rope_theta=1_000_000, norm_eps=1e-6, **(defaults | sizes))
    model = Qwen3(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)

    def draw(
        x: jax.Array,
    ) -> jax.Array:  # its own initial MLP is all zeros, which no gradient leaves
        return (
            x
            if x.ndim == 1
            else jnp.asarray(rng.standard_normal(x.shape) / math.sqrt(x.shape[0]), x.dtype)
        )

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def share_of_digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / len(completion) if completion else 0.0


def make_cluster(
    engine: Any,
    model: Qwen3,
    *,
    max_steps: int = 1,
    rollout: RolloutConfig | None = None,
    mesh: Mesh | None = None,
    rollout_mesh: Mesh | None = None,
) -> rl_cluster.RLCluster:
    """A cluster with actor and rollout on one mesh, of one device, or on two."""
    mesh = make_mesh() if mesh is None else mesh
    roles = dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE), mesh)
    roles[rl_cluster.Role.ROLLOUT] = mesh if rollout_mesh is None else rollout_mesh
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(3e-3),
        eval_every_n_steps=10**9,
        max_steps=max_steps,
        mini_batch_size=len(PROMPTS),
        train_micro_batch_size=len(PROMPTS),
        pbar_description=None,
    )
    default = RolloutConfig(
        max_tokens_to_generate=24, max_prompt_length=16, kv_cache_size=64, temperature=1.0
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh=roles,
        rollout_engine=engine,
        training_config=training,
        rollout_config=default if rollout is None else rollout,
    )
    return rl_cluster.RLCluster(actor=model, tokenizer=make_tokenizer(), cluster_config=config)


def train(engine: Any, seed: int, steps: int, **sizes: int) -> Run:
    """GRPO of `steps` steps, each of two updates over 8 completions of 4 prompts."""
    rewards: list[float] = []

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        scores = [share_of_digits(completion) for completion in completions]
        rewards.append(statistics.fmean(scores))
        return scores

    cluster = make_cluster(engine, make_model(seed, **sizes), max_steps=2 * steps)
    how = GRPOConfig(num_generations=GENERATIONS, num_iterations=2, beta=0.0)
    GRPOLearner(rl_cluster=cluster, algo_config=how, reward_fns=reward).train(
        [{"prompts": np.array(PROMPTS)}] * steps
    )
    return Run(rewards)


def throughput(*, rows: int = 128, max_tokens: int = 128, rounds: int = 6) -> dict[str, float]:
    """Tokens a second of each engine, best of the rounds after the first; completions end by EOS or
    max_tokens.
    """
    config = RolloutConfig(
        max_tokens_to_generate=max_tokens, max_prompt_length=16, kv_cache_size=256, temperature=1.0
    )
    clusters = {
        name: make_cluster(engine, make_model(0), rollout=config)
        for name, engine in ENGINES.items()
    }
    prompts = [prompt for prompt in PROMPTS for _ in range(rows // len(PROMPTS))]
    rates: dict[str, list[float]] = {name: [] for name in clusters}
    for _ in range(rounds):  # in turn, so that both see the same machine
        for name, cluster in clusters.items():
            model = cluster.actor_trainer.model
            nnx.update(
                model,
                jax.block_until_ready(jax.tree.map(lambda x: x + 0, nnx.state(model, nnx.Param))),
            )
            cluster.rollout.update_params(nnx.state(model, nnx.Param))
            began = time.perf_counter()
            out = cluster.generate(prompts)
            rates[name].append(
                sum(len(tokens) for tokens in out.tokens) / (time.perf_counter() - began)
            )
    return {name: max(measured[1:]) for name, measured in rates.items()}


def interval(values: list[float]) -> tuple[float, float]:
    """The 95% confidence interval of the mean."""
    mean = statistics.fmean(values)
    half = T_95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    rates = throughput()
    runs: dict[str, list[Run]] = {}
    print(f"{'engine':<8}{'seed':>5}{'first':>8}{'last':>8}")
    for name, engine in {**ENGINES, "one key": "vanilla"}.items():
        runs[name] = []
        for seed in range(args.seeds):
            run = train(engine, seed, args.steps)
            runs[name].append(run)
            print(f"{name:<8}{seed:>5}{run.first:>8.3f}{run.last:>8.3f}", flush=True)
    spans = {name: interval([run.last for run in trained]) for name, trained in runs.items()}
    for name, (low, high) in spans.items():
        print(f"{name}: last reward {low:.3f} to {high:.3f} (95%)")
    for name, rate in rates.items():
        print(f"{name}: {rate:,.0f} tokens/s")
    ratio = rates["jpaged"] / rates["tunix"]
    print(f"throughput: {ratio:.2f} times")
    failed = [
        f"{name}: the reward does not rise"
        for name, t in runs.items()
        if any(r.last <= r.first for r in t)
    ]
    failed += (
        ["the intervals do not overlap"] if not overlap(spans["tunix"], spans["jpaged"]) else []
    )
    failed += ["less than twice the throughput"] if ratio < 2 else []
    print("\n".join(failed) or "ok", file=sys.stderr if failed else sys.stdout)
    return int(bool(failed))


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


if __name__ == "__main__":
    sys.exit(main())
