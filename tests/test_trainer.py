"""logprobs: what a trainer differentiates is what the rollout drew by, and its logits are never all
there.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import ConfigError, ModelConfig, Params, RequestError, SamplingParams
from jpaged.models.forward import bind
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.served import quantized_tree
from kernels_cpu.library import unavailable
from tests.models.test_delta import hybrid
from tests.recurrent import HYBRID
from tests.test_training import logprobs_of
from tests.test_unequal import ALIKE
from tests.tiny import ENGINE, config, make_params, make_prompts

SAMPLES = 3
SAMPLING = SamplingParams(n=SAMPLES, max_tokens=7, temperature=0.7, logprobs_mode="tempered")
PROMPTS = make_prompts(5, 9, 3)
MODELS = {
    "untied": config(),
    "tied": config(tie_word_embeddings=True),
    "experts": config(family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16),
    "states": HYBRID,
}


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    jpaged.release(compiled=True)


@pytest.fixture
def bf16_gradients() -> Iterator[None]:
    """jax 0.11's own attention mixes bf16 with f32 where it is differentiated."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def drawn(model: str = "untied") -> tuple[Params, list[jpaged.RequestOutput], Any]:
    """A model, what it drew, and that as arrays with padding on all sides."""
    params = make_params(0, MODELS[model])
    outs = jpaged.generate(params, PROMPTS, SAMPLING, engine_config=ENGINE, seed=3)
    return params, outs, jpaged.to_arrays(outs, max_prompt_len=11, max_completion_len=8)


def whole(outs: list[jpaged.RequestOutput]) -> list[list[int]]:
    return [out.prompt_token_ids + c.token_ids for out in outs for c in out.outputs]


def difference(a: Any, b: Any) -> float:
    """Return the largest difference of two trees, as a share of the largest entry."""
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(b))
    apart = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)
    return max(jax.tree.leaves(apart)) / size


def test_no_rows() -> None:
    """As of a step whose completions were all dropped."""
    params, outs, _ = drawn()
    sizes = {"max_prompt_len": 1, "max_completion_len": 8}
    arrays = jpaged.to_arrays(outs, **sizes, overflow="drop")
    assert arrays["completion_ids"].shape == (0, 8)
    grads = jax.grad(lambda p: jpaged.logprobs(p, arrays).sum())(params)
    assert not any(jnp.any(x) for x in jax.tree.leaves(grads))
    assert jpaged.logprobs(params, arrays).shape == (0, 8)


@pytest.mark.parametrize("model", MODELS)
def test_equals_rollout_and_score(model: str) -> None:
    params, outs, arrays = drawn(model)
    told = jax.jit(functools.partial(jpaged.logprobs, temperature=0.7, entropy=True, chunk=20))
    logprobs, entropy = told(params, arrays)
    assert logprobs.shape == entropy.shape == (9, 8)
    assert logprobs.dtype == entropy.dtype == np.float32
    np.testing.assert_allclose(logprobs, arrays["logprobs"], atol=2e-5)
    scored = jpaged.score(params, whole(outs), temperature=0.7, entropy=True, engine_config=ENGINE)
    for i, (one, first) in enumerate(zip(scored, arrays["prompt_lens"], strict=True)):
        assert one.entropy is not None
        for mine, theirs in ((logprobs, one.logprobs), (entropy, one.entropy)):
            theirs = theirs[first - 1 :]
            np.testing.assert_allclose(mine[i, : len(theirs)], theirs, atol=2e-5)
            np.testing.assert_array_equal(mine[i, len(theirs) :], 0)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("model", ["tied", "experts"])
def test_gradients(model: str, remat: bool) -> None:
    """They are those of all logits at once, for any weights of the tokens; in chunks of one column,
    of some with padding, and of all.
    """
    params, _, arrays = drawn(model)
    weigh = np.random.default_rng(0).standard_normal((9, 8)).astype(np.float32)
    weigh *= arrays["completion_mask"]

    def weighed(params: Params, chunk: int) -> jax.Array:
        told = jpaged.logprobs(params, arrays, temperature=0.7, chunk=chunk, remat=remat)
        return jnp.sum(weigh * told)

    wanted = jax.jit(jax.grad(lambda p: jnp.sum(weigh * logprobs_of(p, arrays, 0.7))))(params)
    for chunk in (1, 30, 1000):
        found = jax.jit(jax.grad(weighed), static_argnums=1)(params, chunk)
        assert difference(found, wanted) < 2e-6, chunk


