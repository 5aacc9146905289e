"""LoRA as an argument: adapters on top of params, against weights that they were merged into."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import Adapter, ConfigError, Params, RequestError, SamplingParams
from jpaged.kept import sessions as kept_sessions
from jpaged.models.layers.low_rank import LowRank
from jpaged.models.lora import targets
from jpaged.models.params import nest
from jpaged.models.quantized import dequantized, is_quantized
from jpaged.models.served import quantized_tree
from tests.tiny import (
    ENGINE,
    assert_idle,
    assert_same,
    compiles,
    config,
    engine,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

ONE_LAYER = config(num_layers=1)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=8, logprobs=3, seed=3)
PROMPTS = make_prompts(1, 4, 17, 30)
SIZES: dict[str, Any] = vars(ENGINE)


def make_lora(
    seed: int,
    rank: int = 4,
    model: Any = ONE_LAYER,
    parts: Any = None,
    extra: tuple[str, ...] = (),
) -> Any:
    """Pairs of every part that can have one, strong enough to change tokens; extra: as in
    EngineConfig.lora_extra.
    """
    rng, found = np.random.default_rng([7, seed]), {}
    for name, target in targets(model, extra).items():
        if parts is None or any(part in name for part in parts):
            outputs, inputs = target.sides
            a = rng.standard_normal((rank, *inputs)) / np.sqrt(np.prod(inputs))
            b = rng.standard_normal((*outputs, rank)) / np.sqrt(rank)
            found[name] = {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32)}
    return nest(found)


@pytest.fixture(scope="module")
def params() -> Iterator[Params]:
    jpaged.release(compiled=True)
    yield make_params(0, ONE_LAYER)
    jpaged.release(compiled=True)


@pytest.fixture(scope="module")
def llm(params: Params) -> jpaged.LLM:
    return served(params, max_loras=3)


def served(params: Any, **settings: Any) -> jpaged.LLM:
    return jpaged.LLM(params, **SIZES | {"max_lora_rank": 4, **settings})


def generate(params: Any, prompts: Any, sampling: Any = GREEDY, **options: Any) -> Any:
    options.setdefault("engine_config", ENGINE)
    return jpaged.generate(params, prompts, sampling, **options)


def test_equals_merged_weights(params: Params) -> None:
    """Greedy and sampled, with a scale, one for all and one each, rows without any among them."""
    first, second = Adapter(make_lora(1), 0.5), make_lora(2, rank=3, parts=["attention.q", "down"])
    each = [first, None, second, first]
    for sampling in (GREEDY, SAMPLED):
        outs = generate(params, PROMPTS, sampling, lora=each)
        for i, lora in enumerate(each):
            own = params if lora is None else jpaged.merged(params, lora)
            # Randomness is of a prompt's place: all prompts run, one is compared.
            expected = generate(own, PROMPTS, sampling)
            assert_same([outs[i]], [expected[i]])
        whole = generate(params, PROMPTS, sampling, lora=first)
        assert_same(whole, generate(jpaged.merged(params, first), PROMPTS, sampling))
    plain = tokens_of(generate(params, PROMPTS))
    assert tokens_of(generate(params, PROMPTS, lora=first)) != plain, "it changes nothing"


def test_scores(params: Params) -> None:
    lora = make_lora(3)
    lists = make_prompts(5, 20, seed=1)
    found = jpaged.score(params, lists, lora=[lora, None], engine_config=ENGINE)
    merged = jpaged.score(jpaged.merged(params, lora), lists, engine_config=ENGINE)
    plain = jpaged.score(params, lists, engine_config=ENGINE)
    np.testing.assert_allclose(found[0], merged[0], atol=1e-4)
    np.testing.assert_allclose(found[1], plain[1], atol=1e-5)
    assert np.abs(np.asarray(merged[0]) - np.asarray(plain[0])).max() > 0.01


def test_new_weights_compile_nothing(params: Params) -> None:
    """As in training: new adapters every step, with the base for reference; and the very same
    objects are the same version, whose prefixes stay.
    """
    jpaged.release(compiled=True)
    generate(params, PROMPTS, lora=make_lora(1))
    jpaged.score(params, PROMPTS, lora=make_lora(1), engine_config=ENGINE)
    generate(params, PROMPTS)
    with compiles() as names:
        for seed in range(2, 4):
            lora = make_lora(seed)
            first = generate(params, PROMPTS, lora=lora)
            again = generate(params, PROMPTS, lora=lora)
            jpaged.score(params, PROMPTS, lora=lora, engine_config=ENGINE)
            assert tokens_of(first) == tokens_of(again)
            assert first[2].adapter_version == again[2].adapter_version > 0
            assert first[2].num_cached_tokens == 0 < again[2].num_cached_tokens
            base = generate(params, PROMPTS)
            assert base[2].adapter_version == 0 and base[2].num_cached_tokens > 0
    assert names == []
    assert len(kept_sessions()) == 1, "with and without adapters is one engine"
    assert engine_of(kept_sessions()[-1]).replicas[0].blocks.num_used == 0


def test_by_name(params: Params, llm: jpaged.LLM) -> None:
    loras = {name: make_lora(i) for i, name in enumerate("abcde")}
    for name, lora in loras.items():
        llm.add_adapter(name, lora)
    prompts = [{"prompt_token_ids": PROMPTS[2], "adapter": name} for name in "abcdeab"]
    outs = llm.generate([*prompts, PROMPTS[2]], GREEDY, use_tqdm=False)
    for out, name in zip(outs, "abcdeab", strict=False):
        expected = generate(jpaged.merged(params, loras[name]), [PROMPTS[2]])
        assert tokens_of([out]) == tokens_of(expected) and out.adapter == name
    assert tokens_of(outs[-1:]) == tokens_of(generate(params, [PROMPTS[2]]))
    assert outs[-1].adapter is None
    assert llm.stats()["adapter_loads"] >= 5, "five take turns in three slots"
    assert_idle(llm)


def test_a_reload_under_a_name(params: Params, llm: jpaged.LLM) -> None:
    """No stale KV: others' cached prefixes stay, its own do not count."""
    old, new = make_lora(11), make_lora(12)
    prompts = [{"prompt_token_ids": PROMPTS[3], "adapter": name} for name in ("x", "y")]
    llm.add_adapter("x", old)
    llm.add_adapter("y", make_lora(13))
    llm.generate(prompts, GREEDY, use_tqdm=False)
    version = llm.add_adapter("x", new)
    x, y = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of([x]) == tokens_of(generate(jpaged.merged(params, new), [PROMPTS[3]]))
    assert x.num_cached_tokens == 0 < y.num_cached_tokens
    assert x.adapter_version == version == llm.stats()["adapters"]["x"] > y.adapter_version
    # One that runs keeps the weights that it began with.
    request_id = llm.add_request(prompts[0], GREEDY)
    llm.step()
    llm.add_adapter("x", old)
    llm.remove_adapter("y")
    (out,) = [out for _ in range(40) for out in llm.step()]
    assert out.request_id == request_id and tokens_of([out]) == tokens_of([x])
    with pytest.raises(RequestError, match=r"adapter 'y' is unknown"):
        llm.generate(prompts[1], GREEDY, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.middle
def test_beams_and_samples_and_prompt_logprobs(params: Params) -> None:
    lora = make_lora(4)
    own, settings = jpaged.merged(params, lora), engine(max_logprobs=12)
    how: Any = {"beam_width": 3, "max_tokens": 5, "engine_config": settings}
    found = jpaged.beam_search(params, PROMPTS[1:3], lora=lora, **how)
    assert_same(found, jpaged.beam_search(own, PROMPTS[1:3], **how))
    asked = SamplingParams(n=3, max_tokens=5, prompt_logprobs=2, seed=1, presence_penalty=0.5)
    outs = generate(params, PROMPTS[1:3], asked, lora=lora, engine_config=settings)
    expected = generate(own, PROMPTS[1:3], asked, engine_config=settings)
    assert_same(outs, expected)
    for out, other in zip(outs, expected, strict=True):
        pairs = zip(out.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        for top, same in pairs:
            assert list(top) == list(same)
            a, b = ([x.logprob for x in each.values()] for each in (top, same))
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_snapshot_and_sleep(params: Params, llm: jpaged.LLM) -> None:
    """What the tables held when a snapshot was taken comes back, and after a sleep."""
    for i, name in enumerate("stuv"):
        llm.add_adapter(name, make_lora(20 + i))
    prompts = [{"prompt_token_ids": PROMPTS[1], "adapter": name} for name in "stuv"]
    expected = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False))
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts[:3]]
    for _ in range(3):
        llm.step()
    snapshot = llm.snapshot()
    while llm.has_unfinished():
        llm.step()
    llm.generate(prompts[3], GREEDY, use_tqdm=False)  # in a slot of one of the others
    llm.restore(snapshot)
    outs = {}
    while llm.has_unfinished():
        outs |= {out.request_id: out for out in llm.step()}
    assert tokens_of([outs[i] for i in ids]) == expected[:3]
    llm.sleep()
    llm.wake()
    assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    assert_idle(llm)


