"""JPagedSampler under tunix's rollout manager and worker: requests with controls of their own in
one batch, weights in two steps, errors that reach the trajectory.

google-tunix has tunix.experimental.rollout from 0.1.8 on; with the source of one that has it:
PYTHONPATH=/path/to/tunix make test-clients
"""

import asyncio
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.experimental.common import datatypes  # pyright: ignore[reportMissingImports]
from tunix.experimental.rollout import sampler as protocol  # pyright: ignore[reportMissingImports]
from tunix.experimental.rollout.manager import RolloutManager  # pyright: ignore[reportMissingImports]
from tunix.experimental.rollout.vanilla_sampler_adapter import (  # pyright: ignore[reportMissingImports]
    VanillaSamplerAdapter,
)
from tunix.experimental.worker.rollout_worker import RolloutWorker  # pyright: ignore[reportMissingImports]
from tunix.generate.tokenizer_adapter import TokenizerAdapter  # pyright: ignore[reportMissingImports]
from tunix.rl.agentic.agents.model_agent import ModelAgent  # pyright: ignore[reportMissingImports]
from tunix.rl.agentic.environments.task_environment import (  # pyright: ignore[reportMissingImports]
    TaskEnvironment,
)

import jpaged
from examples import tunix_grpo as grpo
from jpaged import CapacityError, ConfigError, RequestError
from jpaged.integrations.tunix.models import describe
from jpaged.integrations.tunix.sampler import JPagedSampler
from tests.clients.test_tunix import DEPRECATED, SIZES

pytestmark = [
    pytest.mark.clients,
    *(pytest.mark.filterwarnings(f"ignore:{x}:DeprecationWarning") for x in DEPRECATED),
]
PROMPTS = ["ab", "hello world", "x=1+1"]
ENGINE: dict[str, Any] = {
    "decode_steps": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "max_num_seqs": 12,
    "seq_buckets": (12,),
    "num_blocks": 64,
}


