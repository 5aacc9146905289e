"""A trainer's calls to the server that draws its rollouts: /pause, /resume, /update_weights and
what tells its state, with requests running.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import LLM, SamplingParams
from tests.text_model import write_folder
from tests.tiny import ENGINE, config

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.server.run import make_parser
from tests.openai.live import PATIENCE_S, Live, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
GENERATE = "/inference/v1/generate"
IDS = [72, 69, 76, 76, 79]
LENGTH = 50
CHANGES = ("/pause", "/resume", "/update_weights")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders of one architecture, one of another, and one whose weights are cut."""
    home = tmp_path_factory.mktemp("control")
    first, second = (write_folder(home / name, name) for name in ("first", "second"))
    other = write_folder(home / "other", config=config(num_layers=1))
    broken = write_folder(home / "broken", "second")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return [first, second, other, broken]


@pytest.fixture
def live(folders: list[Path]) -> Iterator[Live]:
    with serving(LLM(folders[0], **SETTINGS), enable_control=True) as live:
        yield live
        live.post("/resume", {})
        live.assert_nothing_left()


def body(ids: list[int] = IDS, **sampling: Any) -> dict[str, Any]:
    asked = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return {"token_ids": ids, "sampling_params": asked | sampling}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Slowly:
    """Has each step of a server take a moment, so that a call comes while requests run."""

    def __init__(self, live: Live):
        self.seconds, self.taken = 0.05, 0

        def slow(llm: LLM) -> None:
            engine: Any = llm.session.engine
            step = engine.step

            def stepped() -> Any:
                self.taken += 1
                time.sleep(self.seconds)
                return step()

            engine.step = stepped

        live.call(slow)

    def take(self, count: int) -> None:
        """Wait until so many more steps have been taken."""
        before = self.taken
        until(lambda: self.taken >= before + count)

    def be_fast(self) -> None:
        self.seconds = 0.0


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> Iterator[list[LLM]]:
    """The models of the first two folders."""
    llms = [LLM(folder, **SETTINGS) for folder in folders[:2]]
    yield llms
    for llm in llms:
        llm.close()


def tokens_of(llm: LLM, ids: list[int], count: int) -> list[int]:
    """The greedy tokens of a model."""
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    [output] = llm.generate([ids], asked, use_tqdm=False)
    return output.outputs[0].token_ids


def running(live: Live) -> int:
    """How many requests the engine has; read beside its thread, which may be in a step."""
    return len(live.llm._llm.session.engine.requests)


def test_off_unless_allowed(folders: list[Path]) -> None:
    """Nothing changes the server; what says its state is there."""
    with serving(LLM(folders[0], **SETTINGS)) as live:
        for path in CHANGES:
            status, answer, _ = live.request(path, {"folder": str(folders[1])})
            assert (status, answer["error"]["code"]) == (403, "control_not_allowed")
            assert "--control" in answer["error"]["message"]
        assert live.request("/weight_info")[:2] == (200, {"weight_version": 1})
        assert live.request("/is_paused")[:2] == (200, {"is_paused": False})
    assert make_parser().parse_args(["--control"]).enable_control
    assert "enable_control" not in make_parser().parse_args([])


def test_keys_and_pages(folders: list[Path]) -> None:
    """Without a key nothing is told or changed, and never for a page: a browser sends a POST
    without a body to any server, and says so.
    """
    settings: dict[str, Any] = {"enable_control": True, "api_keys": ("secret",)}
    with serving(LLM(folders[0], **SETTINGS), **settings) as live:
        for path in (*CHANGES, "/weight_info", "/is_paused"):
            sent = {} if path in CHANGES else None
            for key in (None, "other"):
                assert live.request(path, sent, key=key)[0] == 401
        for name, value in (("Origin", "http://evil.example"), ("Sec-Fetch-Site", "cross-site")):
            status, answer, _ = live.request("/pause", b"", key="secret", **{name: value})
            assert (status, answer["error"]["code"]) == (403, "control_not_allowed")
        assert live.request("/is_paused", key="secret")[1] == {"is_paused": False}
        assert live.request("/pause", b"", key="secret")[0] == 200
        assert live.request("/is_paused", key="secret")[1] == {"is_paused": True}
        assert live.request("/resume", b"", key="secret")[0] == 200


def test_parameters_are_checked(live: Live, folders: list[Path]) -> None:
    """A wrong one changes nothing, and its error names it."""
    folder = str(folders[1])
    wrong = [
        ("/pause?mode=stop", {}, "mode"),
        ("/pause?mode=keep&mode=wait", {}, "mode"),
        ("/pause?clear_cache=true", {}, "clear_cache"),
        ("/resume?mode=keep", {}, "mode"),
        ("/update_weights", {}, "folder"),
        ("/update_weights", {"folder": ""}, "folder"),
        ("/update_weights", {"folder": 3}, "folder"),
        ("/update_weights", {"folder": folder, "mode": "slow"}, "mode"),
        ("/update_weights", {"folder": folder, "update_info": {}}, "update_info"),
        ("/update_weights?mode=keep", {"folder": folder}, "mode"),
    ]
    for path, sent, param in wrong:
        status, answer, _ = live.request(path, sent)
        assert (status, answer["error"]["param"]) == (400, param), (path, sent, answer)
    assert live.request("/pause", None)[0] == 405
    assert live.request("/update_weights", b"{")[1]["error"]["code"] == "invalid_json"
    assert live.request("/is_paused")[1] == {"is_paused": False}
    assert live.request("/weight_info")[1] == {"weight_version": 1}


