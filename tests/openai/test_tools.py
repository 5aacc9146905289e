"""Tools and reasoning over HTTP: what a model writes arrives in the API's fields, streamed too."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from jpaged.engine_thread import Coming, Inbox, News
from jpaged.request.outputs import CompletionChunk, RequestOutput, completion
from tests.text_model import make_tokenizer, write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import Live, serving

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{{ c.function.arguments.a }}</tool_call>{% endfor %};"
    "{% endfor %}a:{% if open %}<think>{% endif %}{# </think> #}"
)
SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"a": {}}}},
}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "so?"}], "tools": [WEATHER]}
THOUGHT = "<think>\nIt rains.\n</think>\n\n"
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"a": [1, 2]}}\n</tool_call>'


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("tools") / "tiny")
    with serving(LLM(folder, tokenizer=make_tokenizer(TEMPLATE), **SETTINGS)) as live:
        yield live


def write(
    live: Live, monkeypatch: pytest.MonkeyPatch, text: str, reason: str = "stop", size: int = 5
) -> list[Any]:
    """Have the model write a text, so many characters a step; the prompts that it was given."""
    given: list[Any] = []

    @contextlib.asynccontextmanager
    async def run(
        prompts: Any, params: Any, *, streaming: bool, coming: Coming, origin: Any
    ) -> AsyncIterator[Inbox]:
        [prompt] = prompts
        is_salted = isinstance(prompt, dict)  # where a server has several keys
        ids = prompt["prompt_token_ids"] if is_salted else getattr(prompt, "ids", prompt)
        given.append(live.server.llm.tokenizer.decode(list(ids)))
        inbox = Inbox()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        news: list[News] = []
        for i, piece in enumerate(pieces if streaming else []):
            end = reason if i == len(pieces) - 1 else None
            chunk = CompletionChunk(
                request_index=0, index=0, text_delta=piece, token_ids_delta=[1], finish_reason=end
            )
            news.append((0, chunk))
        done = completion(0, [1, 2], [-1.0, -2.0], reason, text=text)
        output = RequestOutput(request_id="1", prompt=None, prompt_token_ids=[1], outputs=[done])
        for one in (*news, (0, output)):
            asyncio.get_running_loop().call_soon(inbox.put, [one])
        yield inbox

    monkeypatch.setattr(live.server.llm, "run", run)
    return given


def both(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer, which its stream adds up to."""
    [choice] = live.post(CHAT, body)["choices"]
    message: dict[str, Any] = {}
    reasons = []
    for event in live.events(CHAT, body):
        [piece] = event["choices"]
        reasons.append(piece["finish_reason"])
        for name, value in piece["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            calls = message.setdefault(name, [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({k: v for k, v in call.items() if k != "index"})
                else:
                    own = calls[call["index"]]["function"]
                    own["arguments"] += call["function"]["arguments"]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
    whole = {k: v for k, v in choice["message"].items() if k != "refusal"}
    for found in (message, whole):
        found["content"] = found["content"] or ""
        for call in found.get("tool_calls", []):
            assert call.pop("id").startswith("call_") and call.pop("type") == "function"
    assert message == whole
    return choice


def test_reasoning_and_a_call(live: Live, monkeypatch: pytest.MonkeyPatch):
    given = write(live, monkeypatch, THOUGHT + CALL)
    choice = both(live, ASK)
    assert given == ["weather,u:so?;a:"] * 2
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == "It rains." and message["content"] == "Let me see."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"a": [1, 2]}'}


def test_reasoning_that_the_prompt_has_opened(live: Live, monkeypatch: pytest.MonkeyPatch):
    write(live, monkeypatch, THOUGHT.removeprefix("<think>") + "Yes.")
    body = ASK | {"chat_template_kwargs": {"open": True}}
    message = both(live, body)["message"]
    assert (message["reasoning_content"], message["content"]) == ("It rains.", "Yes.")


def test_without_tools_a_call_is_text(live: Live, monkeypatch: pytest.MonkeyPatch):
    write(live, monkeypatch, CALL)
    for body in ({"messages": ASK["messages"]}, ASK | {"tool_choice": "none"}):
        choice = both(live, body)
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def test_a_call_that_is_cut_off(live: Live, monkeypatch: pytest.MonkeyPatch):
    write(live, monkeypatch, CALL[:-20], "length")
    choice = both(live, ASK)
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"a": [1, 2]}'.startswith(call["function"]["arguments"])


def test_results_go_back_to_the_model(live: Live, monkeypatch: pytest.MonkeyPatch):
    given = write(live, monkeypatch, "Wet.")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": 5}'}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    assert both(live, ASK | {"messages": messages})["message"]["content"] == "Wet."
    assert given[0] == "weather,u:so?;a:<tool_call>weather5</tool_call>;t:rain;a:"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"function": {"name": "two words"}}]}, "tools"),
        ({"tools": [{"function": {"name": "a" * 200}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools"),
    ],
)
def test_tools_that_are_none(live: Live, body: dict[str, Any], param: str):
    status, answer, _ = live.request(CHAT, ASK | body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_template_without_tools_is_no_silent_loss(tmp_path: Path):
    with serving(LLM(write_folder(tmp_path / "tiny"), **SETTINGS)) as live:
        status, answer, _ = live.request(CHAT, ASK)
        assert (status, answer["error"]["code"]) == (400, "unsupported_field")
        assert live.request(CHAT, ASK | {"tool_choice": "none"})[0] == 200
        assert json.dumps(answer)