def test_what_is_refused(params: Params, llm: jpaged.LLM) -> None:
    good = make_lora(1)
    q = good["layers"]["0"]["attention"]["q"]

    def refused(source: Any, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            llm.add_adapter("bad", source)

    refused({}, "no weights")
    refused({"layers.0.attention.q": {"a": q["a"]}}, r"lacks its B")
    refused({"layers.0.attention.q": (q["b"], q["a"])}, r"A is of shape")
    refused({"layers.0.attention.x": q}, r"is no weight of this model: a layer has attention.k")
    refused({"layers.7.attention.q": q}, r"is no weight of this model")
    refused({"norm.scale": q}, r"this weight cannot have an adapter")
    refused({"layers.0.attention.q": {**q, "m": q["a"]}}, r"expected a pair")
    refused(make_lora(1, rank=5), r"rank 5 is above max_lora_rank=4")
    refused(Adapter(good, float("nan")), r"scale=nan")
    refused({"layers.0.attention.q": (q["a"], np.zeros(q["b"].shape, np.int32))}, r"dtype int32")
    for name in ("", 3, "a\n"):
        with pytest.raises(ConfigError, match="adapter name"):
            llm.add_adapter(name, good)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="2 adapters in lora for 1 prompts"):
        generate(params, PROMPTS[:1], lora=[good, good])
    with pytest.raises(RequestError, match="adapter 'z' is unknown"):
        llm.generate({"prompt_token_ids": [1], "adapter": "z"}, use_tqdm=False)
    with pytest.raises(RequestError, match="adapter 'z' is unknown"):
        llm.score([{"prompt_token_ids": [1, 2], "adapter": "z"}])
    plain = jpaged.LLM(params, **SIZES)
    with pytest.raises(ConfigError, match="max_loras=0"):
        plain.add_adapter("a", good)
    with pytest.raises(ConfigError, match="rank 4 is above max_lora_rank=2"):
        generate(params, [[1]], lora=good, engine_config=engine(max_loras=1, max_lora_rank=2))
    with pytest.raises(ConfigError, match="tracer"):
        jax.jit(lambda lora: llm.add_adapter("a", lora))(good)


