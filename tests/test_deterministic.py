"""deterministic=True: bits that depend on a request alone; and how far things differ without it."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, ConfigError, EngineConfig, Params, RequestOutput, SamplingParams
from jpaged.config import PINNED
from jpaged.demo import MODEL_PATH
from jpaged.models.forward import bind
from jpaged.models.layers.linear import StepContext
from jpaged.runtime.resolve import MOST_COST
from kernels_cpu import library
from kernels_cpu.rates import rates
from tests.tiny import CONFIG, STEPS, compiles, make_params

LENGTHS = (9, 3, 140, 90, 61, 130, PINNED, PINNED + 1)
ORDINARY: dict[str, Any] = {
    "num_blocks": 96,
    "block_size": 16,
    "max_logprobs": 5,
    "max_model_len": 256,
    "deterministic": False,
    "max_num_seqs": 16,
    "seq_buckets": (8, 16),
    "max_num_batched_tokens": 256,
    "token_buckets": (64, 256),
}
SETTINGS: dict[str, Any] = {**ORDINARY, "deterministic": True}


# bf16 where the C++ kernels compute a row alike in any batch; else, and in f32, steps of one size.
@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def params(request: pytest.FixtureRequest) -> Iterator[Params]:
    yield jpaged.load_params(MODEL_PATH, dtype=request.param)
    jpaged.release(compiled=True)


def requests(vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, the last with a long prefix of another; greedy, sampled, filtered
    and penalised rows.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, vocab, n).tolist() for n in LENGTHS]
    prompts.append([*prompts[5][:100], 5, 6])
    base = SamplingParams(max_tokens=20, ignore_eos=True)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.9, "presence_penalty": 0.5},
        {"temperature": 0},
        {"temperature": 0.7, "logprobs_mode": "tempered"},
        {"temperature": 0, "logprobs": 3},
    ]
    return prompts, [dataclasses.replace(base, seed=i, **kind) for i, kind in enumerate(kinds)]


def bits(outs: list[RequestOutput]) -> list[tuple[list[int], bytes]]:
    return [(c.token_ids, c.token_logprobs.tobytes()) for out in outs for c in out.outputs]


def together(llm: LLM, prompts: Any, sampling: Any) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False)


def alone(llm: LLM, prompts: Any, sampling: Any) -> list[RequestOutput]:
    return [together(llm, p, s)[0] for p, s in zip(prompts, sampling, strict=True)]


def backwards(llm: LLM, prompts: Any, sampling: Any) -> list[RequestOutput]:
    return together(llm, prompts[::-1], sampling[::-1])[::-1]


def twice(llm: LLM, prompts: Any, sampling: Any) -> list[RequestOutput]:
    together(llm, prompts, sampling)
    return together(llm, prompts, sampling)


def among_strangers(llm: LLM, prompts: Any, sampling: Any) -> list[RequestOutput]:
    """Others before, between and after, which come and go at other moments."""
    odd = SamplingParams(temperature=1.3, max_tokens=7, frequency_penalty=0.3, ignore_eos=True, n=2)
    mixed, params = [[7] * 33], [odd]
    for i, (p, s) in enumerate(zip(prompts, sampling, strict=True)):
        mixed += [p, [i + 1] * (5 * i + 1)]
        params += [s, odd]
    return together(llm, mixed, params)[1::2]


# What is varied: settings, how the requests are given, and what must have happened for it to count.
VARIED: dict[
    str, tuple[dict[str, Any], Callable[..., list[RequestOutput]], Callable[[dict[str, Any]], bool]]
] = {
    "one by one": ({}, alone, lambda s: s["prefill_tokens"] > 0),
    "other order": ({}, backwards, lambda s: s["prefill_tokens"] > 0),
    "among strangers": ({}, among_strangers, lambda s: s["prefill_tokens"] > 0),
    "chunks of 23": ({"max_num_batched_tokens": 23}, together, lambda s: s["prefill_tokens"] > 0),
    "2 rows": ({"max_num_seqs": 2}, together, lambda s: s["prefill_tokens"] > 0),
    "recomputed": ({"num_blocks": 20}, together, lambda s: s["preemptions_recomputed"] > 0),
    "from host memory": (
        {"num_blocks": 12, "swap_space_gib": 1.0, "swap_min_tokens": 0},
        together,
        lambda s: s["loaded_blocks"] > 0,
    ),
    "prefix hits": ({}, twice, lambda s: s["prefix_hit_rate"] > 0.3),
    "no prefix cache": (
        {"enable_prefix_caching": False},
        together,
        lambda s: s["prefix_hit_rate"] == 0,
    ),
    "other buckets": (
        {
            "token_buckets": (32, 256),
            "seq_buckets": (8,),
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
        },
        together,
        lambda s: s["prefill_tokens"] > 0,
    ),
}


QUICK = ("one by one", "chunks of 23", "recomputed", "from host memory", "prefix hits")


@pytest.mark.parametrize(
    "varied",
    [QUICK, pytest.param([name for name in VARIED if name not in QUICK], marks=pytest.mark.middle)],
    ids=["quick", "more"],
)
def test_bits_depend_on_the_request_alone(params: Params, varied: Iterable[str]) -> None:
    """Tokens and logprobs, bitwise, whatever the batch, order, chunks, preemptions and hits; score
    gives them too.
    """
    prompts, sampling = requests(params.config.vocab_size)
    llm = LLM(params, **SETTINGS)
    outs = together(llm, prompts, sampling)
    expected = bits(outs)
    print(f"\n{'varied':<18}{'requests':>10}{'equal':>8}")
    for name in varied:
        settings, give, happened = VARIED[name]
        other = LLM(params, **(SETTINGS | settings))
        found = bits(give(other, prompts, sampling))
        assert happened(other.stats()), name
        equal = sum(a == b for a, b in zip(found, expected, strict=True))
        print(f"{name:<18}{len(found):>10}{equal:>8}")
        assert found == expected, name
        other.close()

    for temperature in (1.0, 0.7):  # raw logprobs, and those that are tempered as score tempers
        mine = [
            i
            for i, s in enumerate(sampling)
            if (s.logprobs_mode == "tempered") == (temperature == 0.7)
        ]
        whole = [prompts[i] + outs[i].outputs[0].token_ids for i in mine]
        for i, row in zip(mine, llm.score(whole, temperature=temperature), strict=True):
            found = np.asarray(row[len(prompts[i]) - 1 :])
            assert found.tobytes() == outs[i].outputs[0].token_logprobs.tobytes(), (i, temperature)


@pytest.mark.own_steps
@pytest.mark.parametrize("deterministic", [False, True])
def test_products_that_differ_with_the_number_of_rows(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same comparison fails without it, and holds with it, on a processor whose
    products sum in an order that the number of rows decides. (Some processors' do, some do not.)
    """
    whole = StepContext.product

    def in_two_parts(self: StepContext, x: Any, weight_NE: Any, dtype: Any) -> Any:
        at = x.shape[0] % 61 + 1
        parts = (whole(self, x[..., s], weight_NE[:, s], dtype) for s in np.s_[:at, at:])
        return functools.reduce(operator.add, parts)

    monkeypatch.setattr(StepContext, "product", in_two_parts)
    params = jpaged.load_params(MODEL_PATH, dtype="float32")
    prompts, sampling = requests(params.config.vocab_size)
    llm = LLM(params, **dict[str, Any](ORDINARY, deterministic=deterministic))
    is_equal = bits(together(llm, prompts, sampling)) == bits(alone(llm, prompts, sampling))
    assert is_equal == deterministic
    llm.close()


