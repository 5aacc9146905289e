"""The server's answers beside those of LLM and of batch files, its errors, and what it shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.integrations.batch.answers import answer_line
from jpaged.integrations.batch.lines import BatchRequest, Settings
from tests.test_lora import make_lora
from tests.text_model import write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import Live, http_post, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "prompt": "hello there", "seed": 3, "max_tokens": 12}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hey"}], "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with serving(LLM(folder, **SETTINGS)) as live:
        yield live


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "live" in request.fixturenames:
        request.getfixturevalue("live").assert_nothing_left()


def of_a_batch(llm: LLM, url: str, body: dict[str, Any]) -> Any:
    """The body of the answer that a line of a batch file gets."""
    request = BatchRequest(number=1)
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    request.parse(json.dumps(line).encode(), Settings(defaults=llm.default_sampling_params()))
    [output] = llm.generate([request.prompt_for(llm)], request.params, use_tqdm=False)
    return answer_line(request, output)["response"]["body"]


def alike(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one to the next."""
    left_out = ("id", "created", "model")
    return {k: v for k, v in answer.items() if k not in left_out}


BODIES = [
    (COMPLETIONS, HELLO),
    (COMPLETIONS, HELLO | {"n": 3, "logprobs": 2, "temperature": 1.5}),
    (COMPLETIONS, HELLO | {"stop": ["a", "e", "i"], "max_tokens": 40}),
    (COMPLETIONS, HELLO | {"prompt": [40, 41, 42], "min_p": 0.1, "return_token_ids": True}),
    (COMPLETIONS, HELLO | {"prompt_logprobs": 1, "ignore_eos": True, "presence_penalty": 1.0}),
    (CHAT, TALK),
    (CHAT, TALK | {"logprobs": True, "top_logprobs": 2, "n": 2, "max_completion_tokens": 6}),
    (CHAT, TALK | {"chat_template_kwargs": {"tone": "dry"}, "max_tokens": 9, "top_k": 3}),
]


