"""Images over HTTP with two replicas on Ray Serve: the answers are those of one engine, prompts of
one image find their replica's prefix, and a replica that dies takes no image along.
"""

import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from tests.clients.fleets import FLEET_MARKS, kill_one, wait_without
from tests.clients.local_ray import local_ray
from tests.openai.live import PATIENCE_S, Live, serving
from tests.vision_folder import ENGINE, data_url, picture, png, seen, write_vision_folder

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytest.importorskip("grpc", reason="ray[serve] is not installed")
pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, of pydantic
    from jpaged.fleet.on_ray import start_fleet

pytestmark = FLEET_MARKS
CHAT = "/v1/chat/completions"
DRAWN: dict[str, Any] = {"max_tokens": 5, "temperature": 1, "logprobs": True, "seed": 5}
LONG = "a long question about it"
LARGE = (32, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with local_ray(num_cpus=4, object_store_memory=80 << 20):
        llm = start_fleet(folder, replicas=2, max_retries=20, drain_s=2.0, **ENGINE)
        with serving(llm, max_images=3, ping_s=None) as live:
            live.patience_s = 4 * PATIENCE_S
            yield live
            assert live.server._generation.images._room.used == 0


def ask(live: Live, shade: int) -> Any:
    """The answer about an image, asked when no replica is busy with an earlier one."""
    llm: Any = live.server.llm
    began = time.monotonic()
    while llm.router.stats()["router_load_max"]:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)
    url = data_url(png(picture(shade, LARGE)))
    return live.post(CHAT, {"messages": seen(url, text=LONG), **DRAWN})


def logprobs(answer: Any) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def test_images_are_seen_by_every_replica(live: Live, folder: Path) -> None:
    alone = LLM(folder, **ENGINE)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=5, logprobs=0)
    expected = [
        alone.chat(seen(data_url(png(picture(i, LARGE))), text=LONG), params, use_tqdm=False)[0]
        for i in range(4)
    ]
    alone.close()
    for i, output in enumerate(expected):
        answer = ask(live, i)
        assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
        assert logprobs(answer) == pytest.approx(output.outputs[0].token_logprobs, abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    cached = [ask(live, i)["usage"]["prompt_tokens_details"]["cached_tokens"] for i in (0, 3, 9)]
    assert cached == [40, 40, 0]
    status = live.request("/status")[1]["images"]
    assert status["refused"] is None and status["max_images"] == 3
    wait_without(live, kill_one(random.Random(0)))
    for i, output in enumerate(expected):
        assert logprobs(ask(live, i)) == pytest.approx(output.outputs[0].token_logprobs, abs=1e-5)


def test_the_front_refuses_what_a_server_does(live: Live) -> None:
    for url, said in (
        ("/etc/passwd", "must begin with data:"),
        ("http://127.0.0.1/x.png", "hosts"),
        ("data:image/png;base64,AAAA", "images[0]"),
    ):
        status, error, _ = live.request(CHAT, {"messages": seen(url), **DRAWN})
        assert status == 400 and error["error"]["code"] == "invalid_image"
        assert said in error["error"]["message"], error
    status, error, _ = live.request(CHAT, {"messages": seen(*[data_url()] * 4), **DRAWN})
    assert status == 400 and "max_images=3" in error["error"]["message"]
