"""Guesses of models that keep states: bits are those without, wherever a guess is right or wrong,
and what is found again later is the state that tokens one by one leave.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import (
    LLM,
    EngineConfig,
    ModelConfig,
    Params,
    RequestOutput,
    SamplingParams,
    kept,
)
from jpaged.config import Speculative
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.kinds import Replay
from jpaged.engine.drafting import Drafter, can_draft
from jpaged.engine.sequence import Sequence
from jpaged.models.layers.conv import ConvConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.runtime.runner import Runner
from jpaged.types import Tokenizer
from kernels_cpu.library import unavailable
from tests.byte_tokenizer import CONFIG, make_tokenizer
from tests.heads import counting_mtp, guesses_of
from tests.test_lora import make_lora
from tests.test_states import checked
from tests.tiny import ENGINE, config, make_params, make_prompts, tokens_of

# Layers of each kind, in bf16 by kernels of one bit, which take tiles of 32 and of 16 columns.
PLAIN = config(num_layers=4, head_dim=32, intermediate_size=64, eos_token_ids=())
MIXERS = (
    DeltaConfig(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=32),
    ConvConfig(channels=PLAIN.hidden_size),
    MambaConfig(num_heads=4, head_dim=24, state_dim=16),
    PLAIN.layers[3].mixer,
)
MODEL = dataclasses.replace(
    PLAIN,
    family="qwen3_5_text",
    layers=[
        dataclasses.replace(layer, mixer=mixer)
        for layer, mixer in zip(PLAIN.layers, MIXERS, strict=True)
    ],
)
PARAMS = make_params(0, MODEL, jnp.bfloat16)
# The same, so that two devices can share it.
SPLITS = dataclasses.replace(
    MODEL,
    layers=[
        dataclasses.replace(MODEL.layers[0], mixer=dataclasses.replace(MIXERS[0], num_key_heads=2)),
        *MODEL.layers[1:],
    ],
)
AHEAD = 6  # guesses of a step: a run may pass the ends of two blocks of 4
IS_EXACT = unavailable() is None
SETTINGS: dict[str, Any] = vars(ENGINE) | {"deterministic": IS_EXACT, "num_blocks": 160}
SETTINGS["num_states"] = 160  # none of those that rows have passed is reused
GUESSES: dict[str, Any] = {"method": "ngram", "num_tokens": AHEAD, "adaptive": False}
PROMPTS = make_prompts(5, 7, 4, 9)
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"temperature": 0.7, "n": 2, "seed": 2},
    {"seed": 3},
]
ASKED = [SamplingParams(max_tokens=24, ignore_eos=True, **way) for way in WAYS]


class Foretold:
    """Drafts of which the first some are what comes and the others are not: at each place in a
    block, so many as were not tried there yet. rests: what comes after each prompt, by the index of
    the sample. tried: places, and how many were right.
    """

    def __init__(self) -> None:
        self.rests: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self.right = itertools.cycle(range(AHEAD + 1))
        self.tried: set[tuple[int, int]] = set()

    def learn(self, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.outputs:
                self.rests[tuple(prompt), completion.index] = list(completion.token_ids)

    def draft(self, drafter: Drafter, seq: Sequence, row: Any, most: int) -> list[int]:
        most = min(most, AHEAD, seq.end - len(seq) - seq.pending - 1)
        if most < 1 or not can_draft(seq):
            return []
        rest = self.rests[tuple(seq.token_ids[: seq.prompt_len]), seq.index]
        coming, place = rest[seq.num_generated :][:most], len(seq) % 4
        untried = [n for n in range(len(coming) + 1) if (place, n) not in self.tried]
        right = untried[-1] if untried else min(next(self.right), len(coming))
        self.tried.add((place, right))
        return [t if i < right else (t + 1) % 90 for i, t in enumerate(coming)]


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch) -> Foretold:
    told = Foretold()
    monkeypatch.setattr(Drafter, "_draft", lambda *args: told.draft(*args))
    return told


def served(
    params: Params, *, mesh: Mesh | None = None, tokenizer: Tokenizer | None = None, **changes: Any
) -> LLM:
    settings: dict[str, Any] = SETTINGS | changes
    return LLM(params, mesh=mesh, tokenizer=tokenizer, **settings)


def states_of(runner: Runner) -> int:
    """How many states there are, in each group that keeps any."""
    [count] = {pool.num_blocks for pool in runner.pools if pool.group.record.per == "block"}
    return count


@functools.cache
def plain() -> LLM:
    return served(PARAMS)


@functools.cache
def guessing() -> LLM:
    return served(PARAMS, speculative=GUESSES)


def run(llm: LLM, prompts: Any, asked: list[SamplingParams]) -> list[RequestOutput]:
    ids = [llm.add_request(p, how) for p, how in zip(prompts, asked, strict=True)]
    found = checked(llm)
    return [found[i] for i in ids]


def bits(outputs: list[RequestOutput]) -> Any:
    """Tokens, and where rows have the same bits in any batch, their logprobs."""
    completions = [c for output in outputs for c in output.outputs]
    return [(c.token_ids, c.token_logprobs.tobytes() if IS_EXACT else None) for c in completions]


def expected(foretold: Foretold, prompts: Any, asked: list[SamplingParams]) -> Any:
    outputs = run(plain(), prompts, asked)
    foretold.learn(prompts, outputs)
    return bits(outputs)


def test_right_and_wrong_at_every_place(foretold: Foretold) -> None:
    """Greedy and seeded rows, of several samples too; then prompts that go on from each block that
    was closed within guesses.
    """
    llm = guessing()
    llm.reset_prefix_cache()
    wanted = expected(foretold, PROMPTS, ASKED)
    outputs = run(llm, PROMPTS, ASKED)
    assert bits(outputs) == wanted == bits(run(llm, PROMPTS, ASKED))
    for i in (0, 1) * 6:  # alone, with room for all guesses
        assert bits(run(llm, PROMPTS[i : i + 1], ASKED[i : i + 1])) == wanted[i : i + 1]
    assert foretold.tried >= {(place, right) for place in range(4) for right in range(AHEAD + 1)}
    assert llm.stats()["accepted_tokens"] > 0
    whole = PROMPTS[0] + list(outputs[0].outputs[0].token_ids)
    prompts = [[*whole[:shared], 90 + shared % 3] for shared in range(8, len(whole), 4)]
    greedy = [ASKED[0]] * len(prompts)
    plain().reset_prefix_cache()
    wanted = expected(foretold, prompts, greedy)
    outputs = run(llm, prompts, greedy)
    assert bits(outputs) == wanted
    assert [out.num_cached_tokens for out in outputs] == [len(p) - 1 for p in prompts]


def test_a_replay_off_by_one_shows(foretold: Foretold, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(foretold, PROMPTS, ASKED)
    replays = BlockManager.replays

    def short(blocks: BlockManager, tables: Any, *span: int) -> list[Replay]:
        *before, last = replays(blocks, tables, *span)
        return [*before, last._replace(num_tokens=last.num_tokens - 1)]

    monkeypatch.setattr(BlockManager, "replays", short)
    guessing().reset_prefix_cache()
    assert bits(run(guessing(), PROMPTS, ASKED)) != wanted
    guessing().reset_prefix_cache()


@pytest.mark.middle
@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 16, "swap_space_gib": 0.01, "swap_min_tokens": 0},
        {"num_blocks": 18, "mixed": True, "decode_steps": 4, "deterministic": False},
        {"deterministic": False, "enable_prefix_caching": False, "num_states": 40},
    ],
    ids=["swapped", "mixed, 4 steps", "no prefix cache"],
)
def test_whatever_happens_to_a_row(foretold: Foretold, changes: dict[str, Any]) -> None:
    wanted = [tokens for tokens, _ in expected(foretold, PROMPTS, ASKED)]
    llm = served(PARAMS, speculative=GUESSES, **changes)
    for _ in range(2):
        assert [tokens for tokens, _ in bits(run(llm, PROMPTS, ASKED))] == wanted
    if "num_blocks" in changes:
        assert llm.stats()["preemptions"] > 0
    llm.close()


@pytest.mark.middle
@pytest.mark.parametrize(
    ("axes", "changes"),
    [({"tp": 2}, {}), ({"dp": 2}, {"data_parallel_size": 2, "num_blocks": 80})],
    ids=["tp", "dp"],
)
def test_on_two_devices(foretold: Foretold, axes: dict[str, int], changes: dict[str, Any]) -> None:
    """In f32, in which no near tie turns: states are split, or rows go to two replicas."""
    params = make_params(0, SPLITS)
    alone = served(params, deterministic=False)
    outputs = run(alone, PROMPTS, ASKED)
    foretold.learn(PROMPTS, outputs)
    mesh = Mesh(np.array(jax.devices()[:2]), tuple(axes))
    llm = served(params, mesh=mesh, deterministic=False, speculative=GUESSES, **changes)
    assert tokens_of(run(llm, PROMPTS, ASKED)) == tokens_of(outputs)
    assert llm.stats()["accepted_tokens"] > 0
    llm.close()
    alone.close()


def test_adapters_beams_forms_and_snapshots(foretold: Foretold) -> None:
    """Requests with each of these have the bits that they have where nothing guesses, beside rows
    for which something does.
    """
    pytest.importorskip("llguidance")
    model = dataclasses.replace(MODEL, vocab_size=CONFIG.vocab_size)
    params, asked = make_params(0, model, jnp.bfloat16), ASKED[:2]
    form = dataclasses.replace(ASKED[1], structured={"regex": "(true|[0-9]{4})*"}, ignore_eos=False)
    prompts, tuned = PROMPTS[:2], [{"prompt_token_ids": p, "adapter": "tuned"} for p in PROMPTS[2:]]
    changes: dict[str, Any] = {"max_loras": 1, "max_lora_rank": 4}
    results = []
    for speculative in (None, GUESSES):
        tokenizer: Any = make_tokenizer()
        llm = served(params, tokenizer=tokenizer, speculative=speculative, **changes)
        llm.add_adapter("tuned", make_lora(1, model=model))
        outputs = run(llm, prompts + tuned, asked * 2)
        foretold.learn(PROMPTS, outputs)
        beams = llm.beam_search(PROMPTS[:1], 2, max_tokens=8, use_tqdm=False)
        mixed = run(llm, [*prompts, "say true: "], [*asked, form])
        foretold.learn([out.prompt_token_ids for out in mixed], mixed)
        ids = [llm.add_request(p, how) for p, how in zip(prompts, asked, strict=True)]
        for _ in range(5):
            llm.step()
        snapshot, ends = llm.snapshot(), []
        for _ in range(2):
            found = checked(llm)
            ends.append(bits([found[i] for i in ids]))
            run(llm, PROMPTS[2:], asked)  # other states in these blocks
            llm.restore(snapshot)
        for i in ids:
            llm.abort(i)
        results.append([bits(outputs), bits(beams), bits(mixed), *ends])
        assert speculative is None or llm.stats()["accepted_tokens"] > 30
        llm.close()
    assert results[0] == results[1]
    whole, _, mixed, first, again = results[0]
    assert first == again == whole[:2] == mixed[:2]


@pytest.mark.middle
def test_an_mtp_head_guesses_for_states() -> None:
    """By the engine's own steps: most guesses are right, and bits are those without."""
    params, head = counting_mtp(PARAMS, 0.1)
    alone = served(params)
    wanted = bits(alone.generate(PROMPTS, ASKED, use_tqdm=False))
    asked = {**GUESSES, "method": "mtp", "num_tokens": 3, "model": head}
    llm = served(params, speculative=asked)
    assert bits(run(llm, PROMPTS, ASKED)) == wanted
    stats = llm.stats()
    assert stats["acceptance_rate"] > 0.5 and stats["drafted_tokens"] > 30, stats
    for used in (alone, llm):
        used.close()


