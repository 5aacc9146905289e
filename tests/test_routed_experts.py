"""Routes: which experts each token took, whole wherever its row has been; and replayed by a
trainer, whose router weighs them.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

import jpaged
from jpaged import LLM, ModelConfig, Params, RequestOutput, SamplingParams, UnsupportedError
from jpaged.models.forward import IN_TRAINING, bind
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.mlp import MLPConfig
from kernels_cpu.library import unavailable
from tests.byte_tokenizer import EOS, make_tokenizer
from tests.golden.configs import CONFIGS
from tests.golden.make_golden_routes import ROUTED
from tests.golden.weights import state_dict
from tests.tiny import CROWDED, ENGINE, compiles, config, make_params, make_prompts

MIXTURE = config(
    family="qwen3_moe", num_layers=3, num_experts=6, experts_per_token=2, expert_size=16
)
PARAMS = make_params(4, MIXTURE)
PROMPTS = make_prompts(5, 17, 4, 9)
SETTINGS = dataclasses.replace(ENGINE, routed_experts=True)
ASKED = [
    SamplingParams(temperature=0.9, max_tokens=10, ignore_eos=True, seed=i, n=1 + i % 2)
    for i in range(4)
]
STORED = Path(__file__).parent / "golden" / "routes.npz"


def served(params: Params = PARAMS, **changes: Any) -> LLM:
    return LLM(params, **vars(dataclasses.replace(SETTINGS, **changes)))


def run(llm: LLM, asked: Any = ASKED, prompts: Any = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, asked, use_tqdm=False)


def routes_of(outs: list[RequestOutput]) -> list[Any]:
    """The tokens of each completion, with all routes from the prompt's first token on."""
    found = []
    for out in outs:
        for c in out.outputs:
            assert out.prompt_routed_experts is not None and c.routed_experts is not None
            assert len(out.prompt_routed_experts) == len(out.prompt_token_ids)
            assert len(c.routed_experts) == len(c.token_ids)
            whole = np.concatenate([out.prompt_routed_experts, c.routed_experts])
            assert (whole[:-1] >= 0).all() and (whole[-1] == -1).all()
            found.append((c.token_ids, whole.tolist()))
    return found


@functools.cache
def expected() -> list[Any]:
    llm = served(enable_prefix_caching=False)
    found = routes_of(run(llm))
    llm.close()
    return found


@pytest.mark.parametrize("name", ROUTED)
def test_transformers_choice(name: str, tmp_path: Path) -> None:
    """Every token of a prompt takes the same experts in each layer, in chunks and found again."""
    with np.load(STORED, allow_pickle=False) as arrays:
        assert json.loads(str(arrays["meta"]))[name] == CONFIGS[name], "run make_golden.py routes"
        tokens, wanted = arrays[f"{name}/token_ids"].tolist(), arrays[f"{name}/experts"]
    save_file(state_dict(name, CONFIGS[name]), tmp_path / "model.safetensors")
    raw = CONFIGS[name] | {"torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    llm = served(
        jpaged.load_params(tmp_path), max_num_batched_tokens=24, token_buckets=(24,), num_blocks=64
    )
    outs = [run(llm, SamplingParams(temperature=0, max_tokens=1), [tokens])[0] for _ in range(2)]
    for out in outs:
        assert out.prompt_routed_experts is not None
        np.testing.assert_array_equal(
            np.sort(out.prompt_routed_experts, axis=2), np.sort(wanted, axis=2)
        )
    assert outs[1].num_cached_tokens > 30
    llm.close()


VARIED: dict[str, dict[str, Any]] = {
    "prefix hits": {},
    "chunks": {"max_num_batched_tokens": 7, "token_buckets": (7,)},
    "several steps": {"decode_steps": 4},
    "mixed": {"mixed": True},
    "guesses": {"speculative": {"method": "ngram", "num_tokens": 3}},
    "separate draw": {"separate_draw": True},
}


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
def test_wherever_a_row_has_been(changes: dict[str, Any]) -> None:
    llm = served(**changes)
    _, again = calls = [run(llm) for _ in range(2)]
    assert [routes_of(outs) for outs in calls] == [expected()] * 2
    assert all(out.num_cached_tokens for out in again if len(out.prompt_token_ids) > 4)
    llm.close()


