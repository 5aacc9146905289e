"""The `litellm` package against a server: as OpenAI's, as vLLM's and as Anthropic's."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.served import KEY, TALK, Trip, demo, url
from tests.openai.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # they are its own
litellm: Any = pytest.importorskip("litellm", reason="the extra 'clients-apart' is not installed")
PROVIDERS = ("openai/demo", "hosted_vllm/demo")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with demo() as live:
        yield live


@pytest.fixture(scope="module")
def ask(live: Live) -> dict[str, Any]:
    asked = {"messages": TALK, "max_tokens": 60, "seed": 4, "num_retries": 0}
    return asked | {"api_base": url(live), "api_key": KEY}


@pytest.mark.parametrize("model", PROVIDERS)
def test_chats_and_streams(ask: Any, model: str) -> None:
    answer = litellm.completion(model=model, **ask)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 60
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(model=model, **options, **ask))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [
        answer.usage.completion_tokens
    ]
    again = asyncio.run(litellm.acompletion(model=model, **ask))
    assert again.choices[0].message.content == text


@pytest.mark.parametrize("model", PROVIDERS)
def test_a_loop_of_tools(ask: Any, model: str) -> None:
    """Its vllm provider leaves additionalProperties out of the schemas that it sends."""
    pytest.importorskip("llguidance")
    schema = Trip.model_json_schema()
    tools = [{"type": "function", "function": {"name": "travel", "parameters": schema}}]
    must = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "travel"}}}
    message = (
        litellm.completion(model=model, **must, **ask | {"max_tokens": 200}).choices[0].message
    )
    [call] = message.tool_calls
    assert Trip.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
    talk = [*TALK, message.model_dump(), result]
    after = litellm.completion(model=model, tools=tools, **ask | {"messages": talk})
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_schemas(ask: Any) -> None:
    pytest.importorskip("llguidance")
    asked = ask | {"max_tokens": 300, "temperature": 1.0, "response_format": Trip}
    texts = []
    for seed in range(8):
        answer = litellm.completion(model="openai/demo", **asked | {"seed": seed}).choices[0]
        if answer.finish_reason == "stop":
            texts.append(answer.message.content)
            break
    assert texts and Trip.model_validate_json(texts[0])


def test_other_routes(ask: Any, live: Live) -> None:
    to = {"api_base": url(live), "api_key": KEY}
    text = litellm.text_completion(
        model="text-completion-openai/demo", prompt="import os\n", max_tokens=8, **to
    )
    assert text.choices[0].text and text.usage.completion_tokens == 8
    vectors = litellm.embedding(model="openai/demo", input=["a", "b"], **to)
    assert len(vectors.data) == 2
    response = litellm.responses(model="openai/demo", input="Write.", max_output_tokens=20, **to)
    assert response.output[0].content[0].text
    at = {"api_base": url(live).removesuffix("/v1"), "api_key": KEY}
    message = litellm.completion(model="anthropic/demo", messages=TALK, max_tokens=20, **at)
    assert message.choices[0].message.content


def test_errors_are_its_own(ask: Any) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", **ask)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model="openai/demo", **ask | {"api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        long = [{"role": "user", "content": "a " * 2000}]
        litellm.completion(model="openai/demo", **ask | {"messages": long})
