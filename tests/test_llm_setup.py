"""LLM: the ways to make one, its settings, its weights over time, and its end."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jpaged
from jpaged import LLM, CapacityError, ConfigError, Params, RequestError, SamplingParams
from tests.text_model import make_tokenizer, write_folder
from tests.tiny import (
    CONFIG,
    ENGINE,
    compiles,
    config,
    engine,
    make_params,
    make_prompts,
    tokens_of,
)

ENDLESS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
USER = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def params(folder: Path) -> Params:
    return jpaged.load_params(folder)


def generate(llm: LLM, prompts: Any, sampling: Any = ENDLESS) -> list[jpaged.RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False)


def test_unknown_settings(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'gpu_memory_utilization' is not a setting of LLM: did you mean 'memory_uti",
    ):
        LLM(folder, gpu_memory_utilization=0.9)  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        ConfigError, match=r"max_model_len=65: the model has max_position_embeddings=64"
    ):
        LLM(folder, max_model_len=65)


def test_ways_to_name_a_model(folder: Path, params: Params) -> None:
    """A folder with or without a dtype, Params, and a description with raw params."""
    small = vars(engine(num_blocks=16))
    half = LLM(folder, **dict[str, Any](small, dtype="bfloat16"))
    assert half.session.runner.pools[0].dtype == jnp.bfloat16
    for built in (
        LLM(params, **small),
        LLM(CONFIG, params=dict(params), **small),
        LLM(CONFIG.to_hf(), params={"params": dict(params)}, **small),
        LLM(folder, params=dict(params), **small),
    ):
        assert built.model_config == CONFIG and built.weight_version == 1
        served = built.session.runner.params
        assert served is not None and served.norm.scale is params["norm"]["scale"]
    with pytest.raises(ConfigError, match="need config="):
        LLM(dict(params))
    assert LLM(folder, params=dict(params), **small).tokenizer is not None, (
        "the folder that describes them has one"
    )
    assert LLM(CONFIG, params=dict(params), **small).tokenizer is None


def test_default_pool(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without num_blocks: every row at full length, if that fits; memory that holds no block is an
    error.
    """
    built = LLM(params, **vars(engine(num_blocks=None)))
    assert built.stats()["num_blocks"] == 8 * 64 // 4
    monkeypatch.setattr("jpaged.runtime.memory.CPU_POOL_BYTES", 10 * built.stats()["block_bytes"])
    assert LLM(params, **vars(engine(num_blocks=None))).stats()["num_blocks"] == 10
    monkeypatch.setattr("jpaged.runtime.memory.free_memory", lambda: 100_000)
    with pytest.raises(
        ConfigError, match=r"no KV block of .* lower block_size=4, max_num_batched_tokens=16"
    ):
        LLM(params, **vars(engine(num_blocks=None)))


def test_close(folder: Path) -> None:
    llm = LLM(folder, **vars(engine(num_blocks=16)))
    llm.add_request("abc")
    llm.close()
    llm.close()
    for call in (
        lambda: generate(llm, "abc"),
        llm.step,
        llm.stats,
        llm.has_unfinished,
        llm.reset_prefix_cache,
    ):
        with pytest.raises(ConfigError, match="this LLM is closed"):
            call()


def test_the_tokenizer_is_loaded_when_it_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(
        "jpaged.request.inputs.kept_tokenizer",
        lambda source: loads.append(source) or make_tokenizer(None),
    )
    llm = LLM(folder, **vars(engine(num_blocks=16)))
    assert loads == []
    assert llm.tokenizer is llm.tokenizer and loads == [folder]
    with pytest.raises(RequestError, match="the tokenizer has no chat template"):
        llm.chat(USER)


def test_without_a_tokenizer(params: Params) -> None:
    llm = LLM(CONFIG, params=dict(params), **vars(engine(num_blocks=16)))
    for call in (
        lambda: llm.generate("abc"),
        lambda: llm.chat(USER),
        lambda: llm.add_request("abc"),
    ):
        with pytest.raises(RequestError, match="needs a tokenizer: pass tokenizer=, or load"):
            call()
    with pytest.raises(RequestError, match="stop strings needs a tokenizer"):
        llm.generate([1, 2], SamplingParams(stop="a"))


