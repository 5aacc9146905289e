"""EAGLE-3 heads: they guess what a dense writing of them guesses, and change no token."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jpaged
from jpaged import LLM, ConfigError, EngineConfig, Params, SamplingParams, UnsupportedError
from jpaged.engine.shapes import DecodeShape, DraftShape, PrefillShape, Shape
from jpaged.errors import CheckpointError
from jpaged.models.forward import bind
from jpaged.models.head_modules import bind_any
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from tests.heads import (
    counting,
    counting_head,
    dense_guesses,
    guesses_of,
    head_config,
    part_of,
    write_head,
)
from tests.hlo import in_place, pool_copies
from tests.tiny import (
    CONFIG,
    ENGINE,
    assert_idle,
    compiles,
    config,
    engine,
    make_params,
    make_prompts,
    tokens_of,
)

MODEL = config(num_layers=1)
DEEP = config(num_layers=3, tie_word_embeddings=True)
LLAMA = config(family="llama", qk_norm=False, num_layers=1)
SIZES: dict[str, Any] = vars(ENGINE)


def eagle(head: Any, num_tokens: int = 3) -> dict[str, Any]:
    return {"method": "eagle", "model": head, "num_tokens": num_tokens, "adaptive": False}


def greedy(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **how})


@pytest.mark.middle
@pytest.mark.parametrize(
    ("target", "changes"),
    [
        (MODEL, {"draft_vocab_size": 40, "draft_tokens": part_of(97, 40)}),
        (DEEP, {"has_embed": True}),
        (DEEP, {"has_lm_head": False}),
        (LLAMA, {"norm_before_residual": True}),
    ],
)
def test_it_guesses_as_written_apart(
    monkeypatch: pytest.MonkeyPatch, target: Any, changes: dict[str, Any]
) -> None:
    """After prompts of one token, of whole blocks and of several chunks, after refused guesses,
    beside rows that share their blocks, and with prefixes that were computed before.
    """
    params, head = make_params(0, target), make_params(3, head_config(target, **changes))
    seen = guesses_of(monkeypatch)
    llm = LLM(params, **dict[str, Any](SIZES, speculative=eagle(head)))
    prompts = make_prompts(1, 8, 21, 5)
    prompts.append([*prompts[2][:11], 3, 4])
    for at, asked in ((0, greedy(8)), (2, greedy(8)), (3, greedy(8)), (2, greedy(6, n=2))):
        llm.generate(prompts[at : at + 2], asked, use_tqdm=False)
    assert llm.stats()["cached_tokens"] > 0
    assert len(seen) > 30 and {len(guesses) for _, guesses in seen} >= {1, 2, 3}
    for tokens, guesses in seen:
        assert guesses == dense_guesses(params, head, tokens, len(guesses)), tokens


@pytest.mark.parametrize("devices", [1, 2])
def test_a_head_that_knows_is_right(devices: int) -> None:
    """Of a model that counts, the head that counts too: every guess comes true."""
    params = counting(MODEL, exact=True)
    head = counting_head(params, exact=True)
    prompts = [[5, 6, 7], [40, 41], [70]]
    settings: dict[str, Any] = {"speculative": eagle(head, 1), "tensor_parallel_size": devices}
    llm = LLM(params, **SIZES | settings)
    outs = llm.generate(prompts, greedy(24), use_tqdm=False)
    stats = llm.stats()
    assert tokens_of(outs) == [[(p[-1] + i) % 97 for i in range(1, 25)] for p in prompts]
    assert stats["accepted_tokens"] == stats["drafted_tokens"] >= 30
    assert stats["wasted_tokens"] == 0 and stats["acceptance_rate"] == 1.0
    assert stats["steps"] < 0.7 * 24 and stats["draft_steps"] == stats["verify_steps"]


@pytest.mark.parametrize("speculators", [False, True], ids=["midlayer", "speculators"])
def test_published_files(tmp_path: Path, speculators: bool) -> None:
    """Names, ids of the draft vocabulary, what is left to the model; and where it does not say."""
    tokens = part_of(97, 40)
    own = {"draft_vocab_size": 40, "draft_tokens": tokens, "has_embed": not speculators}
    head = make_params(3, head_config(norm_before_residual=speculators, **own))
    loaded = jpaged.load_params(write_head(tmp_path / "a", head, speculators=speculators))
    assert loaded.config == head.config
    jax.tree.map(np.testing.assert_array_equal, dict(loaded), dict(head))
    whole = make_params(3, head_config(aux_layers=(), has_lm_head=speculators))
    folder = write_head(tmp_path / "b", whole, speculators=speculators)
    assert jpaged.load_params(folder).config == (
        whole.config if not speculators else head_config(aux_layers=())
    )
    raw = json.loads((folder / "config.json").read_text())
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 0, 3]}  # those whose outputs
    (folder / "config.json").write_text(json.dumps(raw))
    loaded = jpaged.load_params(folder)
    assert loaded.config.draft_head is not None
    assert loaded.config.draft_head.aux_layers == (2, 1, 4)


def test_what_is_refused(tmp_path: Path) -> None:
    params = make_params(0, MODEL)
    head = make_params(3, head_config(MODEL))

    def refused(match: str, how: Any, error: type[Exception] = ConfigError, **more: Any) -> None:
        with pytest.raises(error, match=match):
            LLM(params, **{**SIZES, **more, "speculative": how})

    refused("method='eagle' needs a model: a folder", {"method": "eagle"})
    refused("is no EAGLE-3 head", eagle(params), UnsupportedError)
    refused("is an EAGLE-3 head: use 'eagle'", {"method": "draft", "model": head})
    wider = make_params(3, head_config(config(vocab_size=90)))
    refused("for vocab_size=90: the model has 97", eagle(wider))
    wider = make_params(3, head_config(MODEL, target_hidden_size=48))
    refused("target_hidden_size=48: the model has hidden_size=32", eagle(wider))
    narrow = make_params(3, head_config(MODEL, {"hidden_size": 16}))
    refused("hidden_size=16 without an embedding", eagle(narrow))
    refused(r"layers \(2, 0, -2\)", eagle(make_params(3, head_config(MODEL, aux_layers=()))))
    with pytest.raises(ConfigError, match="an EAGLE-3 head is no model"):
        LLM(head, **SIZES)
    folder = write_head(tmp_path / "head", head)
    raw = json.loads((folder / "config.json").read_text())

    def spelled(match: str, error: type[Exception] = UnsupportedError, **changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps(raw | changes))
        refused(match, eagle(folder), error)

    spelled("'MedusaModel' is not supported", architectures=["MedusaModel"], draft_vocab_size=1)
    spelled("norm_before_fc=True", norm_before_fc=True)
    spelled("of 2 layers: only of one", num_hidden_layers=2)
    spelled("of 'gemma3_text' layers", model_type="gemma3_text")
    spelled("and no d2t", CheckpointError, draft_vocab_size=40)
    spelled("must be a list of 3 layers", ConfigError, eagle_aux_hidden_state_layer_ids="2")
    older = {name: value for name, value in raw.items() if name != "draft_vocab_size"}
    (folder / "config.json").write_text(json.dumps(older | {"architectures": ["LlamaForCausalLM"]}))
    refused("a head of EAGLE 1 or 2", eagle(folder), UnsupportedError)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": np.full(97, 1)}, folder / "model.safetensors")
    refused("past vocab_size=97", eagle(folder), CheckpointError)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("other files than safetensors", eagle(folder), CheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "changes", "devices", "settings"),
    [
        # 40 of its tokens, 20 a device; 97 of the model's are padded to two tiles. Blocks leave.
        (
            MODEL,
            {"draft_vocab_size": 40, "draft_tokens": part_of(97, 40)},
            {"tensor_parallel_size": 2},
            {"num_blocks": 16, "swap_space_gib": 0.01, "swap_min_tokens": 0},
        ),
        # 41 tokens stay whole, and both KV heads are repeated.
        (
            MODEL,
            {"draft_vocab_size": 41, "draft_tokens": part_of(97, 41)},
            {"tensor_parallel_size": 4},
            {},
        ),
        (DEEP, {"has_embed": True}, {"tensor_parallel_size": 2, "data_parallel_size": 2}, {}),
        (DEEP, {"has_lm_head": False}, {"tensor_parallel_size": 2}, {}),
    ],
    ids=["part of the tokens", "repeated heads", "its own embedding", "the model's head"],
)
def test_devices_share_it(
    monkeypatch: pytest.MonkeyPatch,
    target: Any,
    changes: dict[str, Any],
    devices: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """It guesses as written apart, as often right as on one device; tokens are those without it."""
    params, head = make_params(0, target), make_params(3, head_config(target, **changes))
    prompts, asked = make_prompts(1, 8, 21, 5), [greedy(12), *[greedy(16)] * 3]
    plain = LLM(params, **SIZES)
    wanted = tokens_of(plain.generate(prompts, asked, use_tqdm=False))
    plain.close()
    seen, rates = guesses_of(monkeypatch), []
    for place in ({}, devices):
        seen.clear()
        whole: dict[str, Any] = {**SIZES, **settings, **place, "speculative": eagle(head)}
        llm = LLM(params, **whole)
        assert tokens_of(llm.generate(prompts, asked, use_tqdm=False)) == wanted
        assert_idle(llm)
        stats = llm.stats()
        rates.append(stats["acceptance_rate"])
        assert stats["preemptions"] > 0 or not settings
        llm.close()
    assert len(seen) > 15
    for tokens, guesses in seen:
        assert guesses == dense_guesses(params, head, tokens, len(guesses)), tokens
    if "data_parallel_size" not in devices:  # with which fewer rows share a step
        assert rates[0] == rates[1]


def test_hidden_states_that_do_not_divide() -> None:
    """A head of 33 numbers a position beside a model of as many, over two devices."""
    odd = config(num_layers=1, hidden_size=33)
    params, head = make_params(0, odd), make_params(3, head_config(odd))
    with pytest.raises(ConfigError, match="hidden_size=33: does not divide over 2 devices") as e:
        LLM(params, **SIZES | {"speculative": eagle(head), "tensor_parallel_size": 2})
    assert e.value.rule == "hidden_states_of_heads_split"


@pytest.mark.middle
@pytest.mark.own_steps
def test_it_compiles_nothing_later() -> None:
    params = counting(MODEL)
    how = {**SIZES, "speculative": eagle(counting_head(params)), "strict": True}
    llm = LLM(params, **how)
    with compiles() as names:
        llm.generate(make_prompts(3, 9, 20), [greedy(12)] * 3, use_tqdm=False)
        llm.generate(make_prompts(3, 9), greedy(12, temperature=0.7, top_p=0.9), use_tqdm=False)
    assert names == [] and llm.stats()["verify_steps"] > 0


@pytest.mark.middle
@pytest.mark.parametrize("phase", ["prefill", "decode", "draft"])
def test_its_pool_is_updated_in_place(phase: Any) -> None:
    """The hidden states beside the keys and values too."""
    how = engine(num_blocks=8191, speculative={"method": "eagle"}).resolve(CONFIG)
    head = head_config(CONFIG)
    target = bind(CONFIG, make_params(0, CONFIG))
    guesses = bind_any(head, make_params(0, head))
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    runner = Runner(CONFIG, how, where, target, (head, guesses))
    size: Any = {"rows": 8, "tables": 2, "blocks": 16}
    shapes: dict[str, Shape] = {
        "prefill": PrefillShape(tokens=16, **size),
        "decode": DecodeShape(**size),
        "draft": DraftShape(steps=3, **size),
    }
    compiled = runner.compiled.lower(shapes[phase]).compile()
    copies, is_small = in_place(compiled, runner.pools)
    (hidden,) = (x for x in jax.tree.leaves(runner.compiled.kv) if x.shape[-1] == head.hidden_size)
    assert copies == pool_copies(compiled.as_text(), hidden.size) == [] and is_small


@pytest.mark.middle
def test_new_heads_and_new_models() -> None:
    """Either is served at once, without a compile; the head goes with the model's embeddings."""
    params = counting(MODEL)
    poor, good = make_params(3, head_config(MODEL)), counting_head(params, exact=True)
    good = Params(dict(good), poor.config)
    how: Any = {"method": "eagle", "num_tokens": 1, "adaptive": False}
    settings: Any = {"engine_config": EngineConfig(**{**SIZES, "speculative": how})}
    prompts = [[5, 6, 7], [40, 41]]
    wanted = jpaged.generate(params, prompts, greedy(12), draft=poor, **settings)
    with compiles() as names:
        outs = jpaged.generate(params, prompts, greedy(12), draft=good, **settings)
    assert names == [] and tokens_of(outs) == tokens_of(wanted)
    jpaged.release(compiled=True)
    llm = LLM(params, **dict[str, Any](SIZES, speculative={**how, "model": poor}))
    llm.generate(prompts, greedy(12), use_tqdm=False)
    rate = llm.stats()["acceptance_rate"]
    llm.update_params(params, draft=good)
    llm.reset_prefix_cache()
    llm.sleep()
    llm.wake()
    assert tokens_of(llm.generate(prompts, greedy(12), use_tqdm=False)) == tokens_of(wanted)
    assert llm.stats()["acceptance_rate"] > rate
    other = make_params(1, MODEL)
    llm.update_params(other)
    plain = LLM(other, **SIZES).generate(prompts, greedy(12), use_tqdm=False)
    assert tokens_of(llm.generate(prompts, greedy(12), use_tqdm=False)) == tokens_of(plain)


