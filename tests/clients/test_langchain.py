"""The `langchain-openai` package against a server: chats, tools, forms, text, embeddings."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.served import KEY, Trip, demo, url, whole
from tests.openai.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # they are its own
openai_of: Any = pytest.importorskip("langchain_openai", reason="it is not installed")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with demo() as live:
        yield live


@pytest.fixture(scope="module")
def to(live: Live) -> dict[str, Any]:
    return {"base_url": url(live), "api_key": KEY, "model": "demo", "max_retries": 0}


def test_chats(to: Any) -> None:
    chat = openai_of.ChatOpenAI(max_tokens=20, seed=4, **to)
    answer = chat.invoke("Write a class.")
    assert answer.content and answer.usage_metadata["output_tokens"] <= 20
    chunks = list(chat.stream("Write a class.", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert used[-1]["output_tokens"] == answer.usage_metadata["output_tokens"]
    assert len(chat.batch(["a", "b", "c"])) == 3
    known = chat.bind(logprobs=True, top_logprobs=2).invoke("a").response_metadata["logprobs"]
    assert len(known["content"][0]["top_logprobs"]) == 2
    by_responses = openai_of.ChatOpenAI(max_tokens=20, use_responses_api=True, **to)
    assert by_responses.invoke("Write a class.").content


def test_a_loop_of_tools(to: Any) -> None:
    pytest.importorskip("llguidance")
    from langchain_core.messages import (  # pyright: ignore[reportMissingImports]
        HumanMessage,
        ToolMessage,
    )

    chat = openai_of.ChatOpenAI(max_tokens=200, seed=4, **to)
    talk: list[Any] = [HumanMessage("Write a class.")]
    message = chat.bind_tools([Trip], tool_choice="Trip").invoke(talk)
    [call] = message.tool_calls
    assert Trip(**call["args"])
    talk += [message, ToolMessage("booked", tool_call_id=call["id"])]
    assert chat.bind_tools([Trip]).invoke(talk).response_metadata["finish_reason"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_forms(to: Any, method: str) -> None:
    pytest.importorskip("llguidance")

    def ask(seed: int) -> Any:
        chat = openai_of.ChatOpenAI(max_tokens=300, seed=seed, temperature=1.0, **to)
        return chat.with_structured_output(Trip, method=method).invoke("Write a class.")

    assert isinstance(whole(ask), Trip)


def test_text_and_embeddings(to: Any) -> None:
    text = openai_of.OpenAI(max_tokens=8, **to)
    assert text.invoke("import os")
    # Else it tokenizes with OpenAI's vocabulary, which it asks for on the net.
    vectors = openai_of.OpenAIEmbeddings(check_embedding_ctx_length=False, **to)
    assert len(vectors.embed_documents(["a", "b"])) == 2
