"""RayLLM: two engines on a local Ray cluster, killed in the middle; nothing is lost, nothing comes
twice.
"""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jpaged
from jpaged import CheckpointError, ConfigError, SamplingParams
from jpaged.demo import MODEL_PATH
from jpaged.errors import ReplicaError
from jpaged.integrations.batch import BatchRequest, Settings
from jpaged.request.inputs import Chat
from tests.clients.local_ray import local_ray

ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from jpaged.integrations import ray_replica  # noqa: E402
from jpaged.integrations.ray_llm import RayLLM  # noqa: E402

# Ray warns of its own settings, and leaves sockets and processes to the end of the program.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in (
        "DeprecationWarning",
        "FutureWarning",
        "ResourceWarning",
        "pytest.PytestUnraisableExceptionWarning",
    )
]
SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "seq_buckets": (8,),
    "num_blocks": 128,
    "block_size": 8,
    "max_model_len": 96,
}
EXACT: dict[str, Any] = SMALL | {"dtype": "float32"}
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
PROMPTS = [f"def f{i % 7}(" for i in range(40)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Whose actors have two devices each, and speak to each other by gloo."""
    own = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, own):
            stack.enter_context(local_ray(num_cpus=4))
        yield


def finish(llm: RayLLM) -> dict[str, jpaged.RequestOutput]:
    """Everything that is unfinished, each request once."""
    ended = list[jpaged.RequestOutput]()
    while llm.has_unfinished():
        ended += llm.step()
    assert len({output.request_id for output in ended}) == len(ended)
    return {output.request_id: output for output in ended}


def texts(outputs: dict[str, jpaged.RequestOutput]) -> dict[str, str | None]:
    return {request_id: output.outputs[0].text for request_id, output in outputs.items()}


def let_one_die(monkeypatch: pytest.MonkeyPatch, marker: Path, rank: int = 0) -> None:
    """Have one actor of this rank, whichever is the first to get requests, be killed when it has
    begun them: on a busy machine one replica may have answered all before the other is up.
    """

    class Mortal(ray_replica.Replica):
        def exchange(
            self, requests: list[Any], aborted: list[str], steps: int | None = None
        ) -> Any:
            dies = bool(requests) and self.rank == rank and not marker.exists()
            if dies:
                try:
                    marker.touch(exist_ok=False)
                except FileExistsError:
                    dies = False
            result = super().exchange(requests, aborted, steps)
            if dies:
                os.kill(os.getpid(), 9)
            return result

    monkeypatch.setattr(ray_replica, "Replica", Mortal)


def test_a_killed_replica_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    let_one_die(monkeypatch, tmp_path / "dead")
    llm = RayLLM(MODEL_PATH, replicas=2, **SMALL)
    try:
        for i, prompt in enumerate(PROMPTS):
            llm.add_request(prompt, PARAMS, request_id=f"r{i}")
        llm.add_request("x" * 500, PARAMS, request_id="long")
        ended = finish(llm)
        stats = llm.stats()
        assert stats["replicas_lost"] == 1 and stats["requests_retried"] > 0
        assert set(ended) == {*(f"r{i}" for i in range(40)), "long"}
        error = ended.pop("long").error
        assert isinstance(error, jpaged.CapacityError) and "max_model_len" in str(error)
        assert all(o.error is None and len(o.outputs[0].token_ids) == 24 for o in ended.values())
        again = {llm.add_request(p, PARAMS, request_id=f"r{i}") for i, p in enumerate(PROMPTS)}
        assert texts(finish(llm)) == texts(ended) and again == set(
            ended
        )  # the same on any replica, at any time
        assert llm.stats()["decode_tokens"] >= 2 * 40 * 23
    finally:
        llm.close()


def test_a_request_that_kills_engines_is_found_without_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mortal(ray_replica.Replica):
        def exchange(
            self, requests: list[Any], aborted: list[str], steps: int | None = None
        ) -> Any:
            if any(prompt == "poison" for _, prompt, _ in requests):
                os.kill(os.getpid(), 9)
            return super().exchange(requests, aborted, steps)

    monkeypatch.setattr(ray_replica, "Replica", Mortal)
    llm = RayLLM(MODEL_PATH, replicas=1, max_retries=2, **SMALL)
    try:
        for i in range(12):
            llm.add_request("poison" if i == 5 else f"def f{i}(", PARAMS, request_id=f"r{i}")
        ended = finish(llm)
        assert len(ended) == 12
        error = ended.pop("r5").error
        assert isinstance(error, ReplicaError) and "each of the 3 times" in str(error)
        assert all(output.error is None for output in ended.values())
        assert llm.stats()["replicas_lost"] == 3
    finally:
        llm.close()


def test_an_engine_that_raises_is_replaced_and_one_that_cannot_start_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    marker = tmp_path / "raised"

    class Frail(ray_replica.Replica):
        def start(self, *args: Any, **how: Any) -> SamplingParams:
            if marker.exists():
                raise MemoryError("no room for the model")
            return SamplingParams()

        def exchange(
            self, requests: list[Any], aborted: list[str], steps: int | None = None
        ) -> Any:
            marker.touch()
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(ray_replica, "Replica", Frail)
    llm = RayLLM(None, replicas=1, max_retries=1)
    try:
        llm.add_request("a")
        with pytest.raises(
            ReplicaError, match=r"no replica can be kept running: 2 starts.*no room for the model"
        ):
            finish(llm)
    finally:
        llm.close()


def test_requests_go_to_the_replicas_that_have_the_fewest_and_can_be_aborted() -> None:
    llm = RayLLM(MODEL_PATH, replicas=1, **SMALL)
    try:
        for i in range(30):
            llm.add_request("def f(", PARAMS, request_id=f"r{i}")
        with pytest.raises(jpaged.RequestError, match="in use"):
            llm.add_request("a", request_id="r0")
        outputs = llm.step()
        assert len(llm._slots[0].requests) <= 2 * SMALL["max_num_seqs"] < len(llm._unfinished)
        done = {output.request_id for output in outputs}
        for i in range(30):
            llm.abort(f"r{i}")
        assert not llm.has_unfinished()
        llm.add_request(
            Chat(messages=[{"role": "user", "content": "hi"}]), PARAMS, request_id="chat"
        )
        line = BatchRequest(number=1)
        line.parse(
            b'{"prompt": "a b c d e f", "truncate_prompt_tokens": 2, "cache_salt": "s"}',
            Settings(defaults=PARAMS),
        )
        llm.add_request(line.prompt_for, line.params, request_id="line")
        ended = finish(llm)
        assert set(ended) == {"chat", "line"} and not done & set(ended)
        assert (
            ended["chat"].error is ended["line"].error is None
            and len(ended["line"].prompt_token_ids) == 2
        )
    finally:
        llm.close()


def test_what_every_replica_would_say_is_raised_at_once(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        RayLLM(tmp_path, replicas=1)
    with pytest.raises(ConfigError, match="replicas=0"):
        RayLLM(None, replicas=0)
    with pytest.raises(
        ConfigError, match=r"no replica had started after 1 s: each asks for GPU=1; Ray has CPU=4"
    ):
        RayLLM(None, resources={"GPU": 1}, start_timeout_s=1)


def begin(llm: RayLLM) -> None:
    """Requests that both replicas have begun, and that take many exchanges."""
    ray.get([slot.starting for slot in llm._slots if slot.starting is not None])
    llm.add_request("def f(", PARAMS)
    finish(llm)
    asked = dataclasses.replace(PARAMS, max_tokens=60, temperature=0.0)
    for i in range(8):
        llm.add_request(f"def f{i}(", asked, request_id=f"r{i}")
    assert not llm.step() and all(len(slot.requests) == 4 for slot in llm._slots)


@pytest.mark.parametrize(("source", "devices"), [("folder", 1), ("object", 1), ("leaves", 2)])
def test_new_weights_in_place(
    source: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder, from a tree in Ray's store and from a tree of objects, under requests on two
    replicas and on meshes: each goes on by the mode, its spans say so, later ones are the new
    model's, and the bytes that were read are those of the weights.
    """
    old = jpaged.load_params(MODEL_PATH, dtype="float32")
    new = jax.tree.map(lambda x: x * 1.25 if x.ndim > 1 else x, old)
    new = jpaged.Params(dict(new), old.config, old.source)
    weights: Any = tmp_path
    if source == "folder":
        jpaged.save_params(new, tmp_path)
    elif source == "object":
        weights = new
    else:
        weights = ray.put(jax.tree.map(lambda x: ray.put(np.asarray(x)), new))

    class Slow(ray_replica.Replica):
        def exchange(
            self, requests: list[Any], aborted: list[str], steps: int | None = None
        ) -> Any:
            return super().exchange(requests, aborted, 2)

    monkeypatch.setattr(ray_replica, "Replica", Slow)
    llm = RayLLM(MODEL_PATH, replicas=2, tensor_parallel_size=devices, **EXACT)
    try:
        begin(llm)
        with pytest.raises(jpaged.RequestError, match="are unfinished"):
            llm.update_params(weights)
        with pytest.raises(CheckpointError):
            llm.update_params(tmp_path / "none", mode="keep")
        llm.update_params(weights, mode="recompute")
        stats = llm.stats()
        size = sum(x.nbytes for x in jax.tree.leaves(new))
        assert stats["weight_bytes_read"] == 2 * size and stats["weight_read_s"] > 0
        ended = finish(llm)
        spans = [out.outputs[0].weight_versions for out in ended.values()]
        assert all([span.version for span in of_one] == [1, 2] for of_one in spans)
        assert all(of_one[-1].end == 60 for of_one in spans)
        alone = jpaged.LLM(new, **EXACT)
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (expected,) = alone.generate(["class A"], greedy, use_tqdm=False)
        for out in ended.values():  # what followed is by the new weights over all tokens
            ids, after = out.outputs[0].token_ids, out.outputs[0].weight_versions[-1].start
            prompt = out.prompt_token_ids + ids[:after]
            asked = dataclasses.replace(greedy, max_tokens=60 - after)
            (rest,) = alone.generate([prompt], asked, use_tqdm=False)
            assert rest.outputs[0].token_ids == ids[after:]
        alone.close()
        names = [llm.add_request("class A", greedy) for _ in range(4)]
        ended = finish(llm)
        assert {tuple(ended[n].outputs[0].token_ids) for n in names} == {
            tuple(expected.outputs[0].token_ids)
        }
        assert {ended[n].weight_version for n in names} == {2}
    finally:
        llm.close()


@pytest.mark.parametrize(("hosts", "devices"), [(None, 2), (2, 4)])
def test_replicas_that_are_meshes(
    hosts: int | None, devices: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an actor's two devices, and of the devices of two actors: the texts of one device; one of
    the actors is killed on the way.
    """
    # In f32: sums over devices turn a token of bf16 now and then.
    alone = RayLLM(MODEL_PATH, replicas=1, **EXACT)
    for i, prompt in enumerate(PROMPTS):
        alone.add_request(prompt, PARAMS, request_id=f"r{i}")
    expected = texts(finish(alone))
    alone.close()
    let_one_die(monkeypatch, tmp_path / "dead", rank=(hosts or 1) - 1)
    llm = RayLLM(MODEL_PATH, replicas=2, hosts=hosts, tensor_parallel_size=devices, **EXACT)
    try:
        for i, prompt in enumerate(PROMPTS):
            llm.add_request(prompt, PARAMS, request_id=f"r{i}")
        assert texts(finish(llm)) == expected
        assert llm.stats()["replicas_lost"] == 1 and llm.stats()["requests_retried"] > 0
        assert [len(slot.actors) for slot in llm._slots] == [hosts or 1] * 2
    finally:
        llm.close()
