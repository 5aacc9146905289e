"""Fields that are unknown, harmless, not built, or of another route: what is taken of them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.sampling_params import SamplingParams
from tests.openai.test_server import CHAT, COMPLETIONS, HELLO, SETTINGS, TALK, samples
from tests.text_model import write_folder

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from jpaged.openai.protocol import URLS, BodyError
from jpaged.openai.server.bodies import ROUTES, ServedChat, ServedCompletion
from jpaged.openai.server.response_bodies import ServedResponse
from tests.openai.live import Live, serving

RESPONSES = "/v1/responses"
KINDS: dict[str, Any] = {CHAT: ServedChat, COMPLETIONS: ServedCompletion, RESPONSES: ServedResponse}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
}
# What clients send although it asks for nothing: guidellm, LangChain, LiteLLM, the openai package.
DEFAULTS: list[dict[str, Any]] = [
    {"verbosity": "medium"},
    {"mm_processor_kwargs": {}},
    {"documents": []},
    {"logits_processors": []},
    {"prediction": {"type": "content", "content": "x"}},
    {"prediction": None, "audio": None, "web_search_options": None},
    {"guided_decoding_backend": "xgrammar"},
    {"add_generation_prompt": True, "continue_final_message": False},
    {"best_of": 1, "suffix": "", "use_beam_search": False, "length_penalty": 1.0},
    {"response_format": None, "tools": None, "tool_choice": None},
]
CHANGES: list[tuple[str, Any]] = [
    ("verbosity", "low"),
    ("mm_processor_kwargs", {"a": 1}),
    ("documents", [{"text": "x"}]),
    ("web_search_options", {}),
    ("audio", {"voice": "alloy"}),
    ("best_of", 2),
    ("add_special_tokens", 1),
    ("thinking_token_budget", 5),
]


def line_of(url: str, body: dict[str, Any], *, ignore_unknown: bool = False) -> BatchRequest:
    """A line of a batch file, parsed."""
    request = BatchRequest(number=1)
    settings = Settings(defaults=SamplingParams(), ignore_unknown=ignore_unknown)
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    request.parse(json.dumps(line).encode(), settings)
    return request


def asked(body: Any) -> list[Any]:
    """What a body comes to."""
    prompt = [body.conversation, body.template] if body.is_chat else [body.prompt]
    return [body.params(SamplingParams()), *prompt, body.stream, body.tools]


def test_a_field_is_known_for_one_thing() -> None:
    for kind in (*ROUTES.values(), *URLS.values()):
        assert not kind.harmless & kind.not_built.keys(), kind


@pytest.mark.parametrize("url", KINDS)
@pytest.mark.parametrize("fields", DEFAULTS, ids=str)
def test_what_asks_for_nothing_is_taken(url: str, fields: dict[str, Any]) -> None:
    """It makes no difference, and is not told as ignored; a batch file takes it, too."""
    body = KINDS[url].read_known(LEAST[url] | fields)
    assert asked(body) == asked(KINDS[url].read(LEAST[url]))
    assert body.ignored == ()
    if url in URLS:
        assert line_of(url, LEAST[url] | fields).params == line_of(url, LEAST[url]).params


def test_special_tokens_are_added_where_they_are_anyway() -> None:
    """To a text by the tokenizer, to a chat by its template."""
    for url, default in ((COMPLETIONS, True), (CHAT, False), (RESPONSES, False)):
        body = LEAST[url] | {"add_special_tokens": default}
        assert KINDS[url].read_known(body).ignored == ()
        with pytest.raises(BodyError, match="add_special_tokens"):
            KINDS[url].read_known(body | {"add_special_tokens": not default})
        if url in URLS:
            line_of(url, body)


@pytest.mark.parametrize("url", KINDS)
@pytest.mark.parametrize(("name", "value"), CHANGES, ids=str)
def test_what_would_change_the_answer_is_refused(url: str, name: str, value: Any) -> None:
    with pytest.raises(BodyError) as caught:
        KINDS[url].read_known(LEAST[url] | {name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_field")
    if url in URLS:
        with pytest.raises(BodyError):
            line_of(url, LEAST[url] | {name: value}, ignore_unknown=True)


@pytest.mark.parametrize("url", KINDS)
def test_a_field_of_another_route_is_refused(url: str) -> None:
    """All of them: each is either a field here, or harmless, or refused unless it is empty."""
    kind, other_names = ROUTES[url], {n for kind in ROUTES.values() for n in kind.model_fields}
    strange = other_names - kind.model_fields.keys() - kind.harmless - kind.not_built.keys()
    assert strange
    for name in strange:
        with pytest.raises(BodyError, match="not of this route") as caught:
            KINDS[url].read_known(LEAST[url] | {name: "something"})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_field")
        for empty in (None, [], {}, "", False):
            assert KINDS[url].read_known(LEAST[url] | {name: empty}).ignored == ()


@pytest.mark.parametrize("url", KINDS)
def test_what_nobody_knows_is_ignored_and_named(url: str) -> None:
    body = LEAST[url] | {"lable": 1, "vllm_new": None}
    expected = ["lable", "vllm_new"]
    if url == CHAT:
        body["messages"] = [{**body["messages"][0], "cost": 3, "audio": None}] * 2
        expected.append("messages.cost")
    if url != RESPONSES:
        body |= {"stream": True, "stream_options": {"include_usage": True, "shiny": 1}}
        expected.append("stream_options.shiny")
    found = KINDS[url].read_known(body)
    assert sorted(found.ignored) == sorted(expected)
    with pytest.raises(BodyError, match=r"lable|cost|shiny"):
        KINDS[url].read(body)


def test_a_batch_file_reports_what_it_does_not_know() -> None:
    """As an error of the line; or, where the run says so, in its figures."""
    message = LEAST[CHAT]["messages"][0]
    for body in (LEAST[CHAT] | {"lable": 1}, {"messages": [message | {"cost": 3}]}):
        with pytest.raises(BodyError) as caught:
            line_of(CHAT, body)
        assert caught.value.code == "unknown_field"
    body = {"messages": [message | {"cost": 3}], "lable": 1}
    request = line_of(CHAT, body, ignore_unknown=True)
    assert sorted(request.ignored) == ["lable", "messages.cost"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("fields") / "tiny")
    with serving(LLM(folder, **SETTINGS)) as live:
        yield live


def test_ignored_fields_are_told(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """By a header of the answer, streams and errors too; by a metric; by one line of the log."""
    header = "x-jpaged-ignored-fields"
    name = "jpaged_http_ignored_fields_total"
    before = samples(live.request("/metrics")[1])[name]
    with caplog.at_level(logging.WARNING, logger="jpaged"):
        expected = live.post(COMPLETIONS, HELLO)["choices"]
        for more in ({}, {"stream": True}, {"temperature": -1}):
            status, answer, headers = live.request(COMPLETIONS, HELLO | more | {"lable": 1})
            assert (status, headers[header]) == (400 if "temperature" in more else 200, "lable")
            assert more or answer["choices"] == expected
        wild = {"a\r\nSet-Cookie: b": 1, "\u00e9": 2} | {f"x{i}": i for i in range(20)}
        status, _, headers = live.request(COMPLETIONS, HELLO | wild)
        assert status == 200 and "set-cookie" not in headers
        assert headers[header] == "x0, x1, x2, x3, x4, x5, x6, x7, and 14 more"
        for path, body in (
            ("/tokenize", {"prompt": "a", "lable": 1, "add_special_tokens": True}),
            ("/tokenize", LEAST[CHAT] | {"lable": 1, "add_special_tokens": False}),
            ("/detokenize", {"tokens": [40], "lable": 1}),
            (CHAT, TALK | {"lable": 1}),
            (RESPONSES, {"input": "a", "max_output_tokens": 2, "lable": 1}),
        ):
            status, answer, headers = live.request(path, body)
            assert (status, headers[header]) == (200, "lable"), answer
        assert header not in live.request(COMPLETIONS, HELLO)[2]
    lines = [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()]
    assert len(lines) == 2 and lines[0].endswith(": lable")
    assert all("\n" not in line for line in lines)
    assert samples(live.request("/metrics")[1])[name] == before + 3 + 22 + 5


def test_tools_are_counted_as_they_are_answered(live: Live, tmp_path: Path) -> None:
    """/tokenize takes a chat with tools that may be called."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    answer = live.post("/tokenize", LEAST[CHAT] | {"tools": tools})
    assert answer["count"] == live.post("/tokenize", LEAST[CHAT])["count"]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETIONS, HELLO),
        (COMPLETIONS, HELLO | {"prompt": ["hello", [40, 41, 42]], "n": 2, "logprobs": 1}),
        (COMPLETIONS, HELLO | {"cache_salt": "s", "echo": True}),
        (CHAT, TALK | {"max_tokens": 6, "n": 2}),
    ],
    ids=str,
)
def test_usage_goes_on_with_a_stream(live: Live, url: str, body: dict[str, Any]) -> None:
    """Every piece tells what its completion has used until then; the end tells all."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    *pieces, end = live.events(url, body | {"stream_options": options})
    last: dict[int, dict[str, int]] = {}
    for piece in pieces:
        [choice] = piece["choices"]
        usage: dict[str, int] = piece["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        before = last.get(choice["index"], usage)
        assert usage["prompt_tokens"] == before["prompt_tokens"]
        assert usage["completion_tokens"] >= before["completion_tokens"]
        last[choice["index"]] = usage
    assert end["choices"] == []
    n = body.get("n", 1)
    total = sum(usage["completion_tokens"] for usage in last.values())
    assert total == end["usage"]["completion_tokens"]
    prompts = sum(usage["prompt_tokens"] for usage in last.values())
    assert prompts == n * end["usage"]["prompt_tokens"]
    without = live.events(url, body | {"stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in piece for piece in without)  # as vLLM: beside include_usage alone