@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_preempted_forked_and_swapped(swap: float) -> None:
    asked = [dataclasses.replace(one, n=3, max_tokens=20) for one in ASKED]
    settings = dataclasses.replace(CROWDED, routed_experts=True, swap_space_gib=swap)
    llm = LLM(PARAMS, **vars(settings))
    found = routes_of(run(llm, asked))
    stats = llm.stats()
    assert stats["preemptions"] > 0 and (swap == 0 or stats["preemptions_swapped"] > 0)
    roomy = LLM(PARAMS, **vars(dataclasses.replace(settings, num_blocks=200)))
    assert found == routes_of(run(roomy, asked))


def test_snapshots_and_outputs_that_go_on() -> None:
    llm = served()
    ids = [llm.add_request(prompt, one) for prompt, one in zip(PROMPTS, ASKED, strict=True)]
    for _ in range(5):
        llm.step()
    snapshot = llm.snapshot()
    for _ in range(2):
        done: dict[str, RequestOutput] = {}
        while llm.has_unfinished():
            done |= {out.request_id: out for out in llm.step()}
        assert routes_of([done[i] for i in ids]) == expected()
        llm.restore(snapshot)
    cut: list[Any] = [llm.abort(i) for i in ids]
    assert all(0 < len(out.outputs[0].token_ids) < 10 for out in cut)
    assert routes_of(cut) == [
        (tokens, route[: len(out.prompt_token_ids) + len(tokens) - 1] + route[-1:])
        for (tokens, _), (_, route), out in zip(
            routes_of(cut), expected(), [o for o in cut for _ in o.outputs], strict=True
        )
    ]
    assert routes_of(llm.generate(cut, ASKED, use_tqdm=False)) == expected()


@pytest.mark.parametrize(
    ("shape", "axes", "changes"),
    [
        ((2,), ("tp",), {}),
        pytest.param((2, 2), ("data", "tp"), {}, marks=pytest.mark.middle),
        pytest.param((2,), ("data",), {"expert_parallel": True}, marks=pytest.mark.middle),
    ],
    ids=["tp 2", "data 2, tp 2", "whole experts"],
)
def test_on_meshes(shape: tuple[int, ...], axes: tuple[str, ...], changes: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)
    llm = LLM(PARAMS, mesh=mesh, **vars(dataclasses.replace(SETTINGS, **changes)))
    for _ in range(2):
        assert routes_of(run(llm)) == expected()
    llm.close()


def mixtures() -> dict[str, ModelConfig]:
    """Where else experts are: behind windows alone, states and latents, after an MLP."""
    layers = MIXTURE.layers
    mixer: Any = layers[0].mixer
    mixture: Any = layers[0].ffn
    window = dataclasses.replace(mixer, window=6)
    delta = DeltaConfig(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=32)
    latent = LatentConfig(
        num_heads=4, latent_dim=16, rope_dim=16, content_dim=16, value_dim=16, rope=mixer.rope
    )
    mlp = MLPConfig(intermediate_size=48)

    def with_mixers(*mixers: Any, first: Any = None, **changes: Any) -> ModelConfig:
        of = [dataclasses.replace(x, mixer=m) for x, m in zip(layers, mixers, strict=True)]
        of[0] = dataclasses.replace(of[0], ffn=first or of[0].ffn)
        return dataclasses.replace(MIXTURE, layers=tuple(of), **changes)

    return {
        "windows alone": with_mixers(window, window, window),
        "states": with_mixers(delta, delta, mixer, family="qwen3_5_moe_text"),
        "latents, an MLP first": with_mixers(
            latent, latent, latent, first=mlp, family="deepseek_v3"
        ),
        "over 256 experts": dataclasses.replace(
            MIXTURE,
            layers=tuple(
                dataclasses.replace(x, ffn=dataclasses.replace(mixture, num_experts=300))
                for x in layers
            ),
        ),
    }


