"""Ray Serve adds a replica under load and removes it when there is little to do, with requests
running all the while: each is answered once, with the tokens of one engine.
"""

import functools
import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clients.fleets import FLEET_MARKS, SETTINGS, answer, metric, tokens_of
from tests.clients.local_ray import local_ray
from tests.openai.live import PATIENCE_S, Live, serving
from tests.text_model import write_folder

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytest.importorskip("grpc", reason="ray[serve] is not installed")
pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, of pydantic
    from jpaged.fleet import on_ray

pytestmark = FLEET_MARKS
ROWS = SETTINGS["max_num_seqs"]
COUNT = 40
# By Serve's own settings half a minute and ten minutes pass before it believes a load.
QUICK = {
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 2.0,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("scaling") / "model", "first")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with local_ray(num_cpus=4, object_store_memory=80 << 20):
        with pytest.MonkeyPatch.context() as patch:
            # Of this module's names alone: Ray sends the real class to other processes by its name.
            names = vars(on_ray.serve_config)
            quick = functools.partial(names["AutoscalingConfig"], **QUICK)
            patch.setattr(
                on_ray, "serve_config", SimpleNamespace(**names | {"AutoscalingConfig": quick})
            )
            llm = on_ray.start_fleet(
                folder, replicas=1, min_replicas=1, max_replicas=2, drain_s=60.0, **SETTINGS
            )
        with serving(llm, max_waiting=64, ping_s=None) as live:
            live.patience_s = 4 * PATIENCE_S
            yield live


class Load:
    """Threads that ask one request after another, and hold each answer to what it is to be."""

    def __init__(self, live: Live, expected: list[list[int]]):
        self.live, self.expected = live, expected
        self.wanted, self.answered, self.wrong = 0, 0, list[Any]()
        self.numbers, self.threads = itertools.count(), list[threading.Thread]()

    def set(self, count: int) -> None:
        """Have so many threads ask, once those that are too many have their answers."""
        self.wanted = count
        for place in range(len(self.threads), count):
            self.threads.append(threading.Thread(target=self._ask, args=(place,)))
            self.threads[-1].start()
        for thread in self.threads[count:]:
            thread.join()
        del self.threads[count:]

    def _ask(self, place: int) -> None:
        while place < self.wanted:
            number = next(self.numbers) % len(self.expected)
            try:
                got: Any = answer(self.live, number)
            except BaseException as e:
                got = e
            self.answered += 1
            if got != self.expected[number]:
                self.wrong.append((number, got))


def wait_for(live: Live, count: int, load: Load) -> None:
    """Wait until requests are sent to so many replicas."""
    until = time.monotonic() + 6 * PATIENCE_S
    router = live.server.llm.router  # pyright: ignore[reportAttributeAccessIssue]
    while len(router.replicas) != count:
        assert time.monotonic() < until and not load.wrong, (router.replicas, load.wrong)
        time.sleep(0.05)


def test_no_request_is_lost_while_replicas_come_and_go(live: Live, folder: Path) -> None:
    load = Load(live, tokens_of(folder, COUNT))
    try:
        for _ in range(2):
            load.set(4 * ROWS)
            wait_for(live, 2, load)
            before = load.answered
            while load.answered < before + 2 * COUNT and not load.wrong:
                time.sleep(0.05)
            load.set(3)  # of which some run where a replica is removed
            wait_for(live, 1, load)
    finally:
        load.set(0)
    assert not load.wrong and load.answered > 4 * COUNT
    assert metric(live, "jpaged_fleet_replicas_lost_total") == 0
    live.server.llm.router.check()  # pyright: ignore[reportAttributeAccessIssue]
