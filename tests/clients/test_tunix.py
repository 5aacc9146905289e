"""JPagedRollout beside tunix's own sampler: the same tokens and logprobs, and GRPO that learns
through either.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix  # pyright: ignore[reportMissingImports]
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3.model import Qwen3  # pyright: ignore[reportMissingImports]
from tunix.rl import common, rl_cluster  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.vanilla_rollout import VanillaRollout  # pyright: ignore[reportMissingImports]

import jpaged
from examples import tunix_grpo as grpo
from jpaged import ConfigError, RequestError
from jpaged.integrations.tunix import JPagedRollout
from tests import tiny

DEPRECATED = (  # of flax, jax and optax, in tunix and qwix
    "optax.global_norm is deprecated",
    "'sharding' is deprecated",
    "'.value' access is now deprecated",
    "'VariableState' was removed",
    r"The 'm.iter_modules\(\)' method",
    "`with mesh",
    "jax.interpreters.pxla.thread_resources is",
)
pytestmark = [
    pytest.mark.clients,
    *(pytest.mark.filterwarnings(f"ignore:{x}:DeprecationWarning") for x in DEPRECATED),
]
SIZES = {
    "num_layers": 2,
    "embed_dim": 64,
    "hidden_dim": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
ENGINE = tiny.engine(decode_steps=4, max_num_batched_tokens=64, token_buckets=(64,), max_num_seqs=8)
GREEDY = RolloutConfig(
    max_tokens_to_generate=12,
    max_prompt_length=16,
    kv_cache_size=64,
    temperature=0.0,
    top_p=None,
    return_logprobs=True,
)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.7, top_p=1.0)
PROMPTS = ["ab", "hello world", "x=1+1", "def f():"]


@pytest.fixture(autouse=True, scope="module")
def _engines() -> Iterator[None]:
    yield
    jpaged.release(compiled=True)


def make_rollout(
    model: Qwen3, config: RolloutConfig = GREEDY, mesh: Mesh | None = None, **how: Any
) -> JPagedRollout:
    """With completions as its own sampler has them, without EOS."""
    mesh = grpo.make_mesh() if mesh is None else mesh
    how = {"tokenizer": grpo.make_tokenizer(), "engine_config": ENGINE, "keep_eos": False} | how
    return JPagedRollout(rollout_actor=model, mesh=mesh, rollout_config=config, **how)


def make_vanilla(model: Qwen3) -> VanillaRollout:
    c = model.config
    cache = CacheConfig(64, c.num_layers, c.num_kv_heads, c.head_dim)
    return VanillaRollout(model, grpo.make_tokenizer(), cache)


def lists(output: Any) -> list[list[int]]:
    return [tokens.tolist() for tokens in output.tokens]


def pad(rows: list[np.ndarray], width: int) -> np.ndarray:
    out = np.full((len(rows), width), grpo.PAD, np.int32)
    for row, tokens in zip(out, rows, strict=True):
        row[: len(tokens)] = tokens
    return out


def assert_same(ours: Any, theirs: Any) -> None:
    assert lists(ours) == lists(theirs) and ours.text == theirs.text
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def change_weights(model: nnx.Module, by: float = 0.02) -> None:
    rng = np.random.default_rng(1)
    state = nnx.state(model, nnx.Param)
    nnx.update(
        model,
        jax.tree.map(lambda x: x + by * jnp.asarray(rng.standard_normal(x.shape), x.dtype), state),
    )


@pytest.mark.parametrize(("seed", "tied"), [(0, False), (5, True)], ids=["untied", "tied"])
def test_greedy_is_that_of_its_own_sampler(seed: int, tied: bool):
    """Of models that draw no padding token here: tunix takes one for padding."""
    model = grpo.make_model(seed, use_tied_embedding=tied, **SIZES)
    ours, theirs = make_rollout(model), make_vanilla(model)
    assert_same(ours.generate(PROMPTS, GREEDY), theirs.generate(PROMPTS, GREEDY))
    ended = dataclasses.replace(
        GREEDY, eos_tokens=[lists(theirs.generate(PROMPTS, GREEDY))[0][4], grpo.EOS]
    )
    assert_same(ours.generate(PROMPTS, ended), theirs.generate(PROMPTS, ended))
    assert len(lists(ours.generate(PROMPTS, ended))[0]) < 5
    change_weights(model)  # the module that is shared: read as it is
    theirs.update_params(nnx.state(model, nnx.Param))
    assert_same(ours.generate(PROMPTS, GREEDY), theirs.generate(PROMPTS, GREEDY))
    long = ["a" * 20, "b"]  # past max_prompt_length: the next power of two
    assert ours.generate(long, GREEDY).left_padded_prompt_tokens.shape == (2, 32)
    assert_same(ours.generate(long, GREEDY), theirs.generate(long, GREEDY))
    assert (
        ours.generate(PROMPTS, dataclasses.replace(GREEDY, return_logprobs=False)).logprobs is None
    )


def test_eos_may_be_kept():
    model = grpo.make_model(0, **SIZES)
    ended = dataclasses.replace(
        GREEDY, eos_tokens=[lists(make_rollout(model).generate(PROMPTS, GREEDY))[0][4]]
    )
    without, kept = (
        make_rollout(model, keep_eos=keep).generate(PROMPTS, ended) for keep in (False, True)
    )
    assert lists(kept)[0] == [*lists(without)[0], *ended.eos_tokens]
    assert len(kept.logprobs[0]) == len(kept.tokens[0])
    assert kept.text == without.text, "the text is without it"
    mesh, tokenizer = grpo.make_mesh(), grpo.make_tokenizer()
    default = JPagedRollout(
        rollout_actor=model,
        tokenizer=tokenizer,
        mesh=mesh,
        rollout_config=GREEDY,
        engine_config=ENGINE,
    )
    assert lists(default.generate(PROMPTS, ended)) == lists(kept)


def test_a_prompt_alone():
    """As tunix's other rollouts take it: an agent's learner passes a str."""
    model = grpo.make_model(0, **SIZES)
    ours, theirs = make_rollout(model), make_vanilla(model)
    assert_same(ours.generate("hello", GREEDY), theirs.generate("hello", GREEDY))
    assert len(ours.generate("hello", GREEDY).tokens) == 1


def test_padding_is_no_context():
    """A prompt of 40 and 20 new tokens fit 64, though the array of prompts is 64 wide."""
    ours = make_rollout(grpo.make_model(0, **SIZES))
    asked = dataclasses.replace(GREEDY, max_tokens_to_generate=20, eos_tokens=[grpo.EOS])
    prompt = "a" * 40
    found = ours.generate([prompt, "b"], asked)
    assert found.left_padded_prompt_tokens.shape == (2, 64)
    assert len(found.tokens) == 2
    assert lists(found)[0][:12] == lists(ours.generate([prompt], GREEDY))[0][:12]
    with pytest.raises(ConfigError, match=r"a prompt of 6\d and a completion of 20 tokens"):
        ours.generate(["a" * 60], asked)


def test_sixteen_threads():
    """As an agent's learner calls it, while weights are synced."""
    model = grpo.make_model(0, **SIZES)
    ours = make_rollout(model)
    prompts = [f"{i} is" for i in range(16)]
    seeded = dataclasses.replace(SAMPLED, seed=3)
    alone = [lists(ours.generate(prompt, seeded)) for prompt in prompts]
    logps = [np.asarray(ours.get_per_token_logps(*scored(ours, p))) for p in prompts]
    state = nnx.state(model, nnx.Param)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda p: lists(ours.generate(p, seeded)), prompts * 4))
        synced = [pool.submit(ours.update_params, state) for _ in range(4)]
        scores = list(pool.map(lambda p: ours.get_per_token_logps(*scored(ours, p)), prompts))
        unseeded = list(pool.map(lambda _: lists(ours.generate("ab", SAMPLED)), range(16)))
        assert all(each.result() is None for each in synced)
    assert found == alone * 4
    for one, other in zip(scores, logps, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert len({str(tokens) for tokens in unseeded}) > 12, "no two calls draw by one key"


def scored(ours: JPagedRollout, prompt: str) -> tuple[jax.Array, jax.Array]:
    """A prompt, and what is scored after it."""
    ids = ours._drawing.token_ids(prompt)
    return jnp.asarray([ids]), jnp.asarray([ids[::-1]])


def test_a_pad_token_ends_a_completion():
    """Whatever the model says after one, tunix's trainer would score it in another context."""
    model = grpo.make_model(0, **SIZES)
    lm_head = model.lm_head.w
    lm_head.set_value(lm_head.get_value().at[:, grpo.PAD].multiply(3.0))  # drawn often
    for keep in (False, True):
        out = make_rollout(model, keep_eos=keep).generate(PROMPTS * 8, SAMPLED)
        assert not any(grpo.PAD in tokens for tokens in lists(out))
        assert min(len(tokens) for tokens in lists(out)) < 12
        graph, state = nnx.split(model)
        completions = jnp.asarray(pad(out.tokens, 12))
        prompts = jnp.asarray(out.left_padded_prompt_tokens)
        trainers = common.compute_per_token_logps(
            graph, state, prompts, completions, pad_id=grpo.PAD, eos_id=grpo.EOS, temperature=0.7
        )
        for row, logprobs in zip(np.asarray(trainers), out.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, row[: len(logprobs)], atol=1e-4)


def test_samples_differ_and_seeds_hold():
    ours = make_rollout(grpo.make_model(0, **SIZES))
    prompts = [prompt for prompt in PROMPTS for _ in range(6)]
    first, second = ours.generate(prompts, SAMPLED), ours.generate(prompts, SAMPLED)
    assert len({tuple(tokens) for tokens in lists(first)[:6]}) == 6
    assert lists(first) != lists(second)  # no seed: it advances
    for seed in (jax.random.PRNGKey(3), jax.random.key(3), 3):
        seeded = dataclasses.replace(SAMPLED, seed=seed)
        assert lists(ours.generate(prompts, seeded)) == lists(ours.generate(prompts, seeded))
    other = dataclasses.replace(SAMPLED, seed=4)
    assert lists(ours.generate(prompts, other)) != lists(ours.generate(prompts, seeded))
    again = make_rollout(ours.model())
    assert lists(again.generate(prompts, SAMPLED)) == lists(first)  # the same run repeats itself
    apart = make_rollout(ours.model(), seed=1)
    assert lists(apart.generate(prompts, SAMPLED)) != lists(first)


def test_top_k_and_top_p():
    model = grpo.make_model(0, **SIZES)
    ours = make_rollout(model)
    one = dataclasses.replace(SAMPLED, top_k=1, eos_tokens=None)
    assert lists(ours.generate(PROMPTS, one)) == lists(
        make_vanilla(model).generate(PROMPTS, GREEDY)
    )
    narrow = dataclasses.replace(SAMPLED, top_p=1e-6, eos_tokens=None)
    assert lists(ours.generate(PROMPTS, narrow)) == lists(ours.generate(PROMPTS, GREEDY))
    assert lists(ours.generate(PROMPTS, dataclasses.replace(SAMPLED, top_k=-1, seed=5))) == lists(
        ours.generate(PROMPTS, dataclasses.replace(SAMPLED, top_k=None, seed=5))
    )


def test_logprobs_are_the_trainers():
    model = grpo.make_model(0, **SIZES)
    ours, theirs = make_rollout(model), make_vanilla(model)
    out = ours.generate([p for p in PROMPTS for _ in range(4)], SAMPLED)
    prompts, completions = (
        jnp.asarray(out.left_padded_prompt_tokens),
        jnp.asarray(pad(out.tokens, 12)),
    )
    real = np.asarray(completions) != grpo.PAD
    graph, state = nnx.split(model)
    tempered = common.compute_per_token_logps(
        graph, state, prompts, completions, pad_id=grpo.PAD, eos_id=grpo.EOS, temperature=0.7
    )
    for row, logprobs in zip(np.asarray(tempered), out.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, row[: len(logprobs)], atol=1e-4)
    logps = ours.get_per_token_logps(prompts, completions)
    assert (
        isinstance(logps, jax.Array)
        and logps.shape == completions.shape
        and logps.dtype == jnp.float32
    )
    wanted = np.where(real, theirs.get_per_token_logps(prompts, completions), 0.0)
    np.testing.assert_allclose(logps, wanted, atol=1e-4)
    with pytest.raises(RequestError, match="prompt 0 is nothing but padding"):
        ours.get_per_token_logps(jnp.full((1, 4), grpo.PAD), completions[:1])


def test_computes_in_the_actors_dtype():
    model = grpo.make_model(0, **SIZES)
    half = make_rollout(model, dataclasses.replace(GREEDY, data_type=jnp.bfloat16))
    f32 = make_rollout(model)
    config = dataclasses.replace(GREEDY, data_type=jnp.bfloat16)
    a, b = half.generate(PROMPTS, config), f32.generate(PROMPTS, GREEDY)
    gaps = [abs(x[0] - y[0]) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    assert 1e-5 < max(gaps) < 0.2
    model.config.dtype = jnp.bfloat16
    np.testing.assert_array_equal(
        make_rollout(model).generate(PROMPTS, GREEDY).logprobs[0], a.logprobs[0]
    )


def meshes() -> tuple[Mesh, Mesh]:
    devices = np.array(jax.devices())
    return Mesh(devices[:2].reshape(2, 1), ("fsdp", "tp")), Mesh(
        devices[4:6].reshape(1, 2), ("fsdp", "tp")
    )


def test_weights_of_another_mesh():
    """Synced by tunix's cluster, under its transfer guards; in between the last weights serve
    on.
    """
    actor_mesh, rollout_mesh = meshes()
    model = grpo.make_model(0, **SIZES)
    engine = functools.partial(JPagedRollout, engine_config=ENGINE, keep_eos=False)
    cluster = grpo.make_cluster(
        engine, model, rollout=GREEDY, mesh=actor_mesh, rollout_mesh=rollout_mesh
    )
    actor, rollout = cluster.actor_trainer.model, cluster.rollout
    assert all(
        set(x.devices()) <= set(rollout_mesh.devices.flat)
        for x in jax.tree.leaves(nnx.state(rollout.model()))
    )
    before = lists(cluster.generate(PROMPTS))
    assert before == lists(make_vanilla(model).generate(PROMPTS, GREEDY))
    change_weights(actor, by=0.2)
    assert lists(cluster.generate(PROMPTS)) == before
    cluster.sync_weights()
    after = lists(cluster.generate(PROMPTS))
    assert after == lists(make_vanilla(actor).generate(PROMPTS, GREEDY)) != before
    leaves = jax.tree.leaves(rollout._weights.current())
    assert all(set(x.devices()) <= set(rollout_mesh.devices.flat) for x in leaves)
    assert lists(cluster.generate(PROMPTS)) == after
    assert all(
        a is b for a, b in zip(leaves, jax.tree.leaves(rollout._weights.current()), strict=True)
    )  # made once


@contextlib.contextmanager
def no_transfers() -> Iterator[None]:
    """What tunix syncs weights under."""
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        yield


def test_updates_compile_nothing():
    model = grpo.make_model(0, **SIZES)
    ours = make_rollout(model)
    ours.generate(PROMPTS, GREEDY)
    for _ in range(2):
        newer = jax.tree.map(lambda x: x * 1.01, nnx.state(model, nnx.Param))
        with tiny.compiles() as names, no_transfers():
            ours.update_params(newer, (nnx.Param,))
        with tiny.compiles() as names:
            ours.generate(PROMPTS, GREEDY)
        assert names == []


def add_lora(model: Qwen3) -> Qwen3:
    """As tunix's examples do, with parts that are not zero."""
    provider = qwix.LoraProvider(module_path=".*(q|k|v|o|gate|up|down)_proj", rank=4, alpha=8.0)
    lora = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    parts = nnx.state(lora, nnx.LoRAParam)
    nnx.update(
        lora,
        jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), parts),
    )
    return lora


