"""tunix's agentic learner through JPagedRollout: sixteen threads ask at once, their calls join one
batch, and the policy learns.
"""

import functools
import statistics
import threading
from typing import Any

import numpy as np
import pytest
from tunix.rl.agentic.agentic_grpo_learner import (  # pyright: ignore[reportMissingImports]
    GRPOConfig,
    GRPOLearner,
)
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]

import jpaged
from examples import tunix_grpo as grpo
from jpaged.integrations.tunix import JPagedRollout
from tests.clients.test_tunix import DEPRECATED, ENGINE, SIZES

pytestmark = [
    pytest.mark.clients,
    *(pytest.mark.filterwarnings(f"ignore:{x}:DeprecationWarning") for x in DEPRECATED),
]
STEPS, GENERATIONS = 20, 8
ROLLOUT = RolloutConfig(
    max_tokens_to_generate=24,
    max_prompt_length=16,
    kv_cache_size=64,
    temperature=1.0,
    return_logprobs=True,
    # Fifteen signs end a turn too: tunix 0.1.7 drops one that is as long as it may be.
    eos_tokens=[grpo.EOS, *range(1, 16)],
)


class Chat:
    """As tunix's chat parsers: the contents of messages, one after the other."""

    assistant_token = ""

    def parse(self, messages: Any, add_generation_prompt: Any = 0, is_first_msg: Any = 0) -> str:
        # The content of a user's message is the task's array of one prompt.
        return "".join(str(np.ravel(message["content"])[0]) for message in messages)

    def update_assistant_end_tokens(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        return tokens, 0


def test_it_learns_at_concurrency_16(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards: list[float] = []
    lock, asking, most = threading.Lock(), 0, 0
    generate = JPagedRollout.generate

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal asking, most
        with lock:
            asking += 1
            most = max(most, asking)
        try:
            return generate(self, *args, **kwargs)
        finally:
            with lock:
                asking -= 1

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        scores = [grpo.share_of_digits(completion) for completion in completions]
        with lock:
            rewards.extend(scores)
        return scores

    monkeypatch.setattr(JPagedRollout, "generate", counted)

    engine = functools.partial(JPagedRollout, engine_config=ENGINE)
    cluster = grpo.make_cluster(
        engine, grpo.make_model(0, **SIZES), max_steps=STEPS, rollout=ROLLOUT
    )
    config = GRPOConfig(
        num_generations=GENERATIONS,
        num_iterations=1,
        beta=0.0,
        max_response_length=ROLLOUT.max_tokens_to_generate,
        max_concurrency=16,
    )
    learner = GRPOLearner(
        rl_cluster=cluster, algo_config=config, reward_fns=reward, chat_parser=Chat()
    )
    learner.train([{"prompts": np.array(grpo.PROMPTS)}] * STEPS)
    size = len(grpo.PROMPTS) * GENERATIONS
    assert len(rewards) == STEPS * size
    first, last = (statistics.fmean(x) for x in (rewards[: 3 * size], rewards[-3 * size :]))
    assert last > first + 0.15, (first, last)
    assert most >= 12, f"{most} threads asked at once"
    jpaged.release(compiled=True)