@pytest.mark.parametrize("name", mixtures())
def test_other_mixtures(name: str) -> None:
    """Routes are those of the dense model: replayed they change nothing, and another one does."""
    params = make_params(1, mixtures()[name])
    llm = served(params, num_states=None)
    outs = run(llm)
    assert routes_of(run(llm)) == routes_of(outs)
    llm.close()
    arrays = jpaged.to_arrays(outs)
    taken = arrays["routed_experts"]
    num_layers = len([x for x in params.config.layers if isinstance(x.ffn, ExpertsConfig)])
    assert taken.shape[2:] == (num_layers, 2)
    if "256" in name:
        assert taken.max() > 256
    new = functools.partial(jpaged.logprobs, params, temperature=0.9)
    chosen, replayed = new(arrays), new(arrays, routed=True)
    np.testing.assert_array_equal(chosen, replayed)
    others = np.where(taken >= 0, (taken + 1) % (300 if "256" in name else 6), -1)
    changed = new(arrays | {"routed_experts": others}, routed=True)
    assert np.abs(changed - chosen).max() > 1e-3


def test_the_router_of_now_weighs_what_was_chosen() -> None:
    """After an update the trainer's own choice differs from the rollout's; replayed it is as it
    was, and its weights, and their gradient, are the new router's.
    """
    outs = run(served())
    arrays = jpaged.to_arrays(outs)
    noise = np.random.default_rng(0)

    def moved(path: Any, x: jax.Array) -> jax.Array:
        is_router = "router" in jax.tree_util.keystr(path)
        return x + jnp.asarray(noise.normal(size=x.shape) * 0.4, x.dtype) if is_router else x

    fresh = jax.tree_util.tree_map_with_path(moved, PARAMS)
    told = bind(fresh.config.keeping_choices(), dict(fresh))
    tokens = np.concatenate([arrays["prompt_ids"], arrays["completion_ids"]], axis=1)
    routes = arrays["routed_experts"].astype(np.int32)
    by_replay, _ = told(jnp.asarray(tokens), routed=jnp.asarray(routes))
    by_choice, _ = told(jnp.asarray(tokens))
    assert np.abs(by_replay - by_choice).max() > 1e-2

    # By hand: every expert, weighed by the new scores of those that were chosen.
    layer = told.layers[0]
    x = jnp.asarray(noise.normal(size=(1, 7, 32)).astype(np.float32))
    kept = jnp.asarray(routes[:1, -8:-1, 0])
    assert (np.asarray(kept) >= 0).all()
    experts = layer.experts
    assert experts is not None
    routed = experts._route(x[0], IN_TRAINING, kept[0])
    router: Any = experts.router.weight
    scores = jax.nn.softmax(x[0] @ router.T)
    weights = np.take_along_axis(np.asarray(scores), np.asarray(kept[0]), axis=1)
    np.testing.assert_array_equal(routed.chosen, kept[0])
    if experts.config.router.normalized:
        weights = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routed.weight, weights, rtol=1e-5)

    grads = jax.grad(
        lambda p: jnp.sum(jpaged.logprobs(p, arrays, temperature=0.9, routed=True, remat=True))
    )(fresh)
    flat = jax.tree_util.tree_leaves_with_path(grads)
    of_routers = [x for path, x in flat if "router" in jax.tree_util.keystr(path)]
    assert of_routers and all(np.abs(x).max() > 0 for x in of_routers)


@pytest.mark.skipif(unavailable() is not None, reason="the C++ kernels cannot be built")
def test_exact_and_replayed_to_the_bit() -> None:
    wide = config(
        family="qwen3_moe",
        head_dim=32,
        hidden_size=64,
        num_experts=4,
        experts_per_token=2,
        expert_size=64,
    )
    params = make_params(0, wide, jnp.bfloat16)
    settings = dataclasses.replace(SETTINGS, deterministic=True)
    sampling = SamplingParams(
        temperature=0.7, max_tokens=8, ignore_eos=True, logprobs_mode="tempered"
    )
    outs = jpaged.generate(params, PROMPTS, sampling, engine_config=settings, seed=3)
    arrays = jpaged.to_arrays(outs)
    exactly = jax.jit(functools.partial(jpaged.logprobs, temperature=0.7, exact=True, routed=True))(
        params, arrays
    )
    np.testing.assert_array_equal(exactly, arrays["logprobs"])


def test_new_weights_keep_their_routes() -> None:
    """What KV of older weights stays says what those chose; nothing else of a caller's changes."""
    llm = served()
    first = run(llm)
    other = make_params(9, MIXTURE)
    llm.update_params(other)
    second = run(llm)
    alone = served(other)
    assert routes_of(second) == routes_of(run(alone)) != routes_of(first)
    llm.update_params(PARAMS)
    assert routes_of(run(llm)) == expected()
    assert llm.session.served.params is not None
    kept = jpaged.generate(PARAMS, PROMPTS, ASKED[0], engine_config=SETTINGS)
    again = jpaged.generate(PARAMS, PROMPTS, ASKED[0], engine_config=SETTINGS)
    assert routes_of(kept) == routes_of(again)