def test_entropy_has_a_gradient_and_temperature_too() -> None:
    params, _, arrays = drawn()
    mask = arrays["completion_mask"]

    def told(params: Params, tau: jax.Array) -> jax.Array:
        logprobs, entropy = jpaged.logprobs(params, arrays, temperature=tau, entropy=True, chunk=9)
        return jnp.sum(entropy) + 0.1 * jnp.sum(logprobs)

    def wanted(params: Params, tau: jax.Array) -> jax.Array:
        model = bind(params.config, dict(params))
        total = jnp.float32(0)
        rows = np.zeros((9, 20), np.int32)
        for i, row in enumerate(whole(drawn()[1])):
            rows[i, : len(row)] = row
        logits = model.logits(model(jnp.asarray(rows))[0])
        for i, (n, m) in enumerate(zip(arrays["prompt_lens"], mask.sum(axis=1), strict=True)):
            logp = jax.nn.log_softmax(logits[i, n - 1 : n - 1 + m] / tau)
            picked = logp[np.arange(m), rows[i, n : n + m]]
            total += 0.1 * jnp.sum(picked) - jnp.sum(jnp.exp(logp) * logp)
        return total

    at = params, jnp.float32(0.7)
    both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(*at) for f in (told, wanted)]
    (value, found), (expected_value, expected) = both
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert difference(found[0], expected[0]) < 2e-6
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)


def test_logits_are_never_all_there() -> None:
    """No array of the program, forwards or backwards, is as large as the logits; with one chunk of
    all tokens there is one.
    """
    params, _, arrays = drawn()

    def most(chunk: int) -> int:
        def total(params: Params) -> jax.Array:
            told = jpaged.logprobs(params, arrays, chunk=chunk, entropy=True)
            return sum(map(jnp.sum, told), jnp.zeros(()))

        text = jax.jit(jax.grad(total)).lower(params).as_text()
        shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
        sizes = [[int(n) for n in shape[:-1].split("x")] for shape in shapes]
        weights = [sorted(x.shape) for x in jax.tree.leaves(params)]
        vocab = params.config.vocab_size
        made = [shape for shape in sizes if vocab in shape and sorted(shape) not in weights]
        return max(int(np.prod(shape)) for shape in made)

    logits = 9 * 8 * params.config.vocab_size
    assert most(9) == logits // 8 and most(27) == logits * 3 // 8 and most(72) == logits


def test_remat_keeps_less() -> None:
    params = make_params(0, config(num_layers=6))
    _, _, arrays = drawn()
    arrays = {name: np.repeat(x, 8, axis=0) for name, x in arrays.items()}

    def kept(remat: bool) -> int:
        def total(params: Params) -> jax.Array:
            return jnp.sum(jpaged.logprobs(params, arrays, remat=remat))

        compiled = jax.jit(jax.grad(total)).lower(params).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert kept(True) < 0.6 * kept(False)