def test_on_by_default_where_it_is_free(params: Params) -> None:
    """No pinned steps and several tokens a dispatch where a row's bits depend on it alone; off, or
    pinned if asked for, elsewhere.
    """
    is_native = params["embed"]["weight"].dtype == "bfloat16" and not library.unavailable()
    is_free = is_native and rates().worst <= MOST_COST
    settings = {name: value for name, value in ORDINARY.items() if name != "deterministic"}
    for asked, expected in ((None, is_free), (True, True), (False, False)):
        llm = LLM(params, **settings, deterministic=asked, decode_steps=None)
        config = llm.session.engine_config
        assert (config.deterministic, config.pinned) == (expected, expected and not is_native)
        llm.close()
    if is_native:
        LLM(params, **settings, deterministic=True, decode_steps=4).close()
    else:
        with pytest.raises(ConfigError, match="decode_steps=4: deterministic=True"):
            LLM(params, **settings, deterministic=True, decode_steps=4)


# Largest difference of a logprob, in nats: f32 differs by rounding alone; bf16 rounds every layer's
# results to 8 bits.
BOUNDS = {"float32": (2e-5, 5e-5), "bfloat16": (0.15, 0.15)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_rollout_score_and_trainer_agree(params: Params, deterministic: bool) -> None:
    """How far a rollout's logprobs are from score's, and score's from the trainer's dense forward:
    printed, bounded.
    """
    prompts, _ = requests(params.config.vocab_size)
    sampling = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True) for i in range(len(prompts))]
    llm = LLM(params, **(SETTINGS if deterministic else ORDINARY))
    outs = together(llm, prompts, sampling)
    whole = [p + out.outputs[0].token_ids for p, out in zip(prompts, outs, strict=True)]
    rolled = scored = 0.0
    for prompt, out, tokens, row in zip(prompts, outs, whole, llm.score(whole), strict=True):
        rolled = max(rolled, np.abs(row[len(prompt) - 1 :] - out.outputs[0].token_logprobs).max())
        scored = max(scored, np.abs(row - dense(params, tokens)).max())
    dtype = str(params["embed"]["weight"].dtype)
    print(
        f"\n{dtype} deterministic={deterministic}: rollout to score {rolled:.3g}, score "
        f"to dense forward {scored:.3g}"
    )
    assert rolled <= BOUNDS[dtype][0] * (not deterministic)
    assert scored <= BOUNDS[dtype][1]


