"""JPagedRollout and JPagedSampler under tunix's interfaces without tunix: LoRA parts go into an
adapter's slot, without a merge and without a compile; prompts, EOS, threads; weights in two steps.
tests/clients has the real one.
"""

import asyncio
import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpaged
from jpaged import CapacityError, ConfigError, RequestError, SamplingParams
from jpaged.checkpoint.name_maps import TUNIX_QWEN3, params_from
from jpaged.kept import sessions as kept_sessions
from tests import vision_folder
from tests.tiny import compiles, config, engine

MODEL = config(num_layers=1, vocab_size=260, eos_token_ids=(257,))
ENGINE = engine(decode_steps=4, max_num_batched_tokens=64, token_buckets=(64,))
PROMPTS, SCALE, RANK = ["ab", "hello world"], 2.0, 3
SIZES = dict(zip("VEFKGD", (260, 32, 48, 2, 2, 16), strict=True))
ADAPTED = ("attn.q_proj.w", "attn.o_proj.w", "mlp.gate_proj.kernel")


pytestmark = pytest.mark.middle


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 8
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 16
    kv_cache_size: int = 64
    data_type: Any = None
    eos_tokens: Any = None
    tensor_parallel_size: int = -1
    data_parallel_size: int = -1
    expert_parallel_size: int = -1
    return_logprobs: bool = True


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: Any
    tokens: Any
    left_padded_prompt_tokens: Any
    logprobs: Any


@dataclasses.dataclass(kw_only=True)
class SamplingControls:
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    return_logprobs: bool = False
    return_logits: bool = False
    beam_size: int | None = None


@dataclasses.dataclass(kw_only=True)
class SamplingRequest:
    request_id: str = ""
    prompt: Any
    sampling_params: SamplingControls | None = None


@dataclasses.dataclass(kw_only=True)
class SamplingResponse:
    request_id: str = ""
    metadata: dict[str, Any]
    text: str
    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray | None
    finish_reason: str


@dataclasses.dataclass(kw_only=True)
class WeightSyncRequest:
    request_id: str = ""
    policy_version: int = 0


class Tokenizer:
    """As tunix adapts one."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("latin-1")

    def bos_id(self) -> int:
        return 0

    def pad_id(self) -> int:
        return 258

    def eos_id(self) -> int:
        return 257

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids


@pytest.fixture(scope="module")
def rollouts() -> Iterator[Any]:
    """The integration's class, over a tunix that is not there."""
    names = {
        "tunix.generate.tokenizer_adapter": {"TokenizerAdapter": Tokenizer},
        "tunix.rl.rollout.base_rollout": {
            "BaseRollout": object,
            "RolloutConfig": RolloutConfig,
            "RolloutOutput": RolloutOutput,
        },
        "tunix.experimental.rollout.sampler": {
            "LoadInfo": types.SimpleNamespace,
            "SamplingParams": SamplingControls,
            "SamplingRequest": SamplingRequest,
            "SamplingResponse": SamplingResponse,
            "WeightSyncRequest": WeightSyncRequest,
        },
    }
    ours = "jpaged.integrations.tunix"
    parts = [name for name in sys.modules if name.startswith(f"{ours}.")]
    before = {name: sys.modules.pop(name, None) for name in (*names, ours, *parts)}
    for name, members in names.items():
        parents = [name[:at] for at, x in enumerate(name) if x == "."]
        for parent in parents:
            before.setdefault(parent, sys.modules.get(parent))
            sys.modules[parent] = types.ModuleType(parent)
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(members)
    yield importlib.import_module(ours).JPagedRollout
    for name in [name for name in sys.modules if name.startswith(f"{ours}.")]:
        del sys.modules[name]
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    jpaged.release(compiled=True)


class Node(nnx.Module):
    """A tree of parameters as attributes."""

    def put(self, path: list[str], leaf: nnx.Param) -> None:
        name, *rest = path
        if rest:
            if not hasattr(self, name):
                setattr(self, name, Node())
            getattr(self, name).put(rest, leaf)
        else:
            setattr(self, name, leaf)