@pytest.mark.parametrize("merge", [False, True])
def test_lora_is_served_or_refused(merge: bool):
    plain = grpo.make_model(0, **SIZES)
    model = add_lora(plain)
    with pytest.raises(ConfigError, match=r"_lora_a: pass lora_scale="):
        make_rollout(model)
    ours, theirs = make_rollout(model, lora_scale=2.0, merge_lora=merge), make_vanilla(model)
    assert_same(ours.generate(PROMPTS, GREEDY), theirs.generate(PROMPTS, GREEDY))
    assert lists(ours.generate(PROMPTS, GREEDY)) != lists(
        make_vanilla(plain).generate(PROMPTS, GREEDY)
    )


def test_lora_parts_alone_are_synced():
    actor_mesh, rollout_mesh = meshes()
    engine = functools.partial(JPagedRollout, engine_config=ENGINE, lora_scale=2.0, keep_eos=False)
    model = add_lora(grpo.make_model(0, **SIZES))
    cluster = grpo.make_cluster(
        engine, model, rollout=GREEDY, mesh=actor_mesh, rollout_mesh=rollout_mesh
    )
    actor = cluster.actor_trainer.model
    before = lists(cluster.generate(PROMPTS))
    parts = nnx.state(actor, nnx.LoRAParam)
    nnx.update(actor, jax.tree.map(lambda x: -2 * x, parts))
    cluster.sync_weights()
    base, _ = cluster.rollout._weights.current()
    after = lists(cluster.generate(PROMPTS))
    assert after == lists(make_vanilla(actor).generate(PROMPTS, GREEDY)) != before
    nnx.update(actor, jax.tree.map(lambda x: x / 2, nnx.state(actor, nnx.LoRAParam)))
    with tiny.compiles() as names:
        cluster.sync_weights()
        cluster.generate(PROMPTS)
    assert not any("assemble" in name for name in names), "the base is made again"
    assert cluster.rollout._weights.current()[0] is base