def test_fused_and_flat_forms(params: Params) -> None:
    """One pair for a whole fused weight; flat names; A and B as a tuple, their axes as one."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((2, 32)) / 6, jnp.float32)
    b = jnp.asarray(rng.standard_normal((2, 4, 16, 2)), jnp.float32)
    out = make_lora(1, parts=["out"])["layers"]["0"]["attention"]["out"]
    flat = {
        "layers.0.attention.qkv": (a, b),
        "layers.0.attention.out": [out["a"].reshape(4, -1), out["b"]],
    }
    nested = {"layers": [{"attention": {"qkv": {"A": a, "B": b}, "out": out}}]}
    merged = jpaged.merged(params, nested)
    qkv = params["layers"]["0"]["attention"]["qkv"] + jnp.einsum("kgdr,re->kgde", b, a)
    np.testing.assert_allclose(merged["layers"]["0"]["attention"]["qkv"], qkv, atol=1e-5)
    expected = generate(merged, PROMPTS)
    for form in (flat, nested):
        assert_same(generate(params, PROMPTS, lora=form), expected)


def test_to_train_from(params: Params) -> None:
    """It begins as the model itself, and gradients flow into both of its sides."""
    tree = jpaged.initial_lora(ONE_LAYER, 2, jax.random.key(0))
    assert set(tree["layers"]["0"]["attention"]) == {"q", "k", "v", "out"}
    assert_same(generate(params, PROMPTS, lora=tree), generate(params, PROMPTS))
    tree = jax.tree.map(lambda x: x + 0.1, tree)

    def loss(tree: Any) -> jax.Array:
        return jnp.sum(jpaged.merged(params, tree)["layers"]["0"]["attention"]["qkv"] ** 2)

    grads = jax.jit(jax.grad(loss))(tree)
    assert all(
        jnp.abs(g).max() > 0 for g in jax.tree.leaves(grads["layers"]["0"]["attention"]["q"])
    )
    with pytest.raises(ConfigError, match="'lm_head'"):
        jpaged.initial_lora(ONE_LAYER, 2, jax.random.key(0), parts=["lm_head"])


MESHES = [
    pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.middle),
    pytest.param({"data_parallel_size": 2}, marks=pytest.mark.middle),
    # Each KV head on two devices, and two replicas of that.
    pytest.param({"tensor_parallel_size": 4, "data_parallel_size": 2}, marks=pytest.mark.middle),
]


@pytest.mark.parametrize("mesh", MESHES)
def test_on_meshes(mesh: dict[str, Any], params: Params, llm: jpaged.LLM) -> None:
    """More adapters than slots, each replica with tables of its own: as on one device."""
    where = served(params, max_loras=2, **mesh)
    for i, name in enumerate("fgh"):
        for each in (llm, where):
            each.add_adapter(name, make_lora(30 + i))
    names = [*"fghfgh", None, None]
    prompts = [{"prompt_token_ids": p, "adapter": n} for n in names for p in PROMPTS[1:3]]
    assert_same(
        where.generate(prompts, GREEDY, use_tqdm=False),
        llm.generate(prompts, GREEDY, use_tqdm=False),
    )
    for ours, theirs in zip(where.score(prompts), llm.score(prompts), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert_idle(where)


@pytest.mark.parametrize("mesh", MESHES)
def test_copied_pairs_on_meshes(
    mesh: dict[str, Any], params: Params, llm: jpaged.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows than a third of the slots: each takes a copy of its own pair, from tables whose
    outputs or inputs lie on several devices.
    """
    traced, has_few = set(), LowRank._has_few

    def spied(self: LowRank, tokens: int) -> bool:
        traced.add((tokens, has_few(self, tokens)))
        return has_few(self, tokens)

    monkeypatch.setattr(LowRank, "_has_few", spied)
    where = served(params, max_loras=12, max_num_seqs=4, seq_buckets=(4,), **mesh)
    for i, name in enumerate("pqr"):
        for each in (llm, where):
            each.add_adapter(name, make_lora(40 + i))
    prompts = [
        {"prompt_token_ids": p, "adapter": n}
        for p, n in zip(PROMPTS, ["r", "p", None, "q"], strict=True)
    ]
    got = where.generate(prompts, GREEDY, use_tqdm=False)
    assert (4, True) in traced, "decodes of four rows"
    assert_same(got, llm.generate(prompts, GREEDY, use_tqdm=False))
    assert_idle(where)