@pytest.mark.parametrize(("url", "body"), BODIES)
def test_answers_are_those_of_a_batch_file(live: Live, llm: LLM, url: str, body: Any):
    """And so are the pieces of a stream, added up; and those of the library with its seed."""
    expected = of_a_batch(llm, url, body | {"model": "tiny"})
    answer = live.post(url, body)
    for found in (answer, expected):  # the second of them finds the first one's prompt
        found["usage"].pop("prompt_tokens_details")
    assert alike(answer) == alike(expected)
    assert answer["model"] == "tiny" and answer["id"].startswith(("cmpl-", "chatcmpl-"))
    if "prompt_logprobs" in body:
        return
    pieces = live.events(url, body | {"stream_options": {"include_usage": True}})
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert pieces[-1]["usage"] == expected["usage"]
    assert all(piece["usage"] is None for piece in pieces[:-1])
    assert added_up(pieces[:-1]) == [plain(choice) for choice in expected["choices"]]


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice as `added_up` has it."""
    kept = {k: choice.get(k) for k in ("index", "finish_reason", "stop_reason", "token_ids")}
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return kept | {"text": text, "logprobs": choice["logprobs"]}


def added_up(events: list[Any]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            first = {"text": "", "logprobs": None, "token_ids": None, "role": None}
            choice = found.setdefault(piece["index"], first | {"index": piece["index"]})
            delta = piece.get("delta", {})
            choice["role"] = delta.get("role", choice["role"])
            choice["text"] += delta.get("content", "") + piece.get("text", "")
            for name in ("finish_reason", "stop_reason"):
                choice[name] = piece.get(name)
            if "token_ids" in piece:
                choice["token_ids"] = (choice["token_ids"] or []) + piece["token_ids"]
            if piece.get("logprobs") is not None:
                own = choice["logprobs"] or {}
                added = {k: (own.get(k) or []) + (v or []) for k, v in piece["logprobs"].items()}
                choice["logprobs"] = added | ({"refusal": None} if "refusal" in added else {})
    roles = {choice.pop("role") for choice in found.values()}
    assert roles <= {"assistant"} or roles == {None}
    return [found[i] for i in sorted(found)]


def test_the_librarys_tokens(live: Live, llm: LLM):
    asked = SamplingParams(seed=11, max_tokens=20, n=2, temperature=0.8)
    [output] = llm.generate(["some words"], asked, use_tqdm=False)
    body = {"prompt": "some words", "max_tokens": 20, "n": 2, "seed": 11, "temperature": 0.8}
    body |= {"top_p": 1.0, "top_k": -1}  # the checkpoint has others
    answer = live.post(COMPLETIONS, body)
    assert [c["text"] for c in answer["choices"]] == [done.text for done in output.outputs]


def test_lists_of_prompts(live: Live, llm: LLM):
    """Texts and ids, n of each: the choices of the first prompt come first, in streams too."""
    prompts: list[Any] = ["one", [50, 51], "three and more"]
    body = HELLO | {"prompt": prompts, "n": 2}
    each = [of_a_batch(llm, COMPLETIONS, HELLO | {"prompt": p, "n": 2}) for p in prompts]
    expected = [choice for answer in each for choice in answer["choices"]]
    for i, choice in enumerate(expected):
        choice["index"] = i
    answer = live.post(COMPLETIONS, body)
    assert answer["choices"] == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in each)
    assert added_up(live.events(COMPLETIONS, body)) == [plain(choice) for choice in expected]


def test_echo(live: Live, llm: LLM):
    """The prompt comes back as it was, before each of its completions."""
    expected = live.post(COMPLETIONS, HELLO | {"n": 2})
    answer = live.post(COMPLETIONS, HELLO | {"n": 2, "echo": True})
    texts = ["hello there" + choice["text"] for choice in expected["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
    pieces = added_up(live.events(COMPLETIONS, HELLO | {"n": 2, "echo": True}))
    assert [piece["text"] for piece in pieces] == texts


@pytest.mark.parametrize("prompt", ["hello there", [72, 69, 76, 76, 79, 0, 84]])
def test_echo_with_logprobs_scores_the_prompt(live: Live, llm: LLM, prompt: Any):
    """What an evaluation reads: log p of each token after those before it, and the likeliest."""
    body = {"prompt": [prompt, "and one more"], "echo": True, "logprobs": 2, "temperature": 0}
    [choice, other] = live.post(COMPLETIONS, body | {"max_tokens": 1})["choices"]
    [alone, _] = live.post(COMPLETIONS, body | {"max_tokens": 0})["choices"]
    ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    scores: Any = llm.score([ids])[0]
    own, found = choice["logprobs"], alone["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(scores.tolist(), abs=1e-5)
    assert "".join(found["tokens"]) == alone["text"] == llm.tokenizer.decode(ids)
    assert found["text_offset"] == [*range(len(ids))]  # a character a token
    assert {k: v[:-1] for k, v in own.items()} == found
    for token, logprob, top in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob and len(top) in (2, 3) and max(top.values()) >= logprob
    assert choice["text"].startswith(alone["text"]) and len(other["logprobs"]["tokens"]) == 13
    assert alone["finish_reason"] == "length"


ERRORS = [
    (COMPLETIONS, b"{", 400, "invalid_json", None),
    (COMPLETIONS, b"\xff{}", 400, "invalid_encoding", None),
    (COMPLETIONS, b"[1]", 400, "invalid_json", None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", None),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "invalid_encoding", None),
    (COMPLETIONS, {}, 400, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "invalid_value", None),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [97]}, 400, "invalid_value", None),
    (COMPLETIONS, {"prompt": "a" * 70}, 400, "context_length_exceeded", None),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
    (COMPLETIONS, {"prompt": "a", "messages": [1]}, 400, "unsupported_field", "messages"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}, 400, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, 400, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "invalid_value", "temperature"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 41}, 400, "invalid_value", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 9}, 400, "invalid_value", "logprobs"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "invalid_value", "stream_options"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "unsupported_field", "suffix"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", None),
    (CHAT, TALK | {"logprobs": 2}, 400, "invalid_value", "logprobs"),
    (CHAT, TALK | {"chat_template": "x"}, 400, "unsupported_field", "chat_template"),
    (CHAT, TALK | {"chat_template_kwargs": {"tokenize": 0}}, 400, "invalid_value", None),
    ("/tokenize", {"prompt": 1}, 400, "invalid_value", "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [2**62]}, 400, "invalid_value", None),
    ("/v1/nothing", {}, 404, None, None),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_openais_form(folder: Path, stream: bool):
    """A status, a code and the field to blame; a stream that never began has them too."""
    with serving(LLM(folder, **SETTINGS), max_output_tokens=40) as live:
        for path, body, status, code, param in ERRORS:
            if isinstance(body, dict) and path.startswith("/v1/c"):
                body = body if "stream_options" in body else body | {"stream": stream}
            found, answer, _ = live.request(path, body)
            assert list(answer) == ["error"], (body, answer)
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (found, error["code"]) == (status, code), (body, error)
            assert param is None or error["param"] == param, (body, error)
            assert error["type"] == "invalid_request_error" and error["message"]
        status, answer, _ = live.request(COMPLETIONS)
        assert status == 405 and answer["error"]["message"]
        live.post(COMPLETIONS, HELLO)
        live.assert_nothing_left()


def test_only_json_is_taken(live: Live):
    """A form of a page elsewhere sends what it may send without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, answer, headers = live.request(
            COMPLETIONS, json.dumps(HELLO).encode(), **{"Content-Type": kind}
        )
        assert status == 415 and "application/json" in answer["error"]["message"]
        assert not [name for name in headers if name.startswith("access-control")]
    status, _, headers = live.request(
        COMPLETIONS, HELLO, **{"Content-Type": "application/json; charset=utf-8", "Origin": "x"}
    )
    assert status == 200 and not [n for n in headers if n.startswith("access-control")]