@pytest.mark.slow
def test_two_devices_share_an_mtp_head() -> None:
    """In f32: guesses come true as often as on one device, and tokens are those without."""
    params, head = counting_mtp(make_params(0, SPLITS), 0.1)
    asked = {**GUESSES, "method": "mtp", "num_tokens": 3, "model": head}
    settings: dict[str, Any] = {"deterministic": False}
    alone = served(params, **settings)
    wanted = tokens_of(alone.generate(PROMPTS, ASKED, use_tqdm=False))
    alone.close()
    rates = []
    for devices in (1, 2):
        llm = served(params, speculative=asked, tensor_parallel_size=devices, **settings)
        assert tokens_of(run(llm, PROMPTS, ASKED)) == wanted
        rates.append(llm.stats()["acceptance_rate"])
        llm.close()
    assert rates[0] == rates[1] > 0.4


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(PLAIN, id="attention alone", marks=pytest.mark.slow),
        pytest.param(MODEL, id="states too", marks=pytest.mark.middle),
    ],
)
def test_a_draft_model_with_states(monkeypatch: pytest.MonkeyPatch, target: ModelConfig) -> None:
    """What it guesses is what it goes on with alone: its own guesses, right or wrong, leave no
    trace in its states, which rows, hits and the store find as single tokens leave them.
    """
    params, drafting = make_params(0, target, jnp.bfloat16), make_params(5, MODEL, jnp.bfloat16)
    guessing = {**GUESSES, "method": "draft", "num_tokens": 3, "model": drafting}
    few = {"num_blocks": 24, "num_states": None, "swap_space_gib": 0.01, "swap_min_tokens": 0}
    alone, seen = served(params, num_states=None), guesses_of(monkeypatch)
    llm = served(params, speculative=guessing, **few)
    asked = [dataclasses.replace(how, temperature=0, seed=None) for how in ASKED]
    for how in (ASKED, asked, asked):  # whose prompts are found then
        seen.clear()
        wanted = bits(alone.generate(PROMPTS, how, use_tqdm=False))
        assert bits(run(llm, PROMPTS, how)) == wanted
    stats = llm.stats()
    assert stats["cached_tokens"] > 0 and stats["preemptions"] > 0
    assert stats["wasted_tokens"] > 20 and stats["accepted_tokens"] > 0, stats
    reference = served(drafting, num_states=None)
    tokens, guesses = zip(*seen, strict=True)
    greedy = [SamplingParams(temperature=0, max_tokens=len(x), ignore_eos=True) for x in guesses]
    found = tokens_of(reference.generate(list(tokens), greedy, use_tqdm=False))
    assert len(guesses) > 30 and {len(x) for x in guesses} >= {1, 2, 3}
    assert list(guesses) == found
    for used in (alone, llm, reference):
        used.close()