class Chat:
    """As tunix's chat parsers: the contents of messages, one after the other."""

    assistant_token = ""

    def parse(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def update_assistant_end_tokens(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        return tokens, 0


@pytest.fixture(scope="module")
def model() -> Any:
    return grpo.make_model(0, **SIZES)


@pytest.fixture(scope="module")
def sampler(model: Any) -> Iterator[JPagedSampler]:
    family, config = describe(model, 64)

    def read_weights(request: Any) -> Any:
        return jpaged.params_from(model, family, config=config)

    llm = jpaged.LLM(
        config,
        params=read_weights(None),
        max_model_len=64,
        **ENGINE,
    )
    yield JPagedSampler(llm, tokenizer=grpo.make_tokenizer(), read_weights=read_weights)
    llm.close()


def ask(prompt: Any, name: str = "", **controls: Any) -> protocol.SamplingRequest:
    controls = {"max_tokens": 12, "temperature": 0.0, "return_logprobs": True} | controls
    params = protocol.SamplingParams(**controls)
    return protocol.SamplingRequest(request_id=name, prompt=prompt, sampling_params=params)


def sample(sampler: Any, requests: Any, **kwargs: Any) -> Any:
    return asyncio.run(sampler.sample(requests, **kwargs))


def test_is_the_protocol(sampler: JPagedSampler) -> None:
    assert isinstance(sampler, protocol.Sampler)


def test_greedy_is_that_of_its_own_sampler(model: Any, sampler: JPagedSampler) -> None:
    own = VanillaSamplerAdapter("own", model, grpo.make_tokenizer(), cache_config=64)
    own.initialize()
    ours, theirs = (sample(each, [ask(p, p) for p in PROMPTS]) for each in (sampler, own))
    for a, b in zip(ours, theirs, strict=True):
        count = len(b.token_ids)  # ours has EOS where it ended
        assert a.token_ids[:count].tolist() == b.token_ids.tolist() and a.text == b.text
        assert a.prompt_token_ids.tolist() == b.prompt_token_ids.tolist()
        assert a.request_id == b.request_id and a.finish_reason in ("stop", "length")
        np.testing.assert_allclose(a.logprobs[:count], b.logprobs, atol=1e-4)
    one = sample(sampler, ask("ab", return_logprobs=False))
    assert one.token_ids.tolist() == ours[0].token_ids.tolist() and one.logprobs is None
    assert sample(sampler, ours[0].prompt_token_ids).text == sample(sampler, "ab").text


def test_every_request_has_its_own_controls(sampler: JPagedSampler) -> None:
    alone = [ask("ab", "a", max_tokens=3), ask("hello", "b", temperature=1.0, top_p=1.0, seed=3)]
    together = sample(sampler, alone)
    for request, answer in zip(alone, together, strict=True):
        again = sample(sampler, request)
        assert answer.token_ids.tolist() == again.token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, again.logprobs, atol=1e-5)
    assert len(together[0].token_ids) <= 3
    drawn = {"temperature": 1.0, "top_p": 1.0, "seed": 3}
    group = sample(sampler, [ask("ab", f"traj_{i}", **drawn) for i in range(6)])
    assert len({tuple(x.token_ids.tolist()) for x in group}) > 3, "one seed, six members"
    without = sample(sampler, "ab", max_generation_steps=2, temperature=0.0, return_logprobs=True)
    assert len(without.token_ids) <= 2 and without.logprobs is not None


def test_weights_come_in_two_steps(model: Any, sampler: JPagedSampler) -> None:
    before, state = sample(sampler, ask("ab")), nnx.state(model, nnx.Param)

    async def round_of(*, publish: bool) -> int:
        request = protocol.WeightSyncRequest(request_id="sync-1", policy_version=7)
        await sampler.pre_weight_sync(request)
        version = await sampler.weight_sync(request)
        if publish:
            await sampler.post_weight_sync(request)
        return version

    nnx.update(model, jax.tree.map(lambda x: x + 0.05 * jnp.sign(x), state))
    assert asyncio.run(round_of(publish=False)) == 7 and sampler.policy_version == 0
    kept = sample(sampler, ask("ab"))
    np.testing.assert_array_equal(kept.logprobs, before.logprobs)  # given up: nothing changed
    assert kept.metadata["policy_versions"] == [(0, 0, len(kept.token_ids))]
    asyncio.run(round_of(publish=True))
    after = sample(sampler, ask("ab"))
    assert sampler.policy_version == 7
    assert after.metadata["policy_versions"] == [(7, 0, len(after.token_ids))]
    assert not np.array_equal(after.logprobs, before.logprobs)
    own = VanillaSamplerAdapter("own", model, grpo.make_tokenizer(), cache_config=64)
    own.initialize()
    theirs = sample(own, ask("ab"))
    np.testing.assert_allclose(after.logprobs[: len(theirs.logprobs)], theirs.logprobs, atol=1e-4)
    assert asyncio.run(sampler.get_transfer_status("sync-1")) == "SUCCESS"
    with pytest.raises(RequestError, match="no weight_sync came before"):
        asyncio.run(sampler.post_weight_sync())
    with pytest.raises(RequestError, match="no weight_sync of this id"):
        asyncio.run(sampler.get_transfer_status("other"))
    nnx.update(model, state)
    asyncio.run(sampler.weight_sync(types.SimpleNamespace(new_policy_version=0)))

    def busy(params: Any, **_: Any) -> None:
        raise RequestError("busy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.llm, "update_params", busy)
        with pytest.raises(RequestError, match="busy"):
            asyncio.run(sampler.post_weight_sync())
    assert sampler.policy_version == 7
    asyncio.run(sampler.post_weight_sync())  # what was read is there still
    assert sampler.policy_version == 8


def test_pause_and_load(sampler: JPagedSampler) -> None:
    async def paused() -> tuple[Any, bool, Any]:
        await sampler.pause()
        task = asyncio.create_task(sampler.sample([ask(p) for p in PROMPTS]))
        await asyncio.sleep(0.2)
        is_done, load = task.done(), await sampler.get_load_info()
        await sampler.resume()
        return load, is_done, await task

    load, is_done, answers = asyncio.run(paused())
    assert not is_done and len(answers) == 3
    assert load.num_requests_waiting + load.num_requests_running <= 3
    idle = asyncio.run(sampler.get_load_info())
    assert idle.num_requests_running == 0 and 0 <= idle.kv_cache_usage_perc < 1
    assert asyncio.run(sampler.get_mesh()) is None
    shapes = asyncio.run(sampler.get_weight_sync_metadata())
    assert shapes["embed"]["weight"].shape == (97, 64)
    assert not asyncio.run(sampler.migrate_kv_cache("a", "b", [1, 2]))


def rewarded(sampler: Any) -> dict[str, Any]:
    """What a RolloutManager and a RolloutWorker are made of: one turn, digits are rewarded."""

    class Pool:
        def acquire_env(self, config: Any) -> TaskEnvironment:
            def reward(task: Any, action: Any) -> float:
                return grpo.share_of_digits(str(action))

            return TaskEnvironment({"prompts": config["prompt"]}, reward_fn=reward)

    return {
        "sampler": sampler,
        "env_pool": Pool(),
        "agent_factory": lambda: ModelAgent(system_prompt=""),
        "tokenizer": TokenizerAdapter(grpo.make_tokenizer()),
        "chat_parser": Chat(),
    }


def rollout(index: int, prompt: str = "", **kwargs: Any) -> Any:
    return datatypes.RolloutRequest(
        prompt_id=f"p{index // 4}",
        group_offset_id=str(index % 4),
        generation_kwargs={"max_tokens": 8, "temperature": 1.0, "top_p": 1.0} | kwargs,
        metadata={"env_config": {"prompt": prompt or PROMPTS[index // 4]}},
    )


def test_its_manager_draws_a_batch(sampler: JPagedSampler) -> None:
    """Twelve episodes at once, a weight sync after them, and one that fails."""

    async def run() -> tuple[list[Any], Any]:
        manager = RolloutManager(**rewarded(sampler))
        found = await manager.generate(
            [rollout(i, seed=1, return_logprobs=True) for i in range(12)]
        )
        await manager.pre_weight_sync()
        await manager.weight_sync()
        await manager.post_weight_sync()
        return found, await manager.generate(rollout(0, prompt="a" * 80))

    found, failed = asyncio.run(run())
    assert not [x.error_message for x in found if hasattr(x, "error_message")]
    texts = [trajectory.extra["text"] for trajectory in found]
    assert len({*texts}) > 6 and all(
        trajectory.extra["reward"] == pytest.approx(grpo.share_of_digits(text))
        for trajectory, text in zip(found, texts, strict=True)
    )
    for trajectory in found:
        (step,) = trajectory.steps
        assert len(step.extra["logprobs"]) == len(step.extra["assistant_tokens"]) > 0
    assert failed.error_type == "CapacityError" and "64" in failed.error_message


def test_its_worker(sampler: JPagedSampler) -> None:
    async def run() -> Any:
        worker = RolloutWorker(worker_id="w", **rewarded(sampler))
        return await worker.generate([rollout(i) for i in range(3)])

    answers = asyncio.run(run())
    assert [answer.status for answer in answers] == ["COMPLETED"] * 3, answers[0]


def test_refusals(sampler: JPagedSampler) -> None:
    with pytest.raises(RequestError, match="sampling_requests=None"):
        sample(sampler, None)
    for controls in ({"return_logits": True}, {"beam_size": 4}):
        said = "{}={}: JPagedSampler does not".format(*next(iter(controls.items())))
        with pytest.raises(RequestError, match=said):
            sample(sampler, ask("ab", "", **controls))
    with pytest.raises(RequestError, match="delay=1: sample has no such control"):
        sample(sampler, "ab", delay=1)
    with pytest.raises(RequestError, match="must be text, token ids or a list of messages"):
        sample(sampler, ask({"a": 1}))

    async def one_is_too_long() -> int:
        with pytest.raises(CapacityError, match="64"):
            await sampler.sample([ask("ab", max_tokens=60), ask("a" * 80)])
        while (await sampler.get_load_info()).num_requests_running:
            await asyncio.sleep(0.01)
        for _ in range(200):  # stats are those of a moment ago
            if not sampler.llm.stats()["blocks_in_use"]:
                break
            await asyncio.sleep(0.01)
        return sampler.llm.stats()["blocks_in_use"]

    assert asyncio.run(one_is_too_long()) == 0, "the others are aborted"
    with pytest.raises(TypeError, match="pause has no argument 'now'"):
        asyncio.run(sampler.pause(now=True))
    tokenizer = grpo.make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(ConfigError, match="pad and EOS ids are both 95"):
        JPagedSampler(sampler.llm, tokenizer=tokenizer)
    plain = JPagedSampler(sampler.llm, tokenizer=grpo.make_tokenizer())
    with pytest.raises(ConfigError, match="pass read_weights="):
        asyncio.run(plain.weight_sync())
