"""`kv_cache_dtype`: keys and values in 8 bits, close to those of the model's dtype, and to the bit
the same wherever their blocks are shared, moved or cut.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import LLM, EngineConfig, Params, RequestOutput, SamplingParams
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.errors import ConfigError, UnsupportedError
from jpaged.runtime import kv_cache
from kernels_cpu.library import unavailable
from tests.tiny import CROWDED, ENGINE, ROOMY, assert_same, config, make_params, make_prompts

MODEL = config(head_dim=32)
PROMPTS = make_prompts(9, 14, 6, 11, 3, seed=24)
DRAWN = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True, seed=3, logprobs=2, n=2)
FORMS = ("int8", "fp8")


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params(0, MODEL)


@pytest.fixture(scope="module")
def expected(params: Params) -> Iterator[list[RequestOutput]]:
    """Of a pool in which nothing is preempted, shared only by the samples of a prompt."""
    llm = served(params, kv_cache_dtype="int8", enable_prefix_caching=False)
    yield run(llm)
    llm.close()


def served(params: Any, base: EngineConfig = ROOMY, **settings: Any) -> LLM:
    return LLM(params, **{**vars(base), **settings})


def run(llm: LLM, prompts: Any = PROMPTS, how: SamplingParams = DRAWN) -> list[RequestOutput]:
    return llm.generate(prompts, how, use_tqdm=False)


TEXT = load_tokenizer(MODEL_PATH).encode(Path(jpaged.__file__).with_name("config.py").read_text())


@functools.cache
def scores(attention: Any, dtype: str, kind: Any) -> np.ndarray:
    """Logprobs of a text under the embedded model."""
    params = jpaged.load_params(MODEL_PATH, dtype=dtype)
    sizes = {
        "max_model_len": 128,
        "num_blocks": 64,
        "token_buckets": (128,),
        "attention": attention,
    }
    sizes |= {"max_num_batched_tokens": 128}
    llm = served(params, ENGINE, kv_cache_dtype=kind, **sizes)
    found = np.concatenate(llm.score([TEXT[i : i + 100] for i in range(0, 400, 100)]))
    llm.close()
    return found


@pytest.mark.parametrize(("form", "most"), [("int8", 0.01), ("fp8", 0.06)])
def test_it_is_close_to_the_models_dtype(form: Any, most: float) -> None:
    """In f32, where nothing else rounds; in bf16 by the C++ kernels no further from that than bf16
    is by itself.
    """
    exact, ours = scores("xla", "float32", None), scores("xla", "float32", form)
    difference = np.abs(ours - exact).mean()
    print(f"{form}: {difference:.2e} nats a token")
    assert 1e-5 < difference < most, "rounding shows, and costs little"
    if unavailable() is None:
        plain, ours = (scores("native", "bfloat16", kind) for kind in (None, form))
        assert np.abs(ours - exact).mean() < 1.5 * np.abs(plain - exact).mean() + most


def prefilled(prompts: list[list[int]], **settings: Any) -> list[tuple[Any, np.ndarray]]:
    """Of each prompt alone the pool that its prefill leaves, and its logprobs; in f32."""
    sizes: dict[str, Any] = {"max_model_len": 256, "num_blocks": 32, "block_size": 16}
    sizes |= {"token_buckets": (256,), "max_num_batched_tokens": 256, "attention": "xla"}
    params = jpaged.load_params(MODEL_PATH, dtype="float32")
    llm = served(params, ENGINE, **sizes | {"enable_prefix_caching": False} | settings)
    how, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for prompt in prompts:
        (out,) = run(llm, [prompt], how)
        assert out.prompt_logprobs is not None
        scored = [next(iter(each.values())).logprob for each in out.prompt_logprobs if each]
        state = llm.session.runner._state
        assert state is not None
        found.append((jax.device_get(state.kv[0]), np.array(scored)))
    llm.close()
    return found


CUT: dict[str, Any] = {"max_num_batched_tokens": 23, "token_buckets": (32,)}


def test_a_chunk_attends_to_what_the_cache_holds() -> None:
    """Cut otherwise, a prompt differs as f32's sums do, whose last bits round a value now and then
    to the next of the 255 that there are. Keys that a chunk had of its own before they were
    rounded, as in the control, would turn many more.
    """
    prompts = [TEXT[i : i + 230] for i in (0, 230, 460)]
    num_layers = jpaged.load_params(MODEL_PATH).config.num_layers

    def turned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The share of each layer's values that differ."""
        return (a != b).reshape(num_layers, -1).mean(axis=1)

    ways = [prefilled(prompts, kv_cache_dtype="int8", **cut) for cut in ({}, CUT)]
    exact = prefilled(prompts, kv_cache_dtype=None)
    for (one, logprobs), (other, found), (plain, _) in zip(*ways, exact, strict=True):
        steps = np.abs(one["kv"].astype(int) - other["kv"])
        assert steps.max() <= 1 and turned(one["kv"], other["kv"]).max() < 2e-3
        assert np.abs(logprobs - found).max() < 0.02
        scales = np.abs(plain["kv"]).max(axis=-1, keepdims=True) / 127
        rounded = np.round(plain["kv"] / np.where(scales == 0, 1, scales))
        assert turned(one["kv"], rounded)[0] < 1e-4, "the first layer's keys come before any"
        assert turned(one["kv"], rounded)[-1] > 0.02


