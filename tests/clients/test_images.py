"""Images by the packages `openai` and `anthropic`: as data: URLs and as base64."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from tests.openai.live import Live, serving

pytestmark = pytest.mark.clients
openai: Any = pytest.importorskip("openai", reason="the extra 'clients' is not installed")
anthropic: Any = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
vision: Any = pytest.importorskip("tests.vision_folder", reason="pip install 'jpaged[images]'")

TOKENS = len("u:what?;a:") + 2 + vision.ROWS


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    llm = LLM(vision.write_vision_folder(tmp_path_factory.mktemp("seeing")), **vision.ENGINE)
    llm.chat(vision.seen(), SamplingParams(max_tokens=2), use_tqdm=False)
    with serving(llm) as live:
        yield live
        live.assert_nothing_left()


def test_openai(live: Live) -> None:
    url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        drawn = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        answer = client.chat.completions.create(messages=vision.seen(), **drawn)
        assert answer.usage.prompt_tokens == TOKENS
        pieces = client.chat.completions.create(messages=vision.seen(), stream=True, **drawn)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == answer.choices[0].message.content
        image = {"type": "input_image", "image_url": vision.data_url(), "detail": "auto"}
        content = [image, {"type": "input_text", "text": "what?"}]
        response = client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": content}],
            max_output_tokens=4,
            temperature=0,
        )
        assert response.output_text == text and response.usage.input_tokens == TOKENS
        torn = vision.seen(vision.data_url(vision.png()[:-40]))
        with pytest.raises(openai.BadRequestError, match="truncated or damaged"):
            client.chat.completions.create(messages=torn, **drawn)


def test_anthropic(live: Live) -> None:
    url = f"http://127.0.0.1:{live.port}"
    data = base64.b64encode(vision.png()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        answer = client.messages.create(max_tokens=4, extra_body={"temperature": 0}, **asked)
        assert answer.content[0].text
        assert client.messages.count_tokens(**asked).input_tokens == TOKENS
        with client.messages.stream(max_tokens=4, extra_body={"temperature": 0}, **asked) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
        content[0] = {"type": "image", "source": {"type": "url", "url": "https://a.org/x.png"}}
        with pytest.raises(anthropic.BadRequestError, match="hosts"):
            client.messages.create(max_tokens=4, **asked)