def test_what_is_refused() -> None:
    plain = make_params()
    for what in (
        lambda: LLM(plain, **vars(SETTINGS)),
        lambda: jpaged.plan_memory(plain.config, SETTINGS, compiled=False),
    ):
        with pytest.raises(UnsupportedError, match="routed_experts: the model has no mixture"):
            what()
    mixture: Any = MIXTURE.layers[0].ffn
    more = dataclasses.replace(mixture, experts_per_token=3)
    first = dataclasses.replace(MIXTURE.layers[0], ffn=more)
    uneven = dataclasses.replace(MIXTURE, layers=(first, *MIXTURE.layers[1:]))
    with pytest.raises(UnsupportedError, match=r"unequal numbers of experts a token: \(3, 2, 2\)"):
        LLM(make_params(0, uneven), **vars(SETTINGS))
    without = jpaged.to_arrays(run(LLM(PARAMS, **vars(ENGINE))))
    assert "routed_experts" not in without
    with pytest.raises(jpaged.RequestError, match="arrays lack 'routed_experts'"):
        jpaged.logprobs(PARAMS, without, routed=True)


def test_what_it_costs() -> None:
    """A byte a token, layer and expert, in the plan too; and nothing where it is off."""
    (keys,), (of_keys, of_experts) = (
        kv_groups(MIXTURE),
        kv_groups(MIXTURE.keeping_choices()),
    )
    assert keys == of_keys
    (field,) = of_experts.record.fields
    assert (field.shape, field.dtype, of_experts.layers) == ((2,), "uint8", (0, 1, 2))
    on, off = (
        jpaged.plan_memory(MIXTURE, dataclasses.replace(SETTINGS, routed_experts=x), compiled=False)
        for x in (True, False)
    )
    assert len(on.pool.groups) == 2 and len(off.pool.groups) == 1
    assert on.pool.groups[1].nbytes == 3 * 4 * 2, "3 layers, 4 tokens a block, 2 experts"


def test_dialogs_know_the_routes_of_all_turns() -> None:
    """Those of the last turn reach back to the first token, and stay -1 behind it."""
    tokenizer = make_tokenizer()
    end = tokenizer.decode([EOS])
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
    changes: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_ids": (EOS,)}
    params = make_params(4, dataclasses.replace(MIXTURE, **changes))
    llm = LLM(params, tokenizer=tokenizer, **vars(SETTINGS))
    dialogs = [jpaged.Dialog(llm, [{"role": "user", "content": text}]) for text in ("ab", "cdefg")]
    asked = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
    for dialog in dialogs:
        dialog.reply(asked)
        dialog.add({"role": "user", "content": "more"})
    dialogs[0].reply(asked)
    arrays = jpaged.dialog_arrays(dialogs)
    routes, lens = arrays["routed_experts"], arrays["lens"]
    ends = [d.turns[-1].start + 4 for d in dialogs]  # of the last token no step has computed
    for route, end, count in zip(routes, ends, lens, strict=True):
        assert count >= end + 1 and (route[:end] >= 0).all() and (route[end:] == -1).all()
    chosen, replayed = (jpaged.logprobs(params, arrays, routed=routed) for routed in (False, True))
    np.testing.assert_array_equal(chosen, replayed)
    llm.close()