def shape_of(axes: str) -> tuple[int, ...]:
    tokens = axes.replace("(K G)", "H").split()
    return tuple(SIZES["K"] * SIZES["G"] if x == "H" else SIZES[x] for x in tokens)


def make_actor() -> Node:
    """A Qwen3 by tunix's names and shapes, with LoRA parts as qwix adds them."""
    rng, actor = np.random.default_rng(0), Node()

    def put(path: str, shape: tuple[int, ...], kind: Any, scale: float) -> None:
        x = jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)
        actor.put(path.split("."), kind(x))

    for name, (path, axes, *_) in TUNIX_QWEN3.items():
        if name.endswith("bias") or "router" in name or "experts" in name:
            continue  # of Qwen 2, or of a mixture
        path, shape = path.replace("{i}", "0"), shape_of(axes)
        put(path, shape, nnx.Param, 1.0 if len(shape) == 1 else 0.2)
        inputs = 2 if axes.startswith("(K G) D") else 1
        if path.removeprefix("layers.0.") in ADAPTED:
            put(f"{path}_lora_a", (*shape[:inputs], RANK), nnx.LoRAParam, 0.2)
            put(f"{path}_lora_b", (RANK, *shape[inputs:]), nnx.LoRAParam, 0.2)
    return actor


def make_rollout(rollouts: Any, actor: Node, **how: Any) -> Any:
    how = {"family": "tunix_qwen3", "config": MODEL, "lora_scale": SCALE, "keep_eos": False} | how
    settings: Any = {"tokenizer": Tokenizer(), "mesh": None, "engine_config": ENGINE}
    return rollouts(rollout_actor=actor, rollout_config=RolloutConfig(), **settings, **how)


def tokens_of(rollout: Any) -> list[list[int]]:
    return [x.tolist() for x in rollout.generate(PROMPTS, RolloutConfig()).tokens]


def merged_tokens(actor: Node) -> list[list[int]]:
    """By weights that the parts are merged into."""
    params = params_from(actor, "tunix_qwen3", config=MODEL, lora_scale=SCALE)
    how = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[257, 258])
    prompts = [Tokenizer().encode(prompt) for prompt in PROMPTS]
    outs = jpaged.generate(params, prompts, how, engine_config=ENGINE)
    ends = {257, 258}
    return [[x for x in out.outputs[0].token_ids if x not in ends] for out in outs]


def new_parts(actor: Node, factor: float) -> nnx.State:
    return jax.tree.map(lambda x: x * factor, nnx.state(actor, nnx.LoRAParam))


def test_new_parts_go_into_a_slot(rollouts: Any) -> None:
    actor = make_actor()
    ours = make_rollout(rollouts, actor)
    first = tokens_of(ours)
    ours.update_params(new_parts(actor, 0.9))
    tokens_of(ours)
    base, _ = ours._weights.current()
    session = kept_sessions()[-1]
    version, loads = session.served.weights.version, session.report()["adapter_loads"]
    for factor in (-1.0, 0.5):
        parts = new_parts(actor, factor)
        with compiles() as names:
            ours.update_params(parts, (nnx.LoRAParam,))
            found = tokens_of(ours)
        assert names == [], "neither a merge nor a step"
        assert ours._weights.current()[0] is base
        loads += 1
        assert session.report()["adapter_loads"] == loads
        assert session.served.weights.version == version
        assert tokens_of(ours) == found, "the same parts are the same version"
        assert session.report()["adapter_loads"] == loads
        assert found == merged_tokens(actor) != first


def test_logprobs_are_the_adapters_too(rollouts: Any) -> None:
    actor = make_actor()
    ours, merged = (make_rollout(rollouts, actor, merge_lora=merge) for merge in (False, True))
    prompts = np.array([[258, 5, 6], [7, 8, 9]])
    completions = np.array([[10, 11], [12, 258]])
    found, wanted = (each.get_per_token_logps(prompts, completions) for each in (ours, merged))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert merged._weights.current()[1] is None is not ours._weights.current()[1]
    assert tokens_of(ours) == tokens_of(merged) == merged_tokens(actor)