@pytest.mark.parametrize("form", FORMS)
def test_deterministic_to_the_bit_however_it_is_cut(form: Any) -> None:
    """In f32 too, where another number of rows adds in another order."""
    prompts = [TEXT[i : i + 230] for i in (0, 230)]
    asked: dict[str, Any] = {"kv_cache_dtype": form, "deterministic": True}
    ways = [prefilled(prompts, **asked, **cut) for cut in ({}, CUT)]
    for (one, logprobs), (other, found) in zip(*ways, strict=True):
        np.testing.assert_array_equal(logprobs, found)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_twice_the_blocks(params: Params, form: Any) -> None:
    """Of a wider head, whose scales are a thirty-second of it, in the memory of the plain ones."""
    model = config(head_dim=128)
    sizes = EngineConfig(block_size=16, max_num_seqs=64, dtype="bfloat16")
    limits = jpaged.Limits(total=1 << 30, pool=4 << 20)
    plain, ours = (
        jpaged.plan_memory(
            model, dataclasses.replace(sizes, kv_cache_dtype=kind), limits=limits, compiled=False
        )
        for kind in (None, form)
    )
    assert plain.block_bytes / ours.block_bytes == 256 / 132
    assert 1.9 < ours.num_blocks / plain.num_blocks < 2
    llm = served(params, kv_cache_dtype=form)
    state = llm.session.runner
    state.allocate()
    assert state._state is not None
    (pool,) = state.pools
    assert pool.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state._state.kv))
    assert llm.stats()["block_bytes"] == pool.block_bytes == 2 * 2 * 4 * 2 * (32 + 4)
    llm.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8, "token_buckets": (8,)},
        {"num_blocks": CROWDED.num_blocks, "swap_min_tokens": 0},
        {"num_blocks": CROWDED.num_blocks, "swap_min_tokens": 0, "swap_space_gib": 0.01},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=["chunks", "preempted", "swapped", "two devices", "two replicas"],
)
def test_the_same_however_it_is_cut_and_moved(
    params: Params, expected: list[RequestOutput], settings: dict[str, Any]
) -> None:
    llm = served(params, kv_cache_dtype="int8", **settings)
    found = run(llm)
    if "tensor_parallel_size" not in settings:
        assert_same(found, expected)
    else:  # sums over devices are others, and a key at the edge of two of the 255 values turns
        for ours, theirs in zip(found, expected, strict=True):
            for a, b in zip(ours.outputs, theirs.outputs, strict=True):
                assert a.token_ids == b.token_ids
                assert np.abs(a.token_logprobs - b.token_logprobs).max() < 5e-3
    stats = llm.stats()
    swapped = "swap_space_gib" in settings
    assert (stats["preemptions"] > 0) == ("num_blocks" in settings)
    assert (stats["preemptions_swapped"] > 0) == swapped
    assert stats["copied_blocks"] > 0, "samples that write to a block of both"
    llm.close()


def test_hits_and_snapshots_carry_scales(params: Params, expected: list[RequestOutput]) -> None:
    llm = served(params, kv_cache_dtype="int8")
    for prompt in PROMPTS:
        llm.add_request(prompt, DRAWN)
    llm.step()
    snapshot, outs = llm.snapshot(), []
    for _ in range(2):
        found: list[RequestOutput] = []
        while llm.has_unfinished():
            found += llm.step()
        outs.append(sorted(found, key=lambda out: out.request_id))
        llm.restore(snapshot)
    assert_same(outs[0], outs[1])
    llm.close()
    llm = served(params, kv_cache_dtype="int8")
    assert_same(run(llm), expected)
    again = run(llm)
    assert sum(out.num_cached_tokens for out in again) > 0
    for ours, theirs in zip(again, expected, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert np.array_equal(a.token_logprobs, b.token_logprobs)
    llm.close()


@pytest.mark.parametrize("form", FORMS)
def test_bits_depend_on_the_request_alone(params: Params, form: Any) -> None:
    """In bf16, deterministic: each prompt alone, among others that preempt it, and scored."""
    settings: dict[str, Any] = {"kv_cache_dtype": form, "dtype": "bfloat16", "deterministic": True}
    how = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=3)
    llm, crowded = served(params, **settings), served(params, CROWDED, **settings)
    together = run(crowded, how=how)
    assert crowded.stats()["preemptions"] > 0
    for prompt, out in zip(PROMPTS, together, strict=True):
        (alone,), (ours,) = run(llm, [prompt], how)[0].outputs, out.outputs
        assert alone.token_ids == ours.token_ids
        assert np.array_equal(alone.token_logprobs, ours.token_logprobs)
        scored = llm.score([[*prompt, *ours.token_ids]])[0]
        assert np.array_equal(scored[len(prompt) - 1 :], ours.token_logprobs)
    llm.close()
    crowded.close()


@pytest.mark.own_steps
def test_a_swap_that_loses_scales_is_noticed(
    params: Params, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = kv_cache.write_blocks

    def values_alone(pool: Any, ids: Any, blocks: Any, *, num_layers: int) -> Any:
        written = write(pool, ids, blocks, num_layers=num_layers)
        return written | {"scales": pool["scales"]}

    monkeypatch.setattr(kv_cache, "write_blocks", values_alone)
    llm = served(params, CROWDED, kv_cache_dtype="int8", swap_space_gib=0.01)
    with pytest.raises(AssertionError):
        assert_same(run(llm), expected)
    llm.close()


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4': must be int8, fp8 or None"):
        EngineConfig(kv_cache_dtype="int4")  # pyright: ignore[reportArgumentType]
    model = config(head_dim=64)
    for attention in ("tpu", "mosaic_gpu"):
        with pytest.raises(UnsupportedError, match="cannot run: keys and values in int8 with scal"):
            served(
                make_params(0, model, jnp.bfloat16),
                attention=attention,
                kv_cache_dtype="int8",
                block_size=16,
            )
