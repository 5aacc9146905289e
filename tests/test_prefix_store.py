"""Prefixes that outlive the process, over real pools: what a later LLM finds in files gives the
tokens and logprobs of a cold run to the bit, whatever a pool is of, and every block that is fetched
is what the weights compute.
"""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, ModelConfig, RequestOutput, SamplingParams, served_pool
from jpaged.engine.cache import disk, handover, read_ahead
from jpaged.engine.cache.block_server import BlockMemory, BlockServer
from jpaged.engine.cache.tiers import TieredStore
from jpaged.errors import ConfigError
from jpaged.integrations.prefill_decode import PrefillDecode
from jpaged.openai.server.metrics import Metrics
from tests.recurrent import HYBRID
from tests.test_latents import MODEL as LATENTS
from tests.test_lora import make_lora
from tests.test_routed_experts import PARAMS as MIXTURE
from tests.tiny import ROOMY, assert_idle, config, engine_of, make_params, make_prompts

PARAMS = make_params()
PROMPTS = make_prompts(25, 30, 22, 27, 33, 24, seed=5)
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=8, seed=3, n=2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=8, seed=4, presence_penalty=1.0, ignore_eos=True),
] * 2
MESH = Mesh(np.array(jax.devices()[:2]), ("tp",))


def make(folder: Path | str | None, params: jpaged.Params = PARAMS, **settings: Any) -> LLM:
    store = {} if folder is None else {"prefix_store": str(folder), "swap_min_tokens": 0}
    return LLM(params, **vars(dataclasses.replace(ROOMY, **store | settings)))


def ask(llm: LLM) -> list[RequestOutput]:
    outs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
    assert_idle(llm)
    return outs