@pytest.mark.middle
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_on_a_quantised_base(form: Any) -> None:
    """The adapter is exact on top of what the quantised weights stand for."""
    model = config(num_layers=1, head_dim=32, intermediate_size=64)
    base, lora = make_params(0, model), make_lora(1, model=model)
    tree = jax.tree.map(
        lambda x: dequantized(x.values, x.scales, x.form) if is_quantized(x) else x,
        quantized_tree(base, form),
        is_leaf=is_quantized,
    )
    merged = jpaged.merged(Params(tree, model), lora)
    outs = generate(base, PROMPTS, lora=lora, engine_config=engine(quantization=form))
    assert_same(outs, generate(merged, PROMPTS))


@pytest.mark.middle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_the_row_alone(dtype: str) -> None:
    """With deterministic serving: on whatever slot an adapter lies in, what else is in the batch,
    and rows without one not even on whether others have any.
    """
    model = config(num_layers=1, head_dim=32, intermediate_size=64)
    params = make_params(0, model, dtype)
    llm = served(params, max_loras=3, deterministic=True)
    for i, name in enumerate("abc"):
        llm.add_adapter(name, make_lora(i, model=model))

    def bits(*names: str | None) -> list[Any]:
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": PROMPTS[2], "adapter": name} for name in names]
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [(out.outputs[0].token_ids, out.outputs[0].token_logprobs.tobytes()) for out in outs]

    (plain,) = bits(None)
    together = bits("a", "b", "c", None)
    assert together[3] == plain
    llm.remove_adapter("a")
    for i, name in enumerate("dec"):  # others in the first slots
        llm.add_adapter(name, make_lora([3, 1, 2][i], model=model))
    assert bits("d", "e", "c")[1:] == together[1:3]
    assert bits("e") == together[1:2]


def test_scores_of_bf16() -> None:
    """By the kernels that serve it: as near to f32 as the model is without an adapter."""
    model = config(head_dim=32, intermediate_size=64)
    params, lora = make_params(0, model), Adapter(make_lora(3, model=model), 0.5)
    lists = make_prompts(12, 5, 20, 9, seed=1)
    rough = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    fine = jax.tree.map(lambda x: x.astype(jnp.float32), rough)

    def scores(params: Any, **how: Any) -> np.ndarray:
        return np.concatenate(jpaged.score(params, lists, engine_config=ENGINE, **how))

    each = [lora, None, lora, lora]
    wanted = scores(jpaged.merged(fine, lora))
    wanted[11:15] = scores(fine)[11:15]
    noise = np.abs(scores(rough) - scores(fine)).max()
    assert np.abs(scores(rough, lora=each) - wanted).max() < 2 * noise
    assert np.abs(wanted - scores(fine)).max() > 10 * noise, "it changes more than that"
