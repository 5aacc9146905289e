"""The `anthropic` package against a server: whole messages, streams, tools, thinking, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from tests.openai.live import SIZES, TOOL_TEMPLATE, Live, serving

pytestmark = pytest.mark.clients
anthropic: Any = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
ASK: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 60,
    "messages": [{"role": "user", "content": "Write a class."}],
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.chat_template = TOOL_TEMPLATE
    llm = LLM(str(MODEL_PATH), tokenizer=tokenizer, **SIZES)
    with serving(llm, models=("demo",), api_keys=("secret",)) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    url = f"http://127.0.0.1:{live.port}"
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        yield client
    live.assert_nothing_left()


def test_a_message_and_its_stream(client: Any) -> None:
    drawn = {"seed": 4, "temperature": 0.7, "top_k": 20}
    more = {"system": "Be brief.", "extra_body": drawn}
    whole = client.messages.create(**ASK, **more)
    assert whole.type == "message" and whole.role == "assistant" and whole.content[0].text
    assert whole.usage.output_tokens <= 60
    with client.messages.stream(**ASK, **more) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(
        model="demo", messages=ASK["messages"], system="Be brief."
    ).input_tokens
    assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_tools(client: Any) -> None:
    pytest.importorskip("llguidance")
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.input["city"] in ("Rome", "Oslo")
    any_once = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**ASK, tools=[TOOL], tool_choice=any_once) as stream:
        final = stream.get_final_message()
    [called] = [block for block in final.content if block.type == "tool_use"]
    assert called.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**{**ASK, "messages": messages}, tools=[TOOL])
    assert after.content


def test_errors_are_the_clients(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**{**ASK, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="max_model_len"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "a " * 900}]})
    with (
        pytest.raises(anthropic.AuthenticationError),
        client.with_options(api_key="wrong") as stranger,
    ):
        stranger.messages.create(**ASK)


def test_in_a_loop(live: Live) -> None:
    async def main() -> list[str]:
        url = f"http://127.0.0.1:{live.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="secret") as client:
            asked = (client.messages.create(**ASK, extra_body={"seed": seed}) for seed in (1, 1, 2))
            answers = await asyncio.gather(*asked)
        return [answer.content[0].text for answer in answers]

    first, same, other = asyncio.run(main())
    assert first == same != other