@pytest.mark.middle
def test_states_that_only_a_draft_model_keeps() -> None:
    """num_states is of its pool then, rows wait for them, and it is as large as a call needs."""
    params, drafting = make_params(0, PLAIN, jnp.bfloat16), make_params(4, MODEL, jnp.bfloat16)
    guessing = {**GUESSES, "method": "draft", "num_tokens": 3, "model": drafting}
    alone = served(params, num_states=None)
    wanted = bits(alone.generate(PROMPTS, ASKED, use_tqdm=False))
    alone.close()
    llm = served(params, speculative=guessing, num_states=8)  # a row is given four
    assert bits(run(llm, PROMPTS, ASKED)) == wanted
    assert states_of(llm.session.runner) == 8
    llm.close()
    speculative = Speculative(method="draft", num_tokens=3, adaptive=False)
    changes = {"num_blocks": None, "num_states": None, "speculative": speculative}
    engine_config = EngineConfig(**SETTINGS | changes)
    grown = []
    for count in (1, 4, 1):
        outputs = jpaged.generate(
            params, PROMPTS[:count], ASKED[:count], engine_config=engine_config, draft=drafting
        )
        assert bits(outputs) == wanted[: count + (count > 2)]
        grown.append(states_of(kept.sessions()[-1].runner))
    jpaged.release(compiled=True)
    assert grown[0] == 4 and grown[0] < grown[1] == grown[2]


@pytest.mark.slow
def test_a_model_with_states_that_guesses_for_itself() -> None:
    """Every guess is right, also across ends of blocks, on two devices and for sampled rows."""
    params = make_params(0, SPLITS)
    asked = {**GUESSES, "method": "draft", "num_tokens": 5, "model": params}
    alone = served(params, deterministic=False)
    wanted = tokens_of(alone.generate(PROMPTS, ASKED, use_tqdm=False))
    llm = served(params, deterministic=False, speculative=asked, tensor_parallel_size=2)
    assert tokens_of(run(llm, PROMPTS, ASKED)) == wanted
    stats = llm.stats()
    assert stats["accepted_tokens"] == stats["drafted_tokens"] > 40
    for used in (alone, llm):
        used.close()
