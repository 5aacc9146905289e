"""Responses that are kept: a request goes on from one by its id, for as long as it is kept."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM
from tests.text_model import make_tokenizer, write_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.errors import ConfigError
from jpaged.openai.protocol import BodyError
from jpaged.openai.server.kept_responses import KeptResponses
from jpaged.openai.server.settings import ServerSettings
from tests.openai.live import Live, serving
from tests.openai.test_tools import CALL, SETTINGS, TEMPLATE, THOUGHT, WEATHER, write

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"input": "so?", "max_output_tokens": 10, "seed": 5}
TOOL = {"type": "function", **WEATHER["function"]}
KEYS = ("one", "two")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("kept") / "tiny")
    llm = LLM(folder, tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)
    with serving(llm, keep_responses_s=600.0, api_keys=KEYS) as live:
        yield live
        live.assert_nothing_left()


def ask(live: Live, body: dict[str, Any], key: str = "one") -> Any:
    status, answer, _ = live.request(RESPONSES, body, key=key)
    assert status == 200, answer
    return answer


def test_it_goes_on_as_with_the_whole_conversation(live: Live) -> None:
    first = ask(live, ASK)
    assert first["store"] is True and first["previous_response_id"] is None
    second = ask(live, ASK | {"input": "and?", "previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"]
    said = [{"role": "user", "content": "so?"}, *first["output"]]
    whole = [*said, {"role": "user", "content": "and?"}]
    alone = ask(live, ASK | {"input": whole, "store": False})
    assert alone["store"] is False
    texts = [answer["output"][0]["content"] for answer in (second, alone)]
    assert texts[0] == texts[1]
    third = {"input": [{"role": "user", "content": "so"}], "previous_response_id": second["id"]}
    longer = ask(live, ASK | third)
    assert longer["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_streams_are_kept(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are calls, whose results the next request brings."""
    prompts = write(live, monkeypatch, THOUGHT + CALL)
    body = {"input": "so?", "tools": [TOOL], "stream": True}
    status, text, _ = live.request(RESPONSES, body, key="one")
    assert status == 200
    last = json.loads(text.rstrip().rpartition("data: ")[2])
    done = last["response"]
    call = next(item for item in done["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
    more = {"input": [result], "tools": [TOOL], "previous_response_id": done["id"]}
    ask(live, more)
    wanted = "weather,u:so?;a:Let me see.<tool_call>weather[1, 2]</tool_call>;t:dry;a:"
    assert prompts[-1] == wanted


def test_they_can_be_read_and_forgotten_by_their_key_alone(live: Live) -> None:
    first = ask(live, ASK)
    path = f"{RESPONSES}/{first['id']}"
    assert live.request(path, key="one")[:2] == (200, first)
    status, answer, _ = live.request(path, key="two")
    assert (status, answer["error"]["code"]) == (404, "response_not_found")
    assert live.request(path)[0] == 401
    body = ASK | {"previous_response_id": first["id"]}
    status, answer, _ = live.request(RESPONSES, body, key="two")
    assert status == 400 and answer["error"]["code"] == "previous_response_not_found"
    assert delete(live, path) == 200 and delete(live, path) == 404
    status, answer, _ = live.request(RESPONSES, body, key="one")
    assert status == 400 and answer["error"]["param"] == "previous_response_id"


def delete(live: Live, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    connection.request("DELETE", path, headers={"Authorization": "Bearer one"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_what_is_not_to_be_kept_is_not(live: Live) -> None:
    answer = ask(live, ASK | {"store": False})
    assert live.request(f"{RESPONSES}/{answer['id']}", key="one")[0] == 404
    for wrong in (5, ["x"], "resp_absent"):
        status, found, _ = live.request(RESPONSES, ASK | {"previous_response_id": wrong}, key="one")
        assert status == 400 and found["error"]["param"] == "previous_response_id"
    assert live.request(RESPONSES, ASK | {"conversation": "c"}, key="one")[0] == 400


def test_old_ones_and_too_many_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("jpaged.openai.server.kept_responses.time.monotonic", lambda: now[0])
    kept = KeptResponses(10.0, 2)
    for name in "abc":
        kept.put("p", [{"role": "user", "content": name}], {"id": name, "output": []})
        now[0] += 1
    assert [kept.get("p", name) is not None for name in "abc"] == [False, True, True]
    now[0] = 111.5
    assert [kept.get("p", name) is not None for name in "bc"] == [False, True]
    assert kept.continued({"input": "x", "previous_response_id": "c"}, "p")["input"] == [
        {"role": "user", "content": "c"},
        {"role": "user", "content": "x"},
    ]
    with pytest.raises(BodyError):
        kept.continued({"input": "x", "previous_response_id": "c"}, "q")
    monkeypatch.setattr("jpaged.openai.server.kept_responses.MOST_BYTES", 100)
    kept.put("p", [{"role": "user", "content": "d" * 200}], {"id": "d", "output": []})
    assert kept.get("p", "c") is None and kept.get("p", "d") is None and kept._size == 0


def test_settings() -> None:
    for wrong in (0.0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match="keep_responses_s"):
            ServerSettings(models=("m",), keep_responses_s=wrong)
    with pytest.raises(ConfigError, match="max_kept_responses"):
        ServerSettings(models=("m",), max_kept_responses=0)


def test_tokens_are_counted(live: Live) -> None:
    answer = ask(live, ASK | {"instructions": "be odd"})
    body = {"input": "so?", "instructions": "be odd"}
    status, counted, _ = live.request(f"{RESPONSES}/input_tokens", body, key="one")
    assert status == 200 and counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_ready_apart_from_alive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends requests learns that none would be taken; who restarts a server, that it lives."""
    assert live.request("/ready")[:2] == (200, {"status": "ok"})
    generation = live.server._generation
    most = live.server.llm.engine_config.all_rows + live.server.settings.max_waiting
    monkeypatch.setattr(generation, "_choices", most)
    status, answer, _ = live.request("/ready")
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert live.request("/health")[0] == 200
    monkeypatch.undo()
    monkeypatch.setattr(live.server, "is_stopping", True)
    status, answer, _ = live.request("/ready")
    assert (status, answer["error"]["code"]) == (503, "stopping")
    assert live.request("/health")[0] == 200
    monkeypatch.undo()
    monkeypatch.setattr(type(live.server.llm), "error", property(lambda self: RuntimeError("x")))
    assert live.request("/ready")[0] == live.request("/health")[0] == 503
    monkeypatch.undo()
    version = live.request("/version", key="one")[1]
    assert list(version) == ["version"] and version["version"]
