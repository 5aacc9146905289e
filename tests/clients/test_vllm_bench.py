"""What `vllm bench serve` sends, and how it reads the answers, by its source (vllm/benchmarks/lib,
of November 2026; the package itself wants a build of torch): for the backends openai, vllm,
openai-chat and openai-embeddings.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.served import KEY, demo
from tests.openai.live import Live

pytestmark = pytest.mark.clients
COUNT = 16  # --random-output-len


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with demo() as live:
        yield live


def completion(prompt: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": COUNT,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def chat(content: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": COUNT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion("import os\n")),
    ("/v1/completions", completion([17, 4, 9])),
    ("/v1/completions", completion("import os\n") | {"logprobs": 2, "temperature": 0.0}),
    ("/v1/chat/completions", chat([{"type": "text", "text": "Write a class."}])),
    ("/v1/chat/completions", chat("Write a class.") | {"top_p": 0.9, "top_k": 5, "min_p": 0.1}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_streams_as_it_reads_them(live: Live, path: str, body: dict[str, Any]) -> None:
    """An event with choices is a token to it; one without them has the usage."""
    headers = {"x-request-id": "benchmark-serving-0"}
    status, text, answered = live.request(path, body, key=KEY, **headers)
    assert status == 200 and answered["x-request-id"] == "benchmark-serving-0"
    *messages, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = [json.loads(m.removeprefix("data: ")) for m in messages if not m.startswith(":")]
    tokens = [event for event in events if event.get("choices")]
    if "messages" in body:
        drawn = [event["choices"][0]["delta"].get("content") for event in tokens]
    else:
        drawn = [event["choices"][0].get("text") for event in tokens]
    assert COUNT // 2 <= len(tokens) <= COUNT + 2 and any(drawn)
    [usage] = [event["usage"] for event in events if not event.get("choices")]
    assert usage["completion_tokens"] == COUNT and usage["prompt_tokens"] > 0


def test_what_it_asks_before(live: Live) -> None:
    status, models, _ = live.request("/v1/models", key=KEY)
    assert status == 200 and models["data"][0]["id"] == "demo" and models["data"][0]["root"]
    body = {"model": "demo", "input": "a b", "truncate_prompt_tokens": -1}
    status, answer, _ = live.request("/v1/embeddings", body, key=KEY)
    assert status == 200 and answer["usage"]["prompt_tokens"] > 0, answer