def test_a_scale_is_needed(rollouts: Any) -> None:
    with pytest.raises(ConfigError, match=r"_lora_a: pass lora_scale="):
        make_rollout(rollouts, make_actor(), lora_scale=None)


def test_a_prompt_alone_is_one_prompt(rollouts: Any) -> None:
    ours = make_rollout(rollouts, make_actor())
    alone, listed = (ours.generate(p, RolloutConfig()) for p in ("hello", ["hello"]))
    assert len(alone.tokens) == len(alone.text) == 1
    assert alone.tokens[0].tolist() == listed.tokens[0].tolist()
    assert alone.left_padded_prompt_tokens.shape == (1, 16)


def test_padding_is_no_context(rollouts: Any) -> None:
    """40 tokens and 20 new ones fit 64, though the array of prompts is 64 wide."""
    ours = make_rollout(rollouts, make_actor())
    asked = RolloutConfig(max_tokens_to_generate=20)
    found = ours.generate(["a" * 40], asked)
    assert found.left_padded_prompt_tokens.shape == (1, 64)
    assert found.left_padded_prompt_tokens[0].tolist() == [258] * 24 + [97] * 40
    with pytest.raises(ConfigError, match=r"a prompt of 45 and a completion of 20 tokens .* 64"):
        ours.generate(["a" * 45], asked)


def test_the_end_of_a_turn_is_kept(rollouts: Any) -> None:
    """By default, in the tokens and with its logprob, and not in the text."""
    actor = make_actor()
    free = make_rollout(rollouts, actor).generate(PROMPTS, RolloutConfig())
    asked = RolloutConfig(eos_tokens=[int(free.tokens[0][3])])
    how: dict[str, Any] = {"family": "tunix_qwen3", "config": MODEL, "lora_scale": SCALE}
    default = rollouts(
        rollout_actor=actor,
        rollout_config=asked,
        tokenizer=Tokenizer(),
        mesh=None,
        engine_config=ENGINE,
        **how,
    )
    kept = default.generate(PROMPTS, asked)
    without = make_rollout(rollouts, actor).generate(PROMPTS, asked)
    assert kept.tokens[0].tolist() == [*without.tokens[0].tolist(), asked.eos_tokens[0]]
    assert kept.tokens[0].tolist() == free.tokens[0].tolist()[: len(kept.tokens[0])]
    assert len(kept.logprobs[0]) == len(kept.tokens[0])
    assert kept.text == without.text


def test_sixteen_threads(rollouts: Any) -> None:
    """As an agent's learner calls it, while new LoRA parts of the same numbers come."""
    actor = make_actor()
    ours = make_rollout(rollouts, actor)
    prompts = [f"{i} is" for i in range(16)]
    asked = RolloutConfig(temperature=0.9, top_p=1.0, seed=3)
    alone = [ours.generate(p, asked).tokens[0].tolist() for p in prompts]
    same = new_parts(actor, 1.0)

    def generate(prompt: str) -> list[int]:
        return ours.generate(prompt, asked).tokens[0].tolist()

    with ThreadPoolExecutor(16) as pool:
        updates = [pool.submit(ours.update_params, same, (nnx.LoRAParam,)) for _ in range(3)]
        assert list(pool.map(generate, prompts * 4)) == alone * 4
        assert all(update.result() is None for update in updates)
        drawn = RolloutConfig(temperature=1.0, top_p=1.0)
        found = pool.map(lambda _: str(ours.generate("ab", drawn).tokens), range(16))
    assert len(set(found)) > 8, "no two calls draw by one key"


