"""A decode whose draw is a step of its own, and steps that stand in for others that are not
compiled yet.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged import LLM, ConfigError, EngineConfig, RequestOutput, SamplingParams
from jpaged.engine.shapes import DecodeShape, PrefillShape, Shape, shape_table
from jpaged.models.config import ModelConfig
from jpaged.runtime import stand_ins
from jpaged.runtime.runner import Runner
from kernels_cpu.library import unavailable
from tests.tiny import CONFIG, EOS, config, engine, make_params, make_prompts, tokens_of

PROMPTS = make_prompts(3, 17, 9, 30, 5, 12)
# Rows that stop on the device while their next step is on its way, penalties, filters, samples.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "stop_token_ids": list(range(0, EOS, 4))},
    {"temperature": 0.7, "top_p": 0.8, "min_tokens": 4},
    {"temperature": 1.0, "presence_penalty": 0.8, "logit_bias": {5: 2.0}},
    {"temperature": 0.9, "n": 2},
    {"temperature": 0, "logprobs": 3},
]
ASKED = [SamplingParams(max_tokens=12, seed=i, **kind) for i, kind in enumerate(KINDS)]


def answers(outs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (c.token_ids, c.token_logprobs.tobytes(), c.finish_reason) for o in outs for c in o.outputs
    ]


def check_the_arrays_of_draws(runner: Runner) -> None:
    """A call spends time on each array that it is handed, whether or not the step reads it."""
    assert runner.params is not None
    whole, drawing = (len(jax.tree.leaves(x)) for x in (runner.params, runner.params.for_logits))
    assert drawing <= 3 < whole
    taken = {shape: runner.compiled[shape].args_info[0][0] for shape in runner.usage}
    draws = [len(arrays) for shape, arrays in taken.items() if shape.phase == "sample"]
    assert draws and set(draws) == {drawing}
    assert {len(taken[shape]) for shape in taken if shape.phase != "sample"} == {whole}


def test_the_bits_of_a_decode_that_draws_itself() -> None:
    found = []
    for separate in (False, True):
        llm = LLM(make_params(), **vars(engine(separate_draw=separate, max_num_seqs=4)))
        found.append(answers(llm.generate(PROMPTS, ASKED, use_tqdm=False)))
        phases = {(report.phase, report.features) for report in llm.buckets() if report.hits}
        assert (("decode", "full") in phases) != separate
        check_the_arrays_of_draws(llm.session.runner)
        llm.close()
    assert found[0] == found[1] and {answer[2] for answer in found[0]} == {"stop", "length"}


def test_what_it_resolves_to() -> None:
    cases: list[tuple[dict[str, Any], bool, bool]] = [
        ({}, True, True),
        ({}, False, False),
        ({"decode_steps": 4}, True, False),
        ({"separate_draw": False}, True, False),
        ({"separate_draw": True}, False, True),
    ]
    alike = EngineConfig().resolve(CONFIG, on_cpu=True, batch_invariant=True)
    assert alike.deterministic and alike.separate_draw is None
    strict = EngineConfig(strict=True).resolve(CONFIG, on_cpu=True, batch_invariant=True)
    assert strict.separate_draw is True
    for asked, on_cpu, expected in cases:
        resolved = EngineConfig(**asked).resolve(CONFIG, on_cpu=on_cpu)
        assert resolved.separate_draw is expected
        kinds = {b.sampler for b in shape_table(resolved) if b.phase == "decode"}
        assert kinds == ({None} if expected else {"plain", "filtered", "full"})
    with pytest.raises(ConfigError, match="separate_draw=True: a dispatch of decode_steps=4"):
        EngineConfig(separate_draw=True, decode_steps=4).resolve(CONFIG)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (4, 1)),
        ({"separate_draw": False}, (4, 1)),
        ({"separate_draw": True}, (1, 1)),
        ({"strict": True}, (1, 1)),
        ({"speculative": {"method": "ngram"}}, (1, 1)),
        ({"decode_steps": 1}, (1, 1)),
        ({"decode_steps": 3}, (3, 3)),
        ({"decode_steps": 3, "stream_steps": 2}, (3, 2)),
    ],
)
def test_how_many_steps_it_resolves_to(asked: dict[str, Any], expected: tuple[int, int]) -> None:
    on_cpu = EngineConfig(**asked).resolve(CONFIG, on_cpu=True, batch_invariant=True)
    assert (on_cpu.decode_steps, on_cpu.stream_steps) == expected
    elsewhere = EngineConfig(**asked).resolve(CONFIG, batch_invariant=True)
    same = expected if "decode_steps" in asked else (1, 1)
    assert (elsewhere.decode_steps, elsewhere.stream_steps) == same


def test_streams_draw_no_more_than_steps_are_compiled_for() -> None:
    above: list[dict[str, Any]] = [{"stream_steps": 2}, {"stream_steps": 3, "decode_steps": 2}]
    for steps in above:
        with pytest.raises(ConfigError, match="is above decode_steps="):
            EngineConfig(**steps).resolve(CONFIG, on_cpu=True, batch_invariant=True)
    with pytest.raises(ConfigError, match="stream_steps=0"):
        EngineConfig(stream_steps=0)


def decode(rows: int, **changes: Any) -> Shape:
    kind: dict[str, Any] = {"tables": 1, "blocks": 4} | changes
    return DecodeShape(rows=rows, **kind)


def test_what_holds_what() -> None:
    assert decode(16).holds(decode(8)) and not decode(8).holds(decode(16))
    assert decode(8, sampler="full").holds(decode(8, sampler="filtered"))
    assert not decode(16, sampler="plain").holds(decode(8, sampler="filtered"))
    assert not decode(16).holds(decode(8, sampler=None)) and not decode(16, sampler=None).holds(
        decode(8)
    )
    assert decode(16, sampler=None).holds(decode(8, sampler=None))
    assert not decode(16, blocks=5).holds(decode(8)) and not decode(16, steps=2).holds(decode(8))
    prefill = PrefillShape(tokens=32, rows=8, tables=1, blocks=4)
    scored = dataclasses.replace(prefill, scores=True)
    assert prefill.holds(dataclasses.replace(prefill, tokens=16))
    assert not scored.holds(prefill) and not prefill.holds(decode(8))


# What the C++ kernels take: there the bits of a row are the same in any step.
NATIVE: ModelConfig = config(head_dim=32, intermediate_size=64)
SIZES: dict[str, Any] = {
    "max_num_seqs": 16,
    "seq_buckets": (8, 16),
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "num_blocks": 128,
}


@pytest.mark.own_steps
@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_a_larger_step_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows after many take the steps of many until their own are there; with the same bits."""
    params = make_params(0, NATIVE, jnp.bfloat16)
    many, few = make_prompts(*[5] * 12), make_prompts(7, 4)
    sampling = SamplingParams(max_tokens=10, seed=1, ignore_eos=True)

    def run(llm: LLM) -> Any:
        llm.generate(many, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        return [answers(llm.generate(few, sampling, use_tqdm=False)) for _ in range(3)]

    settings = vars(engine(deterministic=True, **SIZES))
    whole = LLM(params, **settings)
    monkeypatch.setattr(whole.session.runner, "fit", lambda buckets: buckets)
    expected = run(whole)
    assert {b.rows for b in whole.session.runner.usage if b.phase == "decode"} == {8, 16}

    llm = LLM(params, **settings)
    assert run(llm) == expected
    runner = llm.session.runner
    assert {b.rows for b in runner.usage if b.phase != "prefill"} == {16}

    monkeypatch.setattr(stand_ins, "OFTEN", 3)
    run(llm)
    while not all(future.done() for future in runner.stand_ins.compiling.values()):
        time.sleep(0.01)
    assert run(llm) == expected
    assert {b.rows for b in runner.usage if b.phase != "prefill"} == {8, 16}
    for kept in (whole, llm):
        kept.close()


@pytest.mark.own_steps
@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_two_steps_until_one_does_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode begins as two steps, of bits that are those of the one which takes their place."""
    monkeypatch.setattr(stand_ins, "OFTEN_IN_TWO", 4)
    params = make_params(0, NATIVE, jnp.bfloat16)
    sizes = SIZES | {"seq_buckets": (16,)}
    found = []
    for separate in (False, True, None):
        llm = LLM(params, **vars(engine(deterministic=True, separate_draw=separate, **sizes)))
        runner = llm.session.runner
        for _ in range(3):
            found.append(answers(llm.generate(PROMPTS, ASKED, use_tqdm=False)))
            while not all(future.done() for future in runner.stand_ins.compiling.values()):
                time.sleep(0.01)
        usage = runner.usage
        decodes = {b.sampler is None for b in usage if b.phase == "decode"}
        assert decodes == ({False, True} if separate is None else {separate})
        llm.close()
    assert all(each == found[0] for each in found)


@pytest.mark.own_steps
@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
@pytest.mark.parametrize("separate", [False, None])
def test_dispatches_of_several_tokens_where_nobody_follows(
    monkeypatch: pytest.MonkeyPatch, separate: bool | None
) -> None:
    """Four tokens a dispatch, once that program is compiled; one while any request is streamed,
    with equal tokens.
    """
    monkeypatch.setattr(stand_ins, "OFTEN_IN_TWO", 2)
    params = make_params(0, NATIVE, jnp.bfloat16)
    llm = LLM(params, **vars(engine(deterministic=True, separate_draw=separate, **SIZES)))
    asked, prompts = SamplingParams(max_tokens=17, ignore_eos=True), make_prompts(5, 9)

    def dispatches() -> int:
        return sum(b.hits for b in llm.buckets() if b.phase == "decode")

    def whole() -> list[tuple[int, ...]]:
        return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, asked, seed=1)]

    expected, first = whole(), dispatches()
    assert first == (4 if separate is False else 16)
    while not all(future.done() for future in llm.session.runner.stand_ins.compiling.values()):
        time.sleep(0.01)
    assert whole() == expected and dispatches() - first == 4

    before, pieces = dispatches(), list(llm.stream(prompts, asked, seed=1))
    assert dispatches() - before == 16
    assert max(len(piece.token_ids_delta) for piece in pieces) == 1
    streamed = [
        [t for p in pieces if p.request_index == i for t in p.token_ids_delta] for i in (0, 1)
    ]
    assert [tuple(tokens) for tokens in streamed] == expected

    before = dispatches()
    stream: Any = llm.stream(make_prompts(7), asked)
    next(stream)
    assert whole() == expected and dispatches() - before >= 16  # beside a stream
    stream.close()
    llm.close()


@pytest.mark.own_steps
@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_processes_change_their_steps_at_the_same_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "OFTEN_IN_TWO", 2)
    monkeypatch.setattr(stand_ins, "are_many", lambda mesh: True)
    llm = LLM(make_params(0, NATIVE, jnp.bfloat16), **vars(engine(deterministic=True, **SIZES)))
    asked = SamplingParams(max_tokens=6, ignore_eos=True)
    llm.generate(make_prompts(5), asked, use_tqdm=False)
    runner = llm.session.runner
    hits = {
        b.sampler is None: usage.hits for b, usage in runner.usage.items() if b.phase == "decode"
    }
    # Of five tokens two are drawn one by one, three by the step that draws up to four.
    assert hits == {True: 2, False: 1} and not runner.stand_ins.compiling
    llm.close()


@pytest.mark.own_steps
@pytest.mark.skipif(unavailable() is not None, reason=f"the CPU kernels: {unavailable()}")
def test_what_fails_in_the_background_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "OFTEN", 1)
    params = make_params(0, NATIVE, jnp.bfloat16)
    llm = LLM(params, **vars(engine(deterministic=True, **SIZES)))
    asked = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate(make_prompts(*[5] * 12), asked, use_tqdm=False)
    steps = llm.session.runner.compiled

    def broken(bucket: Shape) -> Any:
        raise MemoryError(f"no room for {bucket.phase}")

    monkeypatch.setattr(steps, "lower", broken)
    with pytest.raises(Exception, match="no room for"):
        for _ in range(50):
            llm.generate(make_prompts(7), asked, use_tqdm=False)
            time.sleep(0.01)
    llm.close()


@pytest.mark.own_steps
def test_no_step_stands_in_where_bits_would_differ() -> None:
    llm = LLM(make_params(), **vars(engine(**SIZES)))
    asked = SamplingParams(max_tokens=3, ignore_eos=True)
    for prompts in (make_prompts(*[5] * 12), make_prompts(7, 4)):
        assert tokens_of(llm.generate(prompts, asked, use_tqdm=False))
    used = {b.rows for b in llm.session.runner.usage if b.phase == "decode"}
    assert used == {8, 16}
    llm.close()
