"""Heads without a vocabulary: classify, pool and embed, against transformers' numbers and against
hidden states.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jpaged
from jpaged import (
    LLM,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineConfig,
    ModelConfig,
    RequestError,
    UnsupportedError,
)
from jpaged.models.forward import bind
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.params import random_params
from jpaged.models.pooling import DenseConfig, Pooled, PoolingConfig
from jpaged.models.sentence import read_pooling, write_pooling
from jpaged.runtime.mesh import serving_mesh
from tests.golden.heads import (
    BOTH_WAYS,
    DENSE,
    MODELS,
    config_of,
    dense_configs,
    dense_tensors,
    prompts_of,
    tensors_of,
)
from tests.tiny import CONFIG, compiles, make_params

GOLDEN = np.load(Path(__file__).parent / "golden" / "heads.npz")
CLASSIFIERS = [name for name, (_, _, labels) in MODELS.items() if labels]
ENGINE = EngineConfig(block_size=8, num_blocks=64, max_model_len=64)
PROMPTS = [[3], [5, 6, 7, 8, 9], list(range(10, 40)), [5, 6, 7, 8, 9, 10, 11, 12, 13]]


def folder_of(name: str, path: Path, *, modules: bool = False) -> Path:
    """Write the folder of a golden model, with the modules of sentence-transformers if asked."""
    (path / "config.json").write_text(json.dumps(config_of(name)))
    save_file(tensors_of(name), path / "model.safetensors")
    if modules:
        size = config_of(name)["hidden_size"]
        listed: list[tuple[str, str, Any]] = [("Transformer", "", None)]
        listed.append(("Pooling", "1_Pooling", None))
        for i, config in enumerate(dense_configs(size)):
            listed.append(("Dense", f"{i + 2}_Dense", config))
        listed.append(("Normalize", "9_Normalize", None))
        rows = [
            {"idx": i, "name": str(i), "path": at, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, at, _) in enumerate(listed)
        ]
        (path / "modules.json").write_text(json.dumps(rows))
        (path / "1_Pooling").mkdir()
        modes = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
        (path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        tensors = iter(dense_tensors(size))
        for kind, at, config in listed:
            if kind == "Dense":
                (path / at).mkdir()
                (path / at / "config.json").write_text(json.dumps(config))
                save_file(next(tensors), path / at / "model.safetensors")
    return path


def near(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_transformers_logits(name: str, tmp_path: Path) -> None:
    llm = LLM(folder_of(name, tmp_path), max_num_batched_tokens=32, block_size=8, num_blocks=64)
    logits = llm.classify(prompts_of(name))
    near(logits, np.stack([GOLDEN[f"{name}/logits_{i}"] for i in range(3)]))
    again = llm.classify(prompts_of(name)[::-1])[::-1]  # found again, in another order
    near(again, logits)
    assert llm.stats()["prefix_hit_rate"] > 0
    with pytest.raises(RequestError, match=f"generate: .* a head of {MODELS[name][2]} labels"):
        llm.generate([[1]])
    with pytest.raises(RequestError, match=r"score: .* no vocabulary"):
        llm.score([[1, 2]])
    with pytest.raises(RequestError, match=r"beam_search: .* no vocabulary"):
        llm.beam_search([[1, 2]], 2, 3)


@pytest.mark.parametrize("name", ["qwen3_base", BOTH_WAYS])
@pytest.mark.parametrize("devices", [1, 2])
def test_transformers_states(name: str, devices: int, tmp_path: Path) -> None:
    """A file of a base model has names without model., and no head."""
    folder = folder_of(name, tmp_path)
    mesh = None
    if devices > 1:
        mesh = serving_mesh(EngineConfig(data_parallel_size=devices), None)
    llm = LLM(folder, mesh=mesh, block_size=8, num_blocks=64)
    prompts = prompts_of(name)
    states = [GOLDEN[f"{name}/states_{i}"] for i in range(3)]
    for ours, theirs in zip(llm.pool(prompts, at="all"), states, strict=True):
        near(ours, theirs)
    cases: list[tuple[Pooled, list[np.ndarray]]] = [
        ("last", [x[-1] for x in states]),
        ("first", [x[0] for x in states]),
        ("mean", [x.mean(axis=0) for x in states]),
    ]
    for at, theirs in cases:
        near(np.stack(llm.pool(prompts, at=at)), np.stack(theirs))
    with pytest.raises(RequestError, match="generate"):
        llm.generate([[1]])


def test_sentence_transformers_modules(tmp_path: Path) -> None:
    """Mean, two dense layers and normalisation, both ways of attention."""
    folder = folder_of(BOTH_WAYS, tmp_path, modules=True)
    prompts = prompts_of(BOTH_WAYS)
    expected = np.stack([GOLDEN[f"{BOTH_WAYS}/dense_{i}"] for i in range(3)])
    llm = LLM(folder, block_size=8, num_blocks=64)
    near(llm.embed(prompts), expected)
    params = jpaged.load_params(folder)
    assert params.config.pooling is not None and len(params.config.pooling.dense) == len(DENSE)
    near(jpaged.embed(params, prompts, engine_config=ENGINE), expected)
    short = jpaged.embed(params, prompts, dimensions=5, engine_config=ENGINE)
    cut = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    near(short, cut)
    # The folder that save_params writes says the same.
    jpaged.save_params(params, tmp_path / "saved")
    saved = jpaged.load_params(tmp_path / "saved")
    assert saved.config == params.config
    near(jpaged.embed(saved, prompts, engine_config=ENGINE), expected)
    config = ModelConfig.coerce(folder)
    assert config == params.config and not config.is_causal
    layers = [layer.mixer for layer in config.layers]
    assert [x.window for x in layers if isinstance(x, AttentionConfig)][:2] == [5, None]
    with pytest.raises(RequestError, match="dimensions=25: must be at least 1 and at most 24"):
        llm.embed(prompts, dimensions=25)


def test_a_sequence_that_sees_both_ways_is_computed_at_once() -> None:
    """Whatever else a step has; and one that no step holds is refused by name."""
    params = random_params(ModelConfig.from_hf(config_of(BOTH_WAYS)))
    config = EngineConfig(block_size=8, num_blocks=64, max_num_batched_tokens=48)
    lists = [list(range(1, 1 + n)) for n in (30, 30, 48, 5, 17, 48)]
    states = jpaged.hidden(params, lists, engine_config=config)
    for tokens, ours in zip(lists, states, strict=True):
        model = bind(params.config, dict(params))
        near(np.asarray(ours), np.asarray(model(jnp.asarray(tokens))[0]))
    with pytest.raises(CapacityError, match=r"sequence 1 of 49 tokens .*max_num_batched_tokens=48"):
        jpaged.hidden(params, [[1], [1] * 49], engine_config=config)


@pytest.fixture(scope="module")
def params() -> jpaged.Params:
    return make_params(0)


def test_pools_of_hidden_states(params: jpaged.Params) -> None:
    hidden = [np.asarray(x) for x in jpaged.hidden(params, PROMPTS, engine_config=ENGINE)]
    size = params.config.hidden_size
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((size, 3)).astype(np.float32)
    pool = lambda **asked: jpaged.pool(params, PROMPTS, engine_config=ENGINE, **asked)  # noqa: E731
    for ours, theirs in zip(pool(at="all", head=matrix), hidden, strict=True):
        near(ours, theirs @ matrix)
    for head in (matrix[:, :1], matrix[:, 0], jnp.asarray(matrix[:, 0])):
        for ours, theirs in zip(pool(at="all", head=head), hidden, strict=True):
            near(ours, theirs @ matrix[:, 0])
    near(np.stack(pool(head=matrix)), np.stack([x[-1] @ matrix for x in hidden]))
    near(np.stack(pool(at="mean", head=matrix)), np.stack([x.mean(0) @ matrix for x in hidden]))
    value = jax.jit(lambda x: jnp.tanh(x @ matrix)[:, 1])
    for ours, theirs in zip(pool(at="all", head=value), hidden, strict=True):
        near(ours, np.tanh(theirs @ matrix)[:, 1])
    near(np.stack(pool(head=value)), np.stack([np.tanh(x[-1] @ matrix)[1] for x in hidden]))
    assert pool(head=matrix)[0].shape == (3,)
    assert jpaged.pool(params, [], engine_config=ENGINE) == []


def test_bits_are_a_sequence_s_own(params: jpaged.Params) -> None:
    """Whatever it is pooled beside, and in however many parts the call is computed."""
    config = EngineConfig(block_size=8, num_blocks=64, max_num_batched_tokens=16)
    lists = [[1 + (i * j) % 90 for j in range(1, 2 + i % 40)] for i in range(60)]
    for at in ("last", "mean"):
        whole = jpaged.embed(params, lists, pooling=at, engine_config=config)
        some = jpaged.embed(params, lists[37:45], pooling=at, engine_config=config)
        np.testing.assert_array_equal(whole[37:45], some)
        np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, rtol=1e-6)


def test_new_weights_are_used_at_once_and_nothing_compiles() -> None:
    raw = config_of("qwen3_reward")
    config = ModelConfig.from_hf(raw)
    first, second = random_params(config, 0), random_params(config, 1)
    lists = [[1, 2, 3], [4, 5, 6, 7]]
    jpaged.classify(first, lists, engine_config=ENGINE)
    with compiles() as names:
        rewards = jpaged.classify(second, lists, engine_config=ENGINE)
    assert names == []
    model = bind(config, dict(second))
    dense = [model.logits(model(jnp.asarray(x))[0][-1:])[0] for x in lists]
    near(rewards, np.stack(dense))
    states = jpaged.hidden(second, lists, engine_config=ENGINE)
    near(np.asarray(jpaged.logits(second, states[0]))[-1], rewards[0])


def test_a_reward_head_trains() -> None:
    """The head and the model below it have gradients, by the public parts."""
    config = ModelConfig.from_hf(config_of("qwen3_reward"))
    params = random_params(config, 0)
    better, worse = jnp.asarray([[5, 6, 7]]), jnp.asarray([[5, 6, 8]])

    def loss(params: jpaged.Params) -> jax.Array:
        model = bind(params.config, dict(params))
        rewards = [model.logits(model(x)[0][:, -1])[:, 0] for x in (better, worse)]
        return -jnp.mean(jax.nn.log_sigmoid(rewards[0] - rewards[1]))

    def step(params: jpaged.Params) -> jpaged.Params:
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, jax.grad(loss)(params))

    before, fitted = loss(params), params
    for _ in range(8):
        fitted = jax.jit(step)(fitted)
    assert loss(fitted) < before / 2
    reward, other = jpaged.classify(fitted, [better[0], worse[0]], engine_config=ENGINE)[:, 0]
    assert reward > other


def test_async(params: jpaged.Params) -> None:
    asyncio.run(_from_a_loop(params))


async def _from_a_loop(params: jpaged.Params) -> None:
    async with jpaged.AsyncLLM(params, block_size=8, num_blocks=64) as llm:
        near(await llm.embed(PROMPTS), jpaged.embed(params, PROMPTS, engine_config=ENGINE))
        (values,) = await llm.pool([PROMPTS[1]], head=np.ones(CONFIG.hidden_size), at="all")
        assert values.shape == (5,)
        with pytest.raises(RequestError, match="classify: this model has no head of labels"):
            await llm.classify(PROMPTS)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"at": "middle"}, "at='middle': must be 'last', 'first', 'mean' or 'all'"),
        ({"head": np.ones((3, 2))}, r"head=an array \[3, 2\]: must be an array \["),
        ({"head": 3}, "head=int: must be an array"),
        ({"head": lambda x: x[:2]}, r"head returned \(2, \d+\) for states of \[32, "),
        ({"head": lambda x: 1}, "head returned int"),
    ],
)
def test_bad_pools(params: jpaged.Params, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        jpaged.pool(params, PROMPTS, engine_config=ENGINE, **asked)


def test_bad_embeddings(params: jpaged.Params) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pooling": "max"}, "pooling='max'"),
        ({"normalize": 1}, "normalize=1: must be"),
        ({"dimensions": 0}, "dimensions=0: must be at least 1"),
    ]
    for asked, message in cases:
        with pytest.raises(RequestError, match=message):
            jpaged.embed(params, PROMPTS, engine_config=ENGINE, **asked)
    with pytest.raises(CapacityError, match="longer than max_model_len=64"):
        jpaged.embed(params, [[1] * 65], engine_config=ENGINE)
    assert jpaged.embed(params, [], engine_config=ENGINE).shape == (0, CONFIG.hidden_size)
    assert jpaged.embed(params, [], dimensions=3, engine_config=ENGINE).shape == (0, 3)


def test_configs() -> None:
    """Every architecture of a family with another end, read and written back."""
    for name, (_, architecture, labels) in MODELS.items():
        config = ModelConfig.from_hf(config_of(name))
        assert config.num_labels == labels and config != ModelConfig.from_hf(
            config_of(name) | {"architectures": None}
        )
        assert ModelConfig.from_hf(config.to_hf()) == config
        assert config.to_hf()["architectures"][0].replace("Text", "") == architecture.replace(
            "Text", ""
        )
    raw = config_of("qwen3_reward")
    assert ModelConfig.from_hf(raw | {"id2label": None}).num_labels == 2  # transformers' default
    with pytest.raises(ConfigError, match="num_labels=0"):
        ModelConfig.from_hf(raw | {"id2label": {}})
    with pytest.raises(ConfigError, match="use_bidirectional_attention=True"):
        ModelConfig.from_hf(raw | {"use_bidirectional_attention": True})
    with pytest.raises(ConfigError, match="takes 3 numbers where there are 72"):
        pooling = PoolingConfig(dense=(DenseConfig(inputs=3, outputs=2),))
        ModelConfig(**vars_of(ModelConfig.from_hf(raw)), pooling=pooling)


def vars_of(config: ModelConfig) -> dict[str, Any]:
    names = ("family", "vocab_size", "hidden_size", "max_position_embeddings", "layers")
    return {name: getattr(config, name) for name in names}


def test_modules_that_are_not_served(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    pooling = PoolingConfig(
        at="first",
        dense=(DenseConfig(inputs=4, outputs=2, activation="gelu"),),
        normalize=False,
    )
    write_pooling(tmp_path, pooling)
    assert read_pooling(tmp_path) == pooling
    file = tmp_path / "modules.json"
    listed = json.loads(file.read_text())
    for rows, message in (
        ([*listed, {"path": "", "type": "sentence_transformers.models.LSTM"}], "LSTM"),
        ([listed[2], listed[1]], "in this order"),
    ):
        file.write_text(json.dumps(rows))
        with pytest.raises(UnsupportedError, match=message):
            read_pooling(tmp_path)
    for text, message in (
        ("[1]", "no list of modules"),
        (json.dumps([{"path": "../x", "type": "Pooling"}]), "not inside the folder"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_pooling(tmp_path)
    file.write_text(json.dumps(listed))
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedError, match="pooling by pooling_mode_max_tokens"):
        read_pooling(tmp_path)