def test_a_sampler_takes_weights_in_two_steps(rollouts: Any) -> None:
    """Requests with controls of their own in one batch; what `weight_sync` has read serves from
    `post_weight_sync` on.
    """
    make = importlib.import_module("jpaged.integrations.tunix.sampler").JPagedSampler
    actor = make_actor()

    def read_weights(request: Any) -> Any:
        return params_from(actor, "tunix_qwen3", config=MODEL, lora_scale=SCALE)

    llm = jpaged.LLM(MODEL, params=read_weights(None), **dataclasses.asdict(ENGINE))
    sampler = make(llm, tokenizer=Tokenizer(), read_weights=read_weights)

    def ask(prompt: Any, name: str = "", **controls: Any) -> SamplingRequest:
        controls = {"max_tokens": 8, "temperature": 0.0, "return_logprobs": True} | controls
        params = SamplingControls(**controls)
        return SamplingRequest(request_id=name, prompt=prompt, sampling_params=params)

    async def run() -> None:
        first, short = await sampler.sample([ask(PROMPTS[0], "a"), ask(PROMPTS[1], max_tokens=3)])
        assert (first.request_id, len(short.token_ids)) == ("a", 3)
        assert first.prompt_token_ids.tolist() == [*PROMPTS[0].encode()]
        assert first.token_ids.tolist()[: len(merged_tokens(actor)[0])] == merged_tokens(actor)[0]
        assert len(first.logprobs) == len(first.token_ids)
        by_ids = await sampler.sample(first.prompt_token_ids, max_generation_steps=8, temperature=0)
        assert by_ids.token_ids.tolist() == first.token_ids.tolist() and by_ids.logprobs is None
        drawn = {"temperature": 1.0, "top_p": 1.0, "seed": 3}
        group = await sampler.sample([ask("ab", f"traj_{i}", **drawn) for i in range(8)])
        assert len({str(member.token_ids) for member in group}) > 4, "one seed, eight members"
        again = await sampler.sample(ask("ab", "traj_5", **drawn))
        assert again.token_ids.tolist() == group[5].token_ids.tolist()
        nnx.update(actor, jax.tree.map(lambda x: x * 1.1, nnx.state(actor, nnx.Param)))
        request = WeightSyncRequest(request_id="sync", policy_version=7)
        for publish in (False, True):
            await sampler.pre_weight_sync(request)
            assert await sampler.weight_sync(request) == 7
            if publish:
                await sampler.post_weight_sync(request)
            answer = await sampler.sample(ask(PROMPTS[0]))
            same = np.array_equal(answer.logprobs, first.logprobs)
            assert same != publish, "a round that is given up changes nothing"
            version = 7 if publish else 0
            assert answer.metadata["policy_versions"] == [(version, 0, len(answer.token_ids))]
            assert sampler.policy_version == version
        assert await sampler.get_transfer_status("sync") == "SUCCESS"
        with pytest.raises(RequestError, match="no weight_sync came before"):
            await sampler.post_weight_sync()
        with pytest.raises(CapacityError, match="64"):
            await sampler.sample([ask("ab", max_tokens=50), ask("a" * 80)])
        with pytest.raises(RequestError, match="beam_size=4: JPagedSampler does not support it"):
            await sampler.sample(ask("ab", beam_size=4))
        with pytest.raises(RequestError, match="delay=1: sample has no such control"):
            await sampler.sample("ab", delay=1)
        while (load := await sampler.get_load_info()).num_requests_running:
            await asyncio.sleep(0.01)
        assert (load.num_requests_waiting, load.kv_cache_usage_perc) == (0, 0.0)

    asyncio.run(run())
    llm.close()


def test_a_sampler_takes_messages_with_images(rollouts: Any, tmp_path: Any) -> None:
    make = importlib.import_module("jpaged.integrations.tunix.sampler").JPagedSampler
    llm = jpaged.LLM(vision_folder.write_vision_folder(tmp_path), **vision_folder.ENGINE)

    class Small(Tokenizer):  # within the model's vocabulary
        def pad_id(self) -> int:
            return 0

        def eos_id(self) -> int:
            return vision_folder.EOS

    sampler = make(llm, tokenizer=Small())
    messages = vision_folder.seen()
    controls = {"max_generation_steps": 4, "temperature": 0, "return_logprobs": True}
    answer = asyncio.run(sampler.sample(messages, **controls))
    (output,) = llm.chat(messages, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert answer.prompt_token_ids.tolist() == output.prompt_token_ids
    assert answer.prompt_token_ids.tolist().count(vision_folder.IMAGE) == vision_folder.ROWS
    np.testing.assert_allclose(answer.logprobs, output.outputs[0].token_logprobs, atol=1e-5)
    llm.close()