@pytest.mark.usefixtures("bf16_gradients")
def test_the_heads_gradient_is_added_up_in_f32() -> None:
    """In bf16 it would lose what is below a 256th of the sum, of every chunk but the first."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn()[0])
    arrays = {name: np.repeat(x, 40, axis=0) for name, x in drawn()[2].items()}

    def head(chunk: int) -> np.ndarray:
        def total(params: Params) -> jax.Array:
            return jnp.sum(jpaged.logprobs(params, arrays, chunk=chunk))

        grads = jax.jit(jax.grad(total))(params)
        return np.asarray(grads["lm_head"]["weight"], np.float32)

    at_once = head(10_000)
    np.testing.assert_allclose(head(1), at_once, atol=np.abs(at_once).max() / 200)


def test_a_temperature_for_each_row() -> None:
    params, _, arrays = drawn()
    taus = np.array([0.5, 1, 2] * 3, np.float32)
    tempered = jax.jit(lambda tau: jpaged.logprobs(params, arrays, temperature=tau))
    told, alone = tempered(taus), {tau: tempered(np.float32(tau)) for tau in (0, 0.5, 1, 2)}
    for i, tau in enumerate(taus.tolist()):
        np.testing.assert_allclose(told[i], alone[tau][i], atol=1e-6)
    np.testing.assert_array_equal(alone[0], alone[1])


def test_arrays_of_dialogs() -> None:
    """Of tokens that were drawn, wherever they lie, at their own places."""
    params, outs, arrays = drawn()
    rows = whole(outs)
    tokens = np.zeros((9, 20), np.int32)
    mask = np.zeros((9, 20), bool)
    for i, (row, n) in enumerate(zip(rows, arrays["prompt_lens"], strict=True)):
        tokens[i, : len(row)] = row
        mask[i, [1, *range(n + 1, len(row))]] = True
    told = jax.jit(functools.partial(jpaged.logprobs, chunk=50))(
        params, {"tokens": tokens, "loss_mask": mask}
    )
    for row, line, m in zip(rows, told, mask, strict=True):
        scored: Any = jpaged.score(params, [row], engine_config=ENGINE)[0]
        np.testing.assert_allclose(line[: len(row)][1:], scored * m[1 : len(row)], atol=2e-5)
        assert not line[len(row) :].any() and line[0] == 0


def test_bad_input() -> None:
    params, _, arrays = drawn()
    lacking = {name: x for name, x in arrays.items() if name != "prompt_lens"}
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"arrays": lacking}, "arrays lack 'prompt_lens': logprobs takes those of to_arrays"),
        ({"arrays": {"tokens": arrays["prompt_ids"]}}, "arrays lack 'loss_mask'"),
        ({"chunk": 0}, "chunk=0: must be at least 1"),
        ({"temperature": -1.0}, r"temperature=-1\.0: must be a finite number"),
        ({"temperature": np.ones(4)}, r"temperature of shape \[4\]: must be a number or \[9\]"),
    )
    for changes, said in refused:
        asked: dict[str, Any] = {"params": params, "arrays": arrays}
        with pytest.raises(RequestError, match=said):
            jpaged.logprobs(**(asked | changes))
    with pytest.raises(ConfigError, match="logprobs takes loaded params"):
        jpaged.logprobs("a/folder", arrays)
    with pytest.raises(ConfigError, match="under jit: make Params by params_from first"):
        jax.jit(jpaged.logprobs)(dict(params), arrays)
    told = jpaged.logprobs(dict(params), arrays, config=params.config)
    np.testing.assert_allclose(told, jax.jit(jpaged.logprobs)(params, arrays), atol=1e-5)


# Of widths that the C++ kernels take.
WIDE: dict[str, Any] = {"head_dim": 32, "intermediate_size": 96}
ROUTED: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_size": 32}
SCALES: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}


def with_mamba(model: ModelConfig) -> ModelConfig:
    """The same with Mamba-2 in its first layer."""
    mamba = MambaConfig(num_heads=4, head_dim=24, state_dim=16, num_groups=2)
    first, *others = model.layers
    return dataclasses.replace(model, layers=[dataclasses.replace(first, mixer=mamba), *others])


IN_BF16 = {
    "dense": config(**WIDE, tie_word_embeddings=True),
    "experts": config(family="qwen3_moe", **WIDE, **ROUTED),
    "windows, others' keys, per-layer embeddings": ALIKE,
    "delta rule": hybrid(config(**WIDE)),
    "scales": config(family="granite", **WIDE, **SCALES),
    "Mamba-2": with_mamba(config(**WIDE)),
}
needs_kernels = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@needs_kernels
@pytest.mark.usefixtures("bf16_gradients")
@pytest.mark.parametrize("model", IN_BF16)
def test_exact_to_the_bit(model: str) -> None:
    """The ratio to the rollout is 1, alone and where a gradient is taken as well, by other chunks
    and temperatures; XLA's own is not. Its gradient is XLA's within the noise of bf16.
    """
    params = make_params(0, IN_BF16[model], jnp.bfloat16)
    settings = dataclasses.replace(ENGINE, deterministic=True)
    outs = jpaged.generate(params, PROMPTS, SAMPLING, engine_config=settings, seed=3)
    arrays = jpaged.to_arrays(outs, max_prompt_len=11, max_completion_len=8)
    weigh = arrays["completion_mask"] * np.linspace(-1, 1, 9, dtype=np.float32)[:, None]

    @functools.partial(jax.jit, static_argnums=1)
    def updated(params: Params, exact: bool) -> Any:
        def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
            new = jpaged.logprobs(params, arrays, temperature=0.7, chunk=30, exact=exact)
            ratio = jnp.exp(new - arrays["logprobs"])
            return jnp.sum(ratio * weigh), ratio

        return jax.grad(loss_of, has_aux=True)(params)

    of_exact, ratio = updated(params, True)
    np.testing.assert_array_equal(ratio, 1)
    of_xla, apart = updated(params, False)
    assert np.abs(apart - 1).max() > 1e-4
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in (of_exact, of_xla)]
    a, b = (x.astype(np.float64) for x in flat)
    assert a @ b > 0.98 * np.linalg.norm(a) * np.linalg.norm(b)
    alone, entropy = jax.jit(
        functools.partial(jpaged.logprobs, temperature=0.7, chunk=72, exact=True, entropy=True)
    )(params, arrays)
    np.testing.assert_array_equal(alone, arrays["logprobs"])
    scored = jpaged.score(
        params, whole(outs), temperature=0.7, entropy=True, engine_config=settings
    )
    for mine, one, first in zip(entropy, scored, arrays["prompt_lens"], strict=True):
        assert one.entropy is not None
        np.testing.assert_array_equal(
            mine[: len(one.entropy) - first + 1], one.entropy[first - 1 :]
        )


@needs_kernels
@pytest.mark.usefixtures("bf16_gradients")
def test_exact_over_updates_to_the_bit() -> None:
    """f32 masters, served in bf16 and changed by an optimizer: a run whose ratios are all 1."""
    params = make_params(0, IN_BF16["dense"])
    settings = dataclasses.replace(ENGINE, dtype="bfloat16", deterministic=True)

    @jax.jit
    def update(params: Params, arrays: Any, gain: Any) -> tuple[Params, jax.Array]:
        def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
            new = jpaged.logprobs(
                params, arrays, temperature=0.7, exact=True, engine_config=settings
            )
            ratio = jnp.exp(new - arrays["logprobs"])
            return -jnp.sum(ratio * gain), ratio

        grads, ratio = jax.grad(loss_of, has_aux=True)(params)
        return jax.tree.map(lambda x, g: x - 0.003 * g, params, grads), ratio

    drawn = set[bytes]()
    for step in range(4):
        outs = jpaged.generate(params, PROMPTS, SAMPLING, engine_config=settings, seed=3)
        arrays = jpaged.to_arrays(outs, max_prompt_len=11, max_completion_len=8)
        gain = arrays["completion_mask"] * (arrays["completion_ids"] % 2 - 0.5).astype(np.float32)
        params, ratio = update(params, arrays, gain)
        np.testing.assert_array_equal(ratio, 1, err_msg=f"update {step}")
        drawn.add(arrays["logprobs"].tobytes())
    assert len(drawn) == 4, "the weights changed"


def test_what_exact_refuses() -> None:
    params, _, arrays = drawn()
    in_bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    refused: tuple[tuple[Any, jpaged.EngineConfig, str], ...] = (
        (params, ENGINE, "float32 on cpu: bits of this model's rows depend on the batch"),
        (in_bf16, dataclasses.replace(ENGINE, quantization="int8"), "has quantization='int8'"),
        (in_bf16, dataclasses.replace(ENGINE, kv_cache_dtype="fp8"), "has kv_cache_dtype='fp8'"),
        (in_bf16, dataclasses.replace(ENGINE, tensor_parallel_size=2), "tensor_parallel_size=2"),
        (in_bf16, dataclasses.replace(ENGINE, deterministic=False), "has deterministic=False"),
        (Params(quantized_tree(params, "int8"), params.config), ENGINE, "loaded in 8 or 4 bits"),
    )
    for tree, settings, said in refused:
        with pytest.raises(jpaged.UnsupportedError, match=f"exact=True: .*{said}") as error:
            jpaged.logprobs(tree, arrays, exact=True, engine_config=settings)
        assert error.value.rule == "exact_forwards_have_the_bits_of_serving"
    with pytest.raises(ConfigError, match="remat=True with exact=True"):
        jpaged.logprobs(params, arrays, exact=True, remat=True)
    with pytest.raises(ConfigError, match="engine_config without exact=True"):
        jpaged.logprobs(params, arrays, engine_config=ENGINE)
