"""A server of two replicas on Ray Serve, with one folder of prefixes: replicas are killed, and the
router forgets all, at random moments under load; every request is answered once, with the tokens of
one engine.
"""

import random
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jpaged.errors import ConfigError
from tests.clients.fleets import (
    FLEET_MARKS,
    GENERATE,
    SETTINGS,
    answer,
    body,
    kill_one,
    metric,
    tokens_of,
    wait_without,
)
from tests.clients.local_ray import local_ray
from tests.openai.live import PATIENCE_S, Live, serving
from tests.text_model import write_folder

ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytest.importorskip("grpc", reason="ray[serve] is not installed")
pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, of pydantic
    from jpaged.fleet.on_ray import NAME, start_fleet
from jpaged.fleet.registry import FLEETS  # noqa: E402
from jpaged.fleet.router import Router  # noqa: E402

pytestmark = FLEET_MARKS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders of one architecture, and one whose weights are cut."""
    home = tmp_path_factory.mktemp("fleet")
    first, second = (write_folder(home / name, name) for name in ("first", "second"))
    broken = write_folder(home / "broken", "second")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return [first, second, broken]


@pytest.fixture(scope="module")
def live(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with local_ray(num_cpus=4, object_store_memory=80 << 20):
        store = str(tmp_path_factory.mktemp("prefixes"))
        llm = start_fleet(
            folders[0],
            replicas=2,
            max_retries=20,
            drain_s=2.0,
            prefix_store=store,
            swap_space_gib=0.001,
            **SETTINGS,
        )
        with serving(llm, enable_control=True, max_waiting=64, ping_s=None) as live:
            live.patience_s = 4 * PATIENCE_S
            yield live


def test_answers_are_those_of_one_engine(live: Live, folders: list[Path]) -> None:
    expected = tokens_of(folders[0], 8)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda i: answer(live, i), range(8))) == expected
    assert live.request("/ready")[0] == 200 and live.request("/health")[0] == 200
    assert metric(live, "jpaged_fleet_replicas") == 2
    _, text, _ = live.request("/metrics")
    assert text.count("\njpaged_replica_steps_total{replica=") == 2
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
    assert live.events("/v1/chat/completions", chat)
    assert live.request("/status")[1]["vocab_size"] == 97
    wrong = body(0, 0) | {"token_ids": [5] * 500}
    assert live.request(GENERATE, wrong)[0] == 400
    # Equal beginnings went to one replica, which had them.
    assert metric(live, "jpaged_cached_prompt_tokens_total") > 0


def test_replicas_and_the_router_die_under_load(live: Live, folders: list[Path]) -> None:
    expected, rng, is_over = tokens_of(folders[0], 40), random.Random(3), threading.Event()
    seconds = list[float]()

    def kill() -> None:
        for _ in range(2):
            if is_over.wait(rng.uniform(0.5, 2.0)):
                return
            seconds.append(wait_without(live, kill_one(rng)))

    def forget() -> None:
        llm: Any = live.server.llm
        fresh = Router()
        fresh.keep(llm.router.replicas)
        FLEETS[NAME].router = llm.router = llm.replicas.router = fresh

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        rounds = 0
        while killing.is_alive() or not rounds:
            with ThreadPoolExecutor(8) as threads:
                assert list(threads.map(lambda i: answer(live, i), range(40))) == expected
            forget()
            rounds += 1
    finally:
        is_over.set()
        killing.join()
    assert len(seconds) == 2
    print("seconds from a kill to two replicas:", [round(s, 1) for s in seconds])
    assert metric(live, "jpaged_fleet_requests_retried_total") > 0
    live.server.llm.router.check()  # pyright: ignore[reportAttributeAccessIssue]


def test_what_a_dead_replica_wrote_is_found_by_the_next(live: Live) -> None:
    """All replicas have one folder; what is read from it is what was computed: the tokens of the
    tests here are those of engines without it.
    """
    assert metric(live, "jpaged_store_write_blocks_total") > 0
    wait_without(live, kill_one(random.Random(0)))
    for i in range(8):
        answer(live, i)
    assert metric(live, "jpaged_store_bad_blocks_total") == 0


def test_weights_reach_every_replica(live: Live, folders: list[Path]) -> None:
    _, second, broken = folders
    told = live.post("/update_weights", {"folder": str(second)})
    assert told["weight_version"] == 2 and told["replicas"] == 2
    assert told["bytes"] > 0 and told["seconds"] > 0
    expected = tokens_of(second, 8)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda i: answer(live, i), range(8))) == expected
    status, error, _ = live.request("/update_weights", {"folder": str(broken)})
    assert status == 400 and error["error"]["code"] == "invalid_weights"
    wait_without(live, kill_one(random.Random(1)))
    live.post("/pause", {})
    with ThreadPoolExecutor(8) as threads:  # also from a replica that began with the old weights
        asked = [threads.submit(answer, live, i) for i in range(8)]
        time.sleep(0.3)
        assert not any(one.done() for one in asked)
        live.post("/resume", {})
        assert [one.result() for one in asked] == expected
    assert live.request("/weight_info")[1] == {"weight_version": 2}


def test_what_cannot_start_says_why(live: Live, folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match="min_replicas=3"):
        start_fleet(folders[0], replicas=2, min_replicas=3)