@pytest.mark.middle
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_beside_a_cache_of_8_bits(kind: Any) -> None:
    """Its own keys and values are in 8 bits too. No token or logprob changes, also of rows that
    make room for others and come back, and guesses come true as often as they do beside the plain
    cache, nearly.
    """
    model = config(num_layers=1, head_dim=32, intermediate_size=64)
    params = counting(model, dtype=jnp.bfloat16)
    head, rates = counting_head(params), {}
    prompts, few = make_prompts(3, 9, 20, 14, 6), {"num_blocks": 24, "swap_space_gib": 0.01}
    drawn = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True)
    for cache in (kind, None):
        how: Any = {**SIZES, **few, "deterministic": True, "kv_cache_dtype": cache}
        plain, llm = LLM(params, **how), LLM(params, **how | {"speculative": eagle(head)})
        for asked in (greedy(24), drawn):
            wanted = plain.generate(prompts, asked, use_tqdm=False)
            outs = llm.generate(prompts, asked, use_tqdm=False)
            assert tokens_of(outs) == tokens_of(wanted)
            for ours, theirs in zip(outs, wanted, strict=True):
                each = (ours.outputs[0].token_logprobs, theirs.outputs[0].token_logprobs)
                np.testing.assert_array_equal(*each)
        stats = llm.stats()
        assert stats["preemptions"] > 0 and stats["blocks_in_use"] == 0
        rates[cache] = stats["acceptance_rate"]
    assert rates[kind] > 0.2 and abs(rates[kind] - rates[None]) < 0.1


@pytest.mark.middle
def test_the_memory_plan_counts_it() -> None:
    how = EngineConfig(**{**SIZES, "num_blocks": None, "speculative": {"method": "eagle"}})
    alone = jpaged.plan_memory(MODEL, how, compiled=False)
    both = jpaged.plan_memory(MODEL, how, draft=head_config(MODEL), compiled=False)
    assert both.weights > alone.weights and both.needs.total > alone.needs.total
    layers, heads = both.pool.groups
    assert (
        heads.nbytes == layers.nbytes + ENGINE.block_size * MODEL.hidden_size * 2
    )  # bf16 hidden states