def test_scores_of_a_replay() -> None:
    """What a trainer will see: those of logprobs(routed=True), by other weights than the rollout's;
    in chunks, from the cache and from a start; the router's own choice is another.
    """
    outs = run(served())
    fresh = make_params(9, MIXTURE)
    arrays = jpaged.to_arrays(outs)
    wanted = jpaged.logprobs(fresh, arrays, temperature=0.9, routed=True)
    pairs = [(out, c) for out in outs for c in out.outputs]
    texts = [out.prompt_token_ids + c.token_ids for out, c in pairs]
    routes = [np.array(route, np.int16) for _, route in routes_of(outs)]
    starts = [len(out.prompt_token_ids) for out, _ in pairs]
    llm = served(fresh)
    own: Any = llm.score(texts, temperature=0.9)
    replayed = functools.partial(llm.score, texts, temperature=0.9, routed=routes)
    for whole in (replayed(), replayed()):
        for one, row, start in zip(whole, wanted, starts, strict=True):
            np.testing.assert_allclose(one[start - 1 :], row[: len(one) - start + 1], atol=2e-5)
    found: Any = replayed(start=starts)
    for one, row in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, row[: len(one)], atol=2e-5)
    # Neither sees the other's keys and values.
    for one, before, again in zip(found, own, llm.score(texts, temperature=0.9), strict=True):
        np.testing.assert_allclose(before, again, atol=2e-5)
        assert np.abs(before[-len(one) :] - one).max() > 1e-3
    mixed = llm.score(texts, temperature=0.9, routed=[np.full_like(r, -1) for r in routes])
    np.testing.assert_allclose(np.concatenate(mixed), np.concatenate(own), atol=2e-5)
    entropies = llm.score(texts, temperature=0.9, routed=routes, entropy=True, top_k=2)
    for one, full in zip(entropies, llm.score(texts, temperature=0.9, routed=routes), strict=True):
        np.testing.assert_allclose(one.logprobs, full, atol=2e-5)
    assert llm.stats()["cached_tokens"] > 0
    by_call = jpaged.score(
        fresh, texts, temperature=0.9, routed=routes, engine_config=SETTINGS, start=starts
    )
    np.testing.assert_allclose(np.concatenate(by_call), np.concatenate(found), atol=2e-5)

    bad: list[tuple[Any, str]] = [
        (routes[:1], "routed: 1 arrays for 6 sequences"),
        ([r[:-1] for r in routes], r"routed\[0\] of int16\[14, 3, 2\]: must be integers \[15, 3"),
        ([r.astype(np.float32) for r in routes], r"routed\[0\] of float32"),
        ([r + 1 + 6 * (r >= 0) for r in routes], r"routed\[0\]: expert \d+ is none of 6, or -1"),
    ]
    for given, error in bad:
        with pytest.raises(jpaged.RequestError, match=error):
            llm.score(texts, routed=given)
    with pytest.raises(jpaged.RequestError, match="made without routed_experts=True"):
        LLM(PARAMS, **vars(ENGINE)).score(texts, routed=routes)
    strict = served(strict=True)
    with pytest.raises(jpaged.RequestError, match="strict"):
        strict.score(texts, routed=routes)


def test_nothing_compiles_once_warm() -> None:
    """Neither steps nor the reads of what completions of any length took."""
    llm = served(max_model_len=64)
    llm.warmup(use_tqdm=False)
    with compiles() as names:
        for count in (1, 3, 4):
            asked = [dataclasses.replace(one, max_tokens=5 * count) for one in ASKED[:count]]
            routes_of(run(llm, asked, PROMPTS[:count]))
    assert set(names) <= {"jit(zeros)"}, "which the pools are made by"


def test_the_sample_that_knows_the_prompt() -> None:
    """One that was cut with no blocks knows nothing of it, another may. Beams tell none."""
    settings = dataclasses.replace(CROWDED, routed_experts=True)
    llm = LLM(PARAMS, **vars(settings))
    asked = [dataclasses.replace(one, n=4, max_tokens=30) for one in ASKED]
    ids = [llm.add_request(prompt, one) for prompt, one in zip(PROMPTS, asked, strict=True)]
    (replica,), waiting = llm.session.engine.replicas, list[Any]()
    while not waiting:
        llm.step()
        waiting = [seq for seq in replica.queues.waiting if seq.num_generated]
    (request_id,) = {seq.request_id for seq in waiting[:1]}
    cut = llm.abort(next(i for i in ids if request_id.startswith(i)))
    assert cut is not None and cut.prompt_routed_experts is not None
    lost = whole = 0
    for c in cut.outputs:
        assert c.routed_experts is not None and len(c.routed_experts) == len(c.token_ids)
        is_known = bool((c.routed_experts[:-1] >= 0).all())
        lost, whole = lost + (not is_known), whole + is_known
    assert lost and whole and (cut.prompt_routed_experts >= 0).all()
    (beams,) = llm.beam_search(PROMPTS[:1], 2, 4, use_tqdm=False)
    assert beams.prompt_routed_experts is None and beams.outputs[0].routed_experts is None
    assert "routed_experts" not in jpaged.to_arrays([beams])
