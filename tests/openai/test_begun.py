"""Answers that begin with tokens of the request go on as the whole answer does."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM
from jpaged.demo import MODEL_PATH
from tests.text_model import write_folder
from tests.tiny import ENGINE

pytest.importorskip("starlette", reason="pip install 'jpaged[server]'")
pytest.importorskip("uvicorn", reason="pip install 'jpaged[server]'")

from tests.openai.live import Live, serving

SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES}
CHAT = "/v1/chat/completions"
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hey"}],
    "seed": 5,
    "temperature": 1.0,
    "top_k": 0,
    "max_tokens": 20,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 3,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_folder(tmp_path_factory.mktemp("server") / "tiny")
    with serving(LLM(folder, **SETTINGS)) as live:
        yield live


@pytest.fixture(autouse=True)
def _nothing_left(live: Live) -> Iterator[None]:
    yield
    live.assert_nothing_left()


@pytest.mark.parametrize("more", [{}, {"frequency_penalty": 1.5}, {"n": 2}])
def test_the_same_seed_goes_on_as_before(live: Live, more: Any) -> None:
    whole = live.post(CHAT, TALK | more)
    for choice in whole["choices"]:
        ids = choice["token_ids"]
        assert len(ids) == 20
        for cut in (1, 7, 19):
            begun = live.post(CHAT, TALK | more | {"answer_token_ids": ids[:cut]})
            answer = begun["choices"][choice["index"]]
            assert answer["token_ids"] == ids[cut:]
            assert answer["message"] == choice["message"]
            assert_alike(answer["logprobs"]["content"], choice["logprobs"]["content"][cut:])
            assert begun["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert begun["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_streams_begin_with_the_text(live: Live) -> None:
    choice = live.post(CHAT, TALK)["choices"][0]
    events = live.events(CHAT, TALK | {"answer_token_ids": choice["token_ids"][:6]})
    pieces = [event["choices"][0] for event in events]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert text == choice["message"]["content"]
    drawn = [token for piece in pieces for token in piece.get("token_ids", [])]
    assert drawn == choice["token_ids"][6:]
    scored = [entry for piece in pieces if "logprobs" in piece for entry in content_of(piece)]
    assert_alike(scored, choice["logprobs"]["content"][6:])


def content_of(piece: dict[str, Any]) -> list[Any]:
    return piece["logprobs"]["content"]


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    """The tokens are equal; their logprobs are, but for the rounding of another step's shape."""
    assert [entry["token"] for entry in found] == [entry["token"] for entry in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        names = [[top["token"] for top in entry["top_logprobs"]] for entry in (one, other)]
        assert names[0] == names[1]


def test_another_token_is_taken(live: Live) -> None:
    """The third token becomes one of its alternatives, which its text shows."""
    choice = live.post(CHAT, TALK)["choices"][0]
    ids, third = choice["token_ids"], choice["logprobs"]["content"][2]
    tops = [t for t in third["top_logprobs"] if len(t["token"]) == 1]  # none of the special ones
    other = next(t for t in tops if t["token"] != third["token"])
    asked = {"tokens": ids, "return_token_strs": True}
    texts = live.post("/detokenize", asked)["token_strs"]
    assert "".join(texts) == live.post("/detokenize", asked)["prompt"]
    [other_id] = live.post("/tokenize", {"prompt": other["token"]})["tokens"]
    answer = live.post(CHAT, TALK | {"answer_token_ids": [*ids[:2], other_id]})["choices"][0]
    begins = "".join(t for t in texts[:2] if len(t) == 1) + other["token"]
    assert answer["message"]["content"].startswith(begins)
    assert len(answer["token_ids"]) == 17
    prompt = live.post("/tokenize", {"messages": TALK["messages"]})["tokens"]
    asked = {"messages": TALK["messages"], "answer_token_ids": ids}
    assert live.post("/tokenize", asked)["tokens"] == prompt + ids


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"answer_token_ids": [3, 99999]}, "99999"),
        ({"answer_token_ids": [-1]}, "-1"),
        ({"answer_token_ids": [3] * 20}, "max_tokens=20"),
        ({"answer_token_ids": [3] * 70, "max_tokens": 100}, "max_model_len=64"),
        ({"answer_token_ids": [3], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"answer_token_ids": [3], "sampling_mask": True, "top_k": 2}, "sampling_mask"),
        ({"answer_token_ids": "abc"}, "answer_token_ids"),
    ],
)
def test_what_cannot_begin_is_refused(live: Live, more: Any, said: str) -> None:
    status, answer, _ = live.request(CHAT, TALK | more)
    assert status == 400 and said in answer["error"]["message"], answer
    status, answer, _ = live.request("/v1/completions", {"prompt": "a", "answer_token_ids": [3]})
    assert status == 400 and "answer_token_ids" in answer["error"]["message"]


def test_a_form_goes_on() -> None:
    pytest.importorskip("llguidance")
    sizes = SETTINGS | {"token_buckets": (64,), "seq_buckets": (8,), "dtype": "float32"}
    with serving(LLM(str(MODEL_PATH), **sizes)) as live:
        body = TALK | {"structured_outputs": {"regex": "[a-c]{12}"}, "ignore_eos": False}
        choice = live.post(CHAT, body)["choices"][0]
        assert re.fullmatch("[a-c]{12}", choice["message"]["content"])
        ids = choice["token_ids"]
        begun = live.post(CHAT, body | {"answer_token_ids": ids[:3]})["choices"][0]
        assert begun["message"]["content"] == choice["message"]["content"]
        wrong = live.post("/tokenize", {"prompt": "z"})["tokens"]
        status, answer, _ = live.request(CHAT, body | {"answer_token_ids": wrong})
        assert status == 400 and "form" in answer["error"]["message"], answer
        live.assert_nothing_left()