def test_keys(folder: Path):
    keys = ("secret-one", "secret-two")
    with serving(LLM(folder, **SETTINGS), api_keys=keys) as live:
        for path, body in ((COMPLETIONS, HELLO), ("/v1/models", None), ("/metrics", None)):
            for key in (None, "", "secret", "secret-one2", "Secret-one", "\xe9"):
                status, answer, headers = live.request(path, body, key=key)
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
                assert headers["www-authenticate"] == "Bearer"
            assert [live.request(path, body, key=key)[0] for key in keys] == [200, 200]
        assert live.request("/health")[0] == 200
        basic = {"Authorization": "Basic secret-one"}
        assert live.request("/v1/models", **basic)[0] == 401


def test_models(live: Live):
    status, answer, _ = live.request("/v1/models")
    [model] = answer["data"]
    assert (status, model["id"], model["max_model_len"]) == (200, "tiny", 64)
    assert live.request("/v1/models/tiny")[1] == model
    assert live.request("/v1/models/OWNER/other")[0] == 404
    assert live.request("/health")[:2] == (200, {"status": "ok"})


def test_tokens_there_and_back(live: Live, llm: LLM):
    ids = llm.tokenizer.encode("some text")
    answer = live.post("/tokenize", {"prompt": "some text", "return_token_strs": True})
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, 9, 64)
    assert answer["token_strs"] == list("some text")
    assert live.post("/detokenize", {"tokens": ids}) == {"prompt": "some text"}
    chat = live.post("/tokenize", {"messages": TALK["messages"]})
    assert chat["tokens"] == llm.render_chat(TALK["messages"])
    assert live.post("/detokenize", {"tokens": chat["tokens"]})["prompt"] == "u:hey;a:"