def test_max_model_len_below_the_models_own() -> None:
    llm = LLM(make_params(0, config(num_layers=1)), **vars(engine(max_model_len=20, num_blocks=16)))
    (output,) = generate(
        llm, [[1] * 15], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == 5 and output.outputs[0].finish_reason == "length"
    with pytest.raises(CapacityError, match="max_model_len=20"):
        generate(llm, [[1] * 20])


def test_one_warning_when_no_eos_is_known(params: Params) -> None:
    nameless = config(eos_token_ids=())
    llm = LLM(Params(dict(params), nameless), **vars(engine(num_blocks=16)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.add_request([1], ENDLESS)
        assert not caught, "nobody asks for an end"
        llm.add_request([1], GREEDY)
        llm.add_request([1], GREEDY)
    assert [str(w.message) for w in caught] == [
        "no EOS token is known: generation ends at max_tokens only"
    ]
    llm.close()


def test_calls_are_counted_into_the_seed(params: Params) -> None:
    free = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    settings = vars(engine(num_blocks=32))
    one, same, other = (LLM(params, seed=seed, **settings) for seed in (1, jax.random.key(1), 2))
    streams = [tokens_of(generate(one, ["abc"] * 2, free)) for _ in range(2)]
    assert len({str(tokens) for call in streams for tokens in call}) == 4, "each row of each call"
    assert [tokens_of(generate(same, ["abc"] * 2, free)) for _ in range(2)] == streams
    assert tokens_of(generate(other, ["abc"] * 2, free)) != streams[0]


@pytest.mark.own_steps
def test_update_params(folder: Path) -> None:
    llm = LLM(folder, **vars(engine(num_blocks=64)))
    old, new = llm.session.served.params, make_params(7)
    assert old is not None
    prompt = make_prompts(21)[0]
    before = tokens_of(generate(llm, [prompt], ENDLESS))
    with compiles() as names:
        llm.update_params(new)
        fresh = generate(llm, [prompt], ENDLESS)
        assert fresh[0].num_cached_tokens == 0 and (
            fresh[0].weight_version,
            llm.weight_version,
        ) == (2, 2)
        llm.update_params(jax.tree.map(lambda x: x, new))
        warm = generate(llm, [prompt], ENDLESS)
        assert warm[0].num_cached_tokens == 20 and warm[0].weight_version == 2, (
            "the same objects: the cache stays"
        )
        llm.update_params(dict(old))
        assert tokens_of(generate(llm, [prompt], ENDLESS)) == before and llm.weight_version == 3
    assert names == []
    assert tokens_of(fresh) == tokens_of(warm) != before

    with pytest.raises(ConfigError, match="params of another architecture"):
        llm.update_params(make_params(0, config(rope_theta=5.0)))
    with pytest.raises(ConfigError, match="lack 'embed'"):
        llm.update_params({})
    with pytest.raises(ConfigError, match=r"this engine was built for float32"):
        llm.update_params(make_params(0, dtype=jnp.bfloat16))
    assert tokens_of(generate(llm, [prompt], ENDLESS)) == before and llm.weight_version == 3, (
        "refused is unchanged"
    )

    request = llm.add_request(prompt, ENDLESS)
    llm.step()
    with pytest.raises(
        RequestError, match=r"1 requests are unfinished: finish them, or pass mode='abort'"
    ):
        llm.update_params(new)
    with pytest.raises(RequestError, match=r"mode='now'"):
        llm.update_params(new, mode="now")  # pyright: ignore[reportArgumentType]
    llm.update_params(new, mode="abort")
    (aborted,) = llm.step()
    assert aborted.request_id == request and aborted.outputs[0].finish_reason == "abort"
    assert (
        aborted.weight_version == 3
        and not llm.has_unfinished()
        and llm.stats()["blocks_in_use"] == 0
    )
    assert tokens_of(generate(llm, [prompt], ENDLESS)) == tokens_of(fresh)

    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 0, p), donate_argnums=0)
    trained = step(new)
    with pytest.raises(ConfigError, match=r"deleted array: were the params donated.*update_params"):
        generate(llm, [prompt], ENDLESS)
    llm.update_params(trained)
    assert tokens_of(generate(llm, [prompt], ENDLESS)) == tokens_of(fresh)
    llm.close()


def test_default_sampling_params(folder: Path, params: Params, tmp_path: Path) -> None:
    found = LLM(folder, **vars(ENGINE)).default_sampling_params()
    assert found == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert (
        LLM(CONFIG, params=dict(params), **vars(ENGINE)).default_sampling_params()
        == SamplingParams()
    )
    greedy = write_folder(tmp_path / "greedy")
    (greedy / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "top_k": 50, "top_p": None})
    )
    found = LLM(greedy, **vars(ENGINE)).default_sampling_params()
    assert found == SamplingParams(temperature=0.0, top_k=50)