def test_a_pause_keeps_what_runs(live: Live) -> None:
    """Nothing is stepped meanwhile, nothing is lost, new requests wait; tokens are those of an
    undisturbed run.
    """
    undisturbed = live.post(GENERATE, body())["choices"][0]
    slowly = Slowly(live)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(live.post, GENERATE, body())
        until(lambda: running(live) == 1)
        slowly.take(5)
        assert live.post("/pause?mode=keep", {}) == {"status": "paused", "mode": "keep"}
        assert live.post("/pause", {})["status"] == "paused", "twice is no error"
        taken = slowly.taken
        slowly.be_fast()
        second = pool.submit(live.post, GENERATE, body([40, 41]))
        until(lambda: running(live) == 2)
        time.sleep(0.1)
        assert slowly.taken == taken and not first.done() and not second.done()
        assert live.request("/health")[0] == 200
        assert live.request("/is_paused")[1] == {"is_paused": True}
        assert live.post("/resume", {}) == {"status": "resumed"}
        assert first.result()["choices"][0] == undisturbed
        assert len(second.result()["choices"][0]["token_ids"]) == LENGTH
    assert live.post("/resume", {})["status"] == "resumed", "without a pause, too"


def test_a_pause_that_waits(live: Live) -> None:
    """It is answered once what ran has ended; what came meanwhile begins after /resume."""
    slowly = Slowly(live)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(live.post, GENERATE, body())
        until(lambda: running(live) == 1)
        pause = pool.submit(live.post, "/pause?mode=wait", {})
        until(lambda: not live.llm._llm.session.is_open)
        second = pool.submit(live.post, GENERATE, body([40, 41]))
        assert not pause.done()
        slowly.be_fast()
        assert pause.result()["mode"] == "wait"
        assert len(first.result()["choices"][0]["token_ids"]) == LENGTH
        until(lambda: running(live) == 1)
        assert not second.done()
        live.post("/resume", {})
        assert second.result()["choices"][0]["finish_reason"] == "length"


def test_a_pause_that_aborts(live: Live) -> None:
    """A trainer gets the tokens that there are, whole and in a stream; others get an error."""
    undisturbed = live.post(GENERATE, body())["choices"][0]["token_ids"]
    slowly = Slowly(live)
    chat = {"prompt": "hello", "max_tokens": LENGTH, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(live.post, GENERATE, body())
        stream = pool.submit(live.events, GENERATE, body())
        other = pool.submit(live.request, "/v1/completions", chat)
        until(lambda: running(live) == 3)
        slowly.take(6)
        live.post("/pause?mode=abort", {})
        [choice] = whole.result()["choices"]
        assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < LENGTH
        assert choice["token_ids"] == undisturbed[: len(choice["token_ids"])]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        pieces = [event["choices"][0] for event in stream.result()]
        assert pieces[-1]["finish_reason"] == "abort"
        ids = [token for piece in pieces for token in piece["token_ids"]]
        assert ids == undisturbed[: len(ids)]
        status, answer, _ = other.result()
        assert (status, answer["error"]["code"]) == (503, "aborted")


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_new_weights_under_streams(
    live: Live, folders: list[Path], models: list[LLM], mode: str
) -> None:
    """The tokens before are the old weights', and the spans say which those are. After "recompute"
    what follows is what the new weights say of the same tokens.
    """
    old = tokens_of(models[0], IDS, LENGTH)
    slowly = Slowly(live)
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(live.events, GENERATE, body()) for _ in range(2)]
        until(lambda: running(live) == 2)
        slowly.take(6)
        sent = {"folder": str(folders[1]), "mode": mode}
        answer = live.post("/update_weights", sent)
        assert answer["weight_version"] == 2 and answer["seconds"] > 0
        for stream in streams:
            pieces = [event["choices"][0] for event in stream.result()]
            spans = [span for piece in pieces for span in piece["weight_versions"]]
            ids = [token for piece in pieces for token in piece["token_ids"]]
            changed = min((s["start"] for s in spans if s["version"] == 2), default=LENGTH)
            assert {span["version"] for span in spans} == {1, 2} and 0 < changed < LENGTH
            assert ids[:changed] == old[:changed] and ids != old and len(ids) == LENGTH
            if mode == "recompute":
                count = LENGTH - changed
                assert ids[changed:] == tokens_of(models[1], IDS + ids[:changed], count)
    assert live.request("/weight_info")[1] == {"weight_version": 2}
    fresh = live.post(GENERATE, body())["choices"][0]["token_ids"]
    assert fresh == tokens_of(models[1], IDS, LENGTH)
    assert "jpaged_weight_version 2" in live.request("/metrics")[1]