def same_bits(outs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for out, other in zip(outs, expected, strict=True):
        for a, b in zip(out.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids and a.logprobs == b.logprobs
            assert a.token_logprobs.tobytes() == b.token_logprobs.tobytes()


def blocks_of(llm: LLM) -> dict[tuple[bytes, int], Any]:
    """What an LLM's pools hold that can be found, by the digest of its content and by group."""
    engine, runner = engine_of(llm.session), llm.session.runner
    held: dict[tuple[bytes, int], Any] = {}
    for index, replica in enumerate(engine.replicas):
        for content, group, block_id in replica.blocks.latest_first():
            ids: list[list[int]] = [[] for _ in runner.kv_groups]
            ids[group] = [block_id]
            blocks = runner.fetch_blocks(runner.read_blocks(ids, index))
            assert content.digest is not None
            held[content.digest, group] = blocks[group][0]
    return held


PLACES: dict[str, tuple[jpaged.Params, dict[str, Any]]] = {
    "one device": (PARAMS, {}),
    "windows": (make_params(0, config(sliding_windows=(None, 7))), {}),
    "8 bits": (PARAMS, {"kv_cache_dtype": "int8"}),
    "bfloat16": (make_params(0, dtype=jnp.bfloat16), {}),
    "int8 weights": (PARAMS, {"quantization": "int8"}),
    "two devices": (PARAMS, {"tensor_parallel_size": 2}),
    "two devices, 8 bits": (PARAMS, {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}),
    "two replicas": (PARAMS, {"data_parallel_size": 2}),
    "two by two": (PARAMS, {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    "states": (make_params(0, HYBRID), {}),
    "states, two devices": (make_params(0, HYBRID), {"tensor_parallel_size": 2}),
    "latents": (make_params(0, LATENTS), {}),
    "latents, two by two": (
        make_params(0, LATENTS),
        {"data_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    "chosen experts": (MIXTURE, {"routed_experts": True}),
    "guesses": (PARAMS, {"speculative": {"method": "ngram", "num_tokens": 3}}),
}
QUICK = ("one device", "states")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have requests wait for what there is, however busy the machine."""
    monkeypatch.setattr(read_ahead, "MOST_LOOK_S", 60.0)
    monkeypatch.setattr(disk, "LOOK_S", 60.0)
    monkeypatch.setattr(read_ahead, "LEAST_PATIENCE_S", 60.0)
    monkeypatch.setattr(read_ahead, "MOST_PATIENCE_S", 60.0)
    monkeypatch.setattr(handover, "MOST_S", 60.0)


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p in QUICK else pytest.mark.middle) for p in PLACES]
)
def test_a_later_llm_has_the_bits_of_a_cold_run(place: str, tmp_path: Path) -> None:
    params, settings = PLACES[place]
    settings = settings | {"num_blocks": 200}
    cold = make(None, params, **settings)
    expected = ask(cold)
    assert all(out.num_cached_tokens == 0 for out in expected)
    cold.close()
    first = make(tmp_path, params, **settings)
    same_bits(ask(first), expected)
    computed = blocks_of(first)
    first.close()
    later = make(tmp_path, params, **settings)
    outs = ask(later)
    same_bits(outs, expected)
    assert all(out.num_cached_tokens >= 16 for out in outs)
    stats = later.stats()
    assert stats["store_read_blocks"] > 0 and stats["prefix_hit_rate"] > 0.6
    assert stats["store_bad_blocks"] == stats["store_late"] == stats["store_read_errors"] == 0
    # Whatever came from files is what the first one had computed.
    fetched = blocks_of(later)
    common = fetched.keys() & computed.keys()
    assert len(common) >= stats["loaded_blocks"] // (1 + ("two" in place)) > 0
    for key in common:
        jax.tree.map(np.testing.assert_array_equal, fetched[key], computed[key])
    if "routed_experts" in settings:
        for out, other in zip(outs, expected, strict=True):
            assert out.prompt_routed_experts is not None
            np.testing.assert_array_equal(out.prompt_routed_experts, other.prompt_routed_experts)
    later.close()


@pytest.fixture
def server() -> Iterator[BlockServer]:
    server = BlockServer(BlockMemory(1 << 26), "127.0.0.1", 0)
    yield server
    server.close()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(p, marks=() if p == "one device" else pytest.mark.middle)
        for p in PLACES
        if p != "guesses"
    ],
)
def test_a_pair_has_the_bits_of_one_engine(place: str, server: BlockServer) -> None:
    """One computes prompts and hands them over, another goes on, over a socket."""
    params, settings = PLACES[place]
    settings = settings | {"num_blocks": 200}
    alone = make(None, params, **settings)
    expected = ask(alone)
    alone.close()
    address = f"tcp://127.0.0.1:{server.port}"
    prefill = make(address, params, **settings, prefix_store_policy="write_through")
    decode = make(address, params, **settings)
    pair = PrefillDecode(prefill, decode)
    outs = pair.generate(PROMPTS, SAMPLING)
    same_bits(outs, expected)
    # All but what follows the last whole block of a prompt.
    assert [out.num_cached_tokens for out in outs] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]
    stats, handed = decode.stats(), prefill.stats()
    assert stats["store_read_blocks"] > 0 and handed["store_handed_late"] == 0
    assert stats["store_late"] == stats["store_bad_blocks"] == stats["store_read_errors"] == 0
    assert handed["generated_tokens"] == len(PROMPTS)
    computed, fetched = blocks_of(prefill), blocks_of(decode)
    common = fetched.keys() & computed.keys()
    assert len(common) > 0
    for key in common:
        jax.tree.map(np.testing.assert_array_equal, fetched[key], computed[key])
    prefill.close()
    decode.close()


def test_a_wrong_block_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: another block's bytes change what comes out."""
    first = make(tmp_path)
    expected = ask(first)
    first.close()

    def wrong(self: TieredStore, slot: Any) -> Any:
        return jax.tree.map(np.zeros_like, slot.data)

    monkeypatch.setattr(TieredStore, "get", wrong)
    later = make(tmp_path)
    with pytest.raises(AssertionError):
        same_bits(ask(later), expected)
    later.close()


def test_files_are_the_same_beside_other_replicas(tmp_path: Path) -> None:
    """A replica of two devices finds what one alone has written, and the other way round."""
    params, two = make_params(0, LATENTS), {"tensor_parallel_size": 2}
    for first, second in (({}, {"data_parallel_size": 2}), ({"data_parallel_size": 2}, {})):
        folder = tmp_path / f"{len(first)}"
        writes = make(folder, params, **two, **first)
        expected = ask(writes)
        writes.close()
        reads = make(folder, params, **two, **second)
        outs = ask(reads)
        assert all(out.num_cached_tokens >= 16 for out in outs)
        for out, other in zip(outs, expected, strict=True):
            assert out.outputs[0].token_ids == other.outputs[0].token_ids
        reads.close()


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "weights": (make_params(1), {}),
    "one number": (None, {}),
    "another dtype": (PARAMS, {"dtype": "bfloat16"}),
    "fewer bits": (PARAMS, {"quantization": "int8"}),
    "8 bits": (PARAMS, {"kv_cache_dtype": "int8"}),
    "block size": (PARAMS, {"block_size": 8}),
    "two devices": (PARAMS, {"tensor_parallel_size": 2}),
    "architecture": (
        jpaged.Params(dict(PARAMS), dataclasses.replace(PARAMS.config, rms_norm_eps=1e-3)),
        {},
    ),
}


@pytest.mark.middle
@pytest.mark.parametrize("other", OTHERS)
def test_nothing_stale_is_found(other: str, tmp_path: Path) -> None:
    params, settings = OTHERS[other]
    if params is None:  # a single number differs
        embed = PARAMS["embed"]["weight"]
        changed = dict(PARAMS) | {"embed": {"weight": embed.at[3, 5].add(1e-3)}}
        params = jpaged.Params(changed, PARAMS.config)
    first = make(tmp_path)
    ask(first)
    first.close()
    later = make(tmp_path, params, **settings)
    assert all(out.num_cached_tokens == 0 for out in ask(later))
    assert later.stats()["store_fetches"] == 0
    later.close()


def test_equal_weights_of_another_form_are_found(tmp_path: Path) -> None:
    """What counts are the numbers, not who holds them."""
    first = make(tmp_path)
    expected = ask(first)
    first.close()
    leaves = jax.tree.map(lambda x: jnp.array(np.array(x)), dict(PARAMS))
    copied = jpaged.Params(leaves, PARAMS.config)
    later = make(tmp_path, copied)
    outs = ask(later)
    same_bits(outs, expected)
    assert all(out.num_cached_tokens >= 16 for out in outs)
    later.close()


def test_new_weights_sleep_and_reset(tmp_path: Path) -> None:
    llm, fresh = make(tmp_path, num_blocks=200), make_params(1)
    expected = ask(llm)
    llm.sleep()
    llm.wake()
    outs = ask(llm)
    same_bits(outs, expected)
    assert all(out.num_cached_tokens >= 16 for out in outs), "it was written before it slept"
    llm.update_params(fresh)
    new = ask(llm)
    assert all(out.num_cached_tokens == 0 for out in new)
    llm.update_params(PARAMS)
    outs = ask(llm)
    same_bits(outs, expected)
    assert all(out.num_cached_tokens >= 16 for out in outs), "these weights were known"
    llm.reset_prefix_cache()
    assert all(out.num_cached_tokens == 0 for out in ask(llm))
    llm.close()


def test_adapters_are_known_by_their_weights(tmp_path: Path) -> None:
    def lora(seed: int) -> Any:
        return make_lora(seed, 2, PARAMS.config)

    first = make(tmp_path, max_loras=2, max_lora_rank=2)
    first.add_adapter("a", lora(1))
    prompt = {"prompt_token_ids": PROMPTS[0], "adapter": "a"}
    expected = first.generate([prompt], SAMPLING[0], use_tqdm=False)
    first.close()
    later = make(tmp_path, max_loras=2, max_lora_rank=2)
    later.add_adapter("b", lora(2))
    later.add_adapter("a", lora(1))
    (plain, other, same) = (
        later.generate([{"prompt_token_ids": PROMPTS[0], **asked}], SAMPLING[0], use_tqdm=False)
        for asked in ({}, {"adapter": "b"}, {"adapter": "a"})
    )
    assert [out[0].num_cached_tokens for out in (plain, other, same)] == [0, 0, 24]
    same_bits(same, expected)
    later.close()


def test_a_fork_writes_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of the threads that would."""
    called = list[int]()

    class Holder:
        def flush(self) -> None:
            called.append(os.getpid())

    holder, maker = Holder(), os.getpid()
    at_exit = functools.partial(served_pool._call, weakref.WeakMethod(holder.flush), maker)
    at_exit()
    assert called == [maker]
    monkeypatch.setattr(os, "getpid", lambda: maker + 1)
    at_exit()
    assert called == [maker]


def test_generate_takes_it(tmp_path: Path) -> None:
    settings = dataclasses.replace(ROOMY, prefix_store=str(tmp_path), swap_min_tokens=0)
    first = jpaged.generate(PARAMS, PROMPTS, SAMPLING, engine_config=settings)
    jpaged.release()
    again = jpaged.generate(PARAMS, PROMPTS, SAMPLING, engine_config=settings)
    same_bits(again, first)
    assert all(out.num_cached_tokens >= 16 for out in again)
    jpaged.release()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prefix_store=.*no folder that can be written"):
        make(tmp_path / "file" / "store")
    refused: list[dict[str, Any]] = [
        {"prefix_store": ""},
        {"prefix_store": 3},
        {"prefix_store_gib": 0},
    ]
    for bad in refused:
        with pytest.raises(ConfigError, match="prefix_store"):
            make(None, **bad)
    with pytest.raises(ConfigError, match="enable_prefix_caching is off") as caught:
        make(tmp_path, enable_prefix_caching=False)
    assert caught.value.rule == "files_are_for_others_to_find"
    with pytest.raises(ConfigError, match="prefix_store is None") as caught:
        make(None, prefix_store_policy="write_through")
    assert caught.value.rule == "a_policy_is_of_a_store"
    with pytest.raises(ConfigError, match="must be one of write_back, write_through"):
        make(None, prefix_store_policy="sometimes")
    with pytest.raises(ConfigError, match="set JPAGED_STORE_SECRET"):
        make("tcp://store.example:7400")
    with pytest.raises(ConfigError, match="must be a folder or tcp://HOST:PORT"):
        make("http://store.example:7400")


def test_metrics_have_its_counters(tmp_path: Path) -> None:
    first = make(tmp_path)
    ask(first)
    first.close()
    later = make(tmp_path)
    ask(later)
    stats = later.stats()
    lines = dict(line.split(" ") for line in Metrics().text(stats).splitlines() if line[0] != "#")
    for name, key in (
        ("jpaged_store_read_blocks_total", "store_read_blocks"),
        ("jpaged_store_read_bytes_total", "store_read_bytes"),
        ("jpaged_store_bytes_in_use", "store_bytes_in_use"),
    ):
        assert float(lines[name]) == stats[key] > 0
    for name in ("bad_blocks", "evicted_blocks", "write_errors"):
        assert lines[f"jpaged_store_{name}_total"] == "0"
    later.close()


PROCESS = """
import dataclasses, sys, time
import numpy as np
import jpaged
from jpaged.demo import MODEL_PATH, MODELS
folder, count, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
params = jpaged.load_params(MODELS.get(name, MODEL_PATH))
longer = dataclasses.replace(params.config, max_position_embeddings=count + 64)
params = jpaged.Params(dict(params), longer, params.source)
store = {} if folder == "none" else {"prefix_store": folder}
llm = jpaged.LLM(params, max_num_seqs=2, num_blocks=count // 64 + 8, **store)
text = [7 + (i * i * 31 + i // 5) % 2000 for i in range(count)]
asked = jpaged.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(out,) = llm.generate([text + [11, 12, 13]], asked, use_tqdm=False)
done = out.outputs[0]
bits = done.token_logprobs.tobytes().hex()
print(out.num_cached_tokens, done.token_ids, bits, sep="|", flush=True)
if name == "killed":
    print("ready", flush=True)
    while True:
        llm.generate([text + [i] for i in range(20, 40)], asked, use_tqdm=False)
llm.close()
"""


def process(folder: Path | str, count: int, name: str = "model") -> list[str]:
    """The prompt's cached tokens, its answer and the bits of that, of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(folder), str(count), name],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0].split("|")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "jpaged-demo-hybrid"])
def test_a_system_prompt_is_warm_at_the_first_request_after_a_restart(
    name: str, tmp_path: Path
) -> None:
    """8192 tokens on the embedded models, in processes of their own."""
    cold, first = (process(folder, 8192, name) for folder in ("none", tmp_path))
    later = process(tmp_path, 8192, name)
    assert cold[0] == first[0] == "0" and later[0] == "8192"
    assert cold[1:] == first[1:] == later[1:]


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_blocks_that_are_whole(tmp_path: Path) -> None:
    """Kill -9 at some moment of its work, several times; what is found gives the cold answer."""
    cold, cached = process("none", 2048), set[str]()
    for turn in range(3):
        args = [sys.executable, "-c", PROCESS, str(tmp_path), "2048", "killed"]
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            answer = running.stdout.readline().strip().split("|")
            cached.add(answer[0])
            assert answer[1:] == cold[1:]
            assert running.stdout.readline() == "ready\n"
            time.sleep(0.3 + 0.4 * turn)
            os.kill(running.pid, signal.SIGKILL)
    assert process(tmp_path, 2048)[1:] == cold[1:]
    assert cached == {"0", "2048"}, "what was used twice was there after the first kill"


def test_the_model_configs_are_of_their_kinds() -> None:
    assert isinstance(HYBRID, ModelConfig) and isinstance(LATENTS, ModelConfig)