def test_a_form_without_the_package(live: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.openai.server.generation.find_spec", lambda name: None)
    status, answer, _ = live.request(CHAT, TALK | {"response_format": {"type": "json_object"}})
    assert (status, answer["error"]["code"]) == (400, "unsupported_field")


def test_metrics(folder: Path):
    """Prometheus can read them, and they count what was done."""
    with serving(LLM(folder, **SETTINGS)) as live:
        live.post(COMPLETIONS, HELLO | {"n": 2, "ignore_eos": True})
        live.events(COMPLETIONS, HELLO | {"ignore_eos": True})
        assert live.request(COMPLETIONS, {"prompt": 1})[0] == 400
        live.assert_nothing_left()
        found = samples(live.request("/metrics")[1])
        assert found["jpaged_generated_tokens_total"] == 36
        assert found['jpaged_completions_total{finish_reason="length"}'] == 3
        assert found['jpaged_http_requests_total{path="/v1/completions",status="200"}'] == 2
        assert found['jpaged_http_errors_total{code="invalid_value"}'] == 1
        assert found["jpaged_kv_blocks"] == 128 and found["jpaged_kv_blocks_in_use"] == 0
        assert found["jpaged_time_to_first_token_seconds_count"] == 1
        assert found["jpaged_time_between_pieces_seconds_count"] > 0
        assert found['jpaged_request_seconds_bucket{le="+Inf"}'] == 2


def samples(text: str) -> dict[str, float]:
    """By name and labels; each family has its help and type before it."""
    told: set[str] = set()
    found = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            told.add(line.split()[2])
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            family = name.partition("{")[0]
            assert {family, family.rpartition("_")[0]} & told
            found[name] = float(value)
    return found


def test_adapters_are_models(folder: Path):
    """A name of an adapter is a model: it answers as LLM does with it, alone and in streams."""
    llm = LLM(folder, **SETTINGS, max_loras=2, max_lora_rank=4)
    llm.add_adapter("tuned", make_lora(4, model=llm.model_config))
    asked = SamplingParams(max_tokens=12, temperature=0)
    prompts = [{"prompt": "hello there", "adapter": "tuned"}, "hello there"]
    texts = [out.outputs[0].text for out in llm.generate(prompts, asked, use_tqdm=False)]
    assert texts[0] != texts[1]
    with serving(llm) as live:
        names = [model["id"] for model in live.request("/v1/models")[1]["data"]]
        assert names == ["tiny", "tuned"]
        for name, text in zip(("tuned", "tiny"), texts, strict=True):
            body = HELLO | {"model": name, "temperature": 0}
            answer = live.post(COMPLETIONS, body)
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
            assert added_up(live.events(COMPLETIONS, body))[0]["text"] == text
        live.assert_nothing_left()


def test_too_many_are_told_to_come_again(folder: Path):
    """What runs and waits is bounded by completions, not by requests; places are given back."""
    settings = SETTINGS | {"max_num_seqs": 2, "seq_buckets": (8,)}
    with serving(LLM(folder, **settings), max_waiting=2) as live:
        long = HELLO | {"max_tokens": 50, "ignore_eos": True, "stream": True, "n": 4}
        with live.begin(COMPLETIONS, long):
            status, answer, headers = live.request(COMPLETIONS, HELLO)
            assert status == 429 and answer["error"]["type"] == "rate_limit_error"
            assert 1 <= int(headers["retry-after"]) <= 60
        live.assert_nothing_left()
        live.post(COMPLETIONS, HELLO | {"n": 4})
        status, answer, _ = live.request(COMPLETIONS, HELLO | {"n": 5})
        assert status == 429
        assert samples(live.request("/metrics")[1])["jpaged_http_rejected_total"] == 2


def test_an_engine_that_dies_is_seen(folder: Path, caplog: Any):
    with serving(LLM(folder, **SETTINGS)) as live:

        def die(llm: LLM) -> None:
            def dispatch(batch: Any) -> Any:
                raise jpaged.PeerError("a secret of the machine")

            runner: Any = llm.session.runner
            runner.dispatch = dispatch

        live.call(die)
        for body in (HELLO, HELLO | {"stream": True}):
            status, answer, _ = live.request(COMPLETIONS, body)
            assert status == 500 and answer["error"]["type"] == "server_error"
            assert "secret" not in json.dumps(answer)
        assert live.request("/health")[0] == 503


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_pieces_are_framed_as_the_client_can_read(live: Live, version: str):
    """In chunks, or to the end of the connection; quotes and characters beyond ASCII arrive."""
    body = HELLO | {"prompt": 'say "\u00e9\u4f60', "echo": True, "stream": True}
    raw = http_post(COMPLETIONS, body).replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
    with live.connect() as connection:
        connection.sendall(raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        found = b""
        while piece := connection.recv(65536):
            found += piece
    head, _, rest = found.partition(b"\r\n\r\n")
    assert (b"chunked" in head.lower()) == (version == "1.1")
    if version == "1.1":
        whole, left = b"", rest
        while (size := int(left.split(b"\r\n", 1)[0], 16)) > 0:
            left = left.split(b"\r\n", 1)[1]
            whole, left = whole + left[:size], left[size + 2 :]
        assert left == b"0\r\n\r\n"
        rest = whole
    *events, done, end = rest.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert all(piece.keys() >= {"index", "text", "finish_reason", "logprobs"} for piece in pieces)
    expected = live.post(COMPLETIONS, body | {"stream": False})["choices"][0]["text"]
    assert "".join(piece["text"] for piece in pieces) == expected
    assert expected.startswith(body["prompt"])