@jax.jit
def _dense(params: Params, tokens_T: jax.Array) -> jax.Array:
    model = bind(params.config, dict(params))
    return jax.nn.log_softmax(model.logits(model(tokens_T[None])[0])[0])


def dense(params: Params, tokens: list[int]) -> np.ndarray:
    """log p(token t+1 | tokens <= t) by the differentiable forward that a trainer runs."""
    padded = np.zeros(256, np.int32)
    padded[: len(tokens)] = tokens
    logprobs = np.asarray(_dense(params, padded))
    return logprobs[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.own_steps
def test_one_shape() -> None:
    """The table holds one prefill and one draw, plain and with extras, and nothing else
    compiles.
    """
    llm = LLM(make_params(), deterministic=True, block_size=4, num_blocks=64)
    shapes = {(b.phase, b.tokens, b.rows, b.features) for b in llm.buckets()}
    assert shapes == {
        (phase, PINNED, PINNED, kind)
        for phase, kinds in {
            "prefill": ("plain", "prompt"),
            "sample": ("plain", "filtered", "full"),
        }.items()
        for kind in kinds
    }
    llm.warmup(use_tqdm=False)
    with compiles() as names:
        out = llm.generate(
            [[1, 2, 3]] * 3, SamplingParams(n=2, max_tokens=9, logprobs=2, ignore_eos=True)
        )
        llm.score([[1, 2, 3, 4]])
    assert not {*STEPS} & {*names} and out[0].outputs[1].token_ids


def test_what_it_resolves_to() -> None:
    resolved = EngineConfig(
        deterministic=True, max_num_seqs=500, max_num_batched_tokens=40
    ).resolve(CONFIG)
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (PINNED, 40)
    with pytest.raises(
        ConfigError, match="decode_steps=4: deterministic=True draws one token a dispatch"
    ):
        EngineConfig(deterministic=True, decode_steps=4).resolve(CONFIG)
    free = EngineConfig(deterministic=True, decode_steps=4).resolve(CONFIG, batch_invariant=True)
    assert free.deterministic and not free.pinned and free.max_num_seqs == 256
    asked = {None: True, False: False}
    for value, expected in asked.items():
        config = EngineConfig(deterministic=value)
        assert config.resolve(CONFIG, batch_invariant=True).deterministic is expected
        assert config.resolve(CONFIG).deterministic is False