def test_new_weights_that_wait(live: Live, folders: list[Path], models: list[LLM]) -> None:
    """What runs ends by the old ones, and what comes meanwhile begins with the new ones."""
    old, new = (tokens_of(llm, IDS, LENGTH) for llm in models)
    slowly = Slowly(live)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(live.post, GENERATE, body())
        until(lambda: running(live) == 1)
        sent = {"folder": str(folders[1]), "mode": "wait"}
        update = pool.submit(live.post, "/update_weights", sent)
        until(lambda: not live.llm._llm.session.is_open)
        second = pool.submit(live.post, GENERATE, body())
        slowly.be_fast()
        assert update.result()["weight_version"] == 2
        assert first.result()["choices"][0]["token_ids"] == old
        assert second.result()["choices"][0]["token_ids"] == new


def test_a_round_of_a_trainer(live: Live, folders: list[Path]) -> None:
    """Pause, new weights, resume: the rest of what was kept is drawn by them."""
    slowly = Slowly(live)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.post, GENERATE, body())
        until(lambda: running(live) == 1)
        slowly.take(4)
        live.post("/pause?mode=keep", {})
        status, answer, _ = live.request(
            "/update_weights", {"folder": str(folders[1]), "mode": "wait"}
        )
        assert (status, answer["error"]["code"]) == (409, "conflict")
        status, answer, _ = live.request(
            "/update_weights", {"folder": str(folders[1]), "mode": "refuse"}
        )
        assert (status, answer["error"]["code"]) == (409, "conflict")
        assert live.post("/update_weights", {"folder": str(folders[1])})["weight_version"] == 2
        live.post("/resume", {})
        [choice] = first.result()["choices"]
        assert [span["version"] for span in choice["weight_versions"]] == [1, 2]
        assert choice["weight_versions"][-1]["end"] == LENGTH


def test_a_bad_folder_changes_nothing(
    live: Live, folders: list[Path], models: list[LLM], tmp_path: Path
) -> None:
    """A missing one, one of another architecture, one whose file is cut: the server goes on with
    the weights that it has, and so do the requests that run.
    """
    old = tokens_of(models[0], IDS, LENGTH)
    slowly = Slowly(live)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.post, GENERATE, body())
        until(lambda: running(live) == 1)
        slowly.take(4)
        for folder in (tmp_path / "none", tmp_path, folders[2], folders[3]):
            status, answer, _ = live.request("/update_weights", {"folder": str(folder)})
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, "invalid_weights", "folder")
            assert str(folder)[:20] in error["message"]
        slowly.be_fast()
        [choice] = first.result()["choices"]
        assert choice["token_ids"] == old
        assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": LENGTH}]
    assert live.request("/weight_info")[1] == {"weight_version": 1}
    assert live.post("/update_weights", {"folder": str(folders[1])})["weight_version"] == 2


def test_stale_prefixes_are_not_found(live: Live, folders: list[Path], models: list[LLM]) -> None:
    """A new model's answer to an old prompt has nothing cached; the same folder again is new."""
    long = body([65 + i % 20 for i in range(40)], max_tokens=8)
    live.post(GENERATE, long)
    assert live.post(GENERATE, long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    live.post("/update_weights", {"folder": str(folders[1])})
    answer = live.post(GENERATE, long)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert live.post(GENERATE, long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    ids, [choice] = long["token_ids"], answer["choices"]
    scores: Any = models[1].score([ids + choice["token_ids"]])[0]
    drawn = [one["logprob"] for one in choice["logprobs"]["content"]]
    np.testing.assert_allclose(drawn, scores[len(ids) - 1 :], atol=1e-4)


def test_updates_come_one_after_the_other(live: Live, folders: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        sent = [{"folder": str(folders[i % 2])} for i in range(4)]
        answers = list(pool.map(lambda one: live.post("/update_weights", one), sent))
    assert sorted(answer["weight_version"] for answer in answers) == [2, 3, 4, 5]


def test_a_server_that_is_paused_can_be_stopped(folders: list[Path]) -> None:
    """What it holds ends with an error, soon."""
    settings: dict[str, Any] = {"enable_control": True, "drain_s": 1.0}
    with ThreadPoolExecutor(1) as pool:
        with serving(LLM(folders[0], **SETTINGS), **settings) as live:
            live.post("/pause", {})
            waiting = pool.submit(live.request, GENERATE, body())
            until(lambda: running(live) == 1)
        status, answer, _ = waiting.result()
        assert status == 503 and "stopping" in json.dumps(answer)


def test_a_client_that_leaves_while_it_is_paused(live: Live) -> None:
    """Its request ends all the same."""
    live.post("/pause", {})
    with live.begin(GENERATE, body(), read=False):
        until(lambda: running(live) == 1)
    until(lambda: running(live) == 0)


def test_faces_say_whether_they_are_paused(folders: list[Path]) -> None:
    llm = jpaged.LLM(folders[0], **SETTINGS)
    assert not llm.is_paused
    with llm.paused():
        assert llm.is_paused
    assert not llm.is_paused
    llm.close()