def test_unknown_parts_are_refused():
    ours = make_rollout(grpo.make_model(0, **SIZES))
    lora = nnx.state(add_lora(grpo.make_model(0, **SIZES)), nnx.LoRAParam)
    with pytest.raises(ConfigError, match=r"update_params: .*_lora_a, which the model lacks"):
        ours.update_params(lora, (nnx.LoRAParam,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout_vllm_server_mode": True},
            r"rollout_vllm_server_mode=True: JPagedRollout does not support it",
        ),
        (
            {"rollout_vllm_kwargs": {"a": 1}},
            r"rollout_vllm_kwargs=\{'a': 1\}: JPagedRollout does not",
        ),
        ({"rollout_mapping_config": object()}, "rollout_mapping_config="),
        ({"rollout_sglang_jax_page_size": 64}, "rollout_sglang_jax_page_size=64"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: the mesh .* serves with 1"),
        ({"data_parallel_size": 4}, "data_parallel_size=4"),
        ({"expert_parallel_size": 2}, "expert_parallel_size=2"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str):
    model = grpo.make_model(0, **SIZES)
    config = dataclasses.replace(GREEDY, **changes)
    with pytest.raises(ConfigError, match=message):
        make_rollout(model, config)
    with pytest.raises(ConfigError, match=message):
        make_rollout(model).generate(PROMPTS, config)


def test_other_refusals():
    model = grpo.make_model(0, **SIZES)
    tokenizer = grpo.make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(ConfigError, match="pad and EOS ids are both 95"):
        make_rollout(model, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="are longer than 64: raise kv_cache_size"):
        make_rollout(model).generate(
            PROMPTS, dataclasses.replace(GREEDY, max_tokens_to_generate=60)
        )
    with pytest.raises(TypeError, match="no argument 'images'"):
        make_rollout(model).generate(PROMPTS, GREEDY, images=None)
    with pytest.raises(RequestError, match="top_p=2"):
        make_rollout(model).generate(PROMPTS, dataclasses.replace(SAMPLED, top_p=2.0))
    with pytest.raises(ConfigError, match="rollout_actor is a Linear, none of tunix's models"):
        make_rollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_grpo_learns_through_both():
    """Its learner, 5 seeds: the mean reward rises with either engine, to the same within the 95%
    intervals.
    """
    runs = {
        name: [grpo.train(engine, seed, 25, **SIZES) for seed in range(5)]
        for name, engine in grpo.ENGINES.items()
    }
    for trained in runs.values():
        assert all(run.last > run.first + 0.2 for run in trained)
    a, b = (grpo.interval([run.last for run in trained]) for trained in runs.values())
    assert grpo.overlap(a, b), (a, b)


def test_cluster_takes_the_class():
    cluster = grpo.make_cluster(JPagedRollout, grpo.make_model(0, **SIZES))
    assert isinstance(cluster.rollout, JPagedRollout)
    assert cluster.rollout.model() is cluster.actor_trainer.model
    assert (cluster.rollout.pad_id(), cluster.rollout.eos_id()) == (grpo.PAD, grpo.EOS)
    assert cluster.r2m[rl_cluster.Role.ROLLOUT] == grpo.make_mesh()
